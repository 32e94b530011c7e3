"""Log-probs by torch's fused linear cross-entropy: the values and gradients of the chunked head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import Ragged, make_folder, packed_policy
from torch import Tensor

from grpo_rl.models import forward
from grpo_rl.models.forward import PolicyModel

TOKENS = Ragged([5, 3, 9, 1], [4, 8, 2, 7])


def found(folder: Path, *, fused: bool, **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The log-probs, and the gradient of a sum in which each token weighs otherwise."""
    model: PolicyModel = packed_policy(folder, fused=fused, chunk_tokens=4, **options)
    logprobs_T = model(TOKENS.sequences()).logprobs_T
    weights_T = torch.linspace(-1, 2, len(logprobs_T))
    (logprobs_T * weights_T).sum().backward()
    return logprobs_T.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_are_those_of_the_chunked_head(tmp_path: Path, tied: bool, temperature: float) -> None:
    folder = make_folder(tmp_path / "m", "qwen3", tied)
    own_T, own = found(folder, fused=True, temperature=temperature)
    chunked_T, chunked = found(folder, fused=False, temperature=temperature)
    torch.testing.assert_close(own_T, chunked_T, atol=1e-5, rtol=1e-5)
    assert own.keys() == chunked.keys()
    for name in own:
        torch.testing.assert_close(own[name], chunked[name], atol=1e-5, rtol=1e-4)


def test_the_products_of_both_passes_are_made_with_tf32_allowed_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    during: list[str] = []
    hidden_TD, head_VD = torch.randn(6, 8, requires_grad=True), torch.randn(31, 8, requires_grad=True)

    class Looks(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.nn.functional.linear_cross_entropy:
                during.append(matmul.fp32_precision)
            return function(*args, **(kwargs or {}))

    with Looks():
        out_T = forward.fused_logprobs(hidden_TD, head_VD, None, torch.arange(6), 1.0, 4, "tf32")
    assert during == ["tf32"] and matmul.fp32_precision == before
    node = out_T.grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    node.register_prehook(lambda gradients: during.append(matmul.fp32_precision))
    node.register_hook(lambda gradients, given: during.append(matmul.fp32_precision))
    out_T.sum().backward()
    assert during == ["tf32", "tf32", before] and matmul.fp32_precision == before
