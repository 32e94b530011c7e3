"""The linear layer of the CPU path: torch's values and gradients, whatever computes the product."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import Tensor, nn

from grpo_rl.models.linear import linear, reduced_linear, rounded, use_fast_layers


def _inputs(shape: tuple[int, ...], out: int, bias: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(len(shape) + out)
    x = torch.randn(*shape, generator=generator, dtype=dtype, requires_grad=True)
    weight = torch.randn(out, shape[-1], generator=generator, dtype=dtype, requires_grad=True)
    return x, weight, torch.randn(out, generator=generator, dtype=dtype, requires_grad=True) if bias else None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 7), (37, 24), (1, 50, 33), (2, 3, 5, 16), (0, 8)])
def test_values_and_gradients_are_those_of_float64(shape: tuple[int, ...], bias: bool, dtype: torch.dtype) -> None:
    inputs = _inputs(shape, 19, bias, dtype)
    exact = tuple(None if t is None else t.detach().double().requires_grad_() for t in inputs)
    out, want = linear(*inputs), torch.nn.functional.linear(*exact)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    (out.double() * weights).sum().backward()
    (want * weights).sum().backward()
    for ours, theirs in zip(inputs, exact, strict=True):
        if ours is not None and theirs is not None:
            assert ours.grad is not None and theirs.grad is not None
            torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-5, atol=1e-4)


# ---- reduced precision, as tensor cores round ------------------------------------------------------------------

ROUNDINGS = {"bfloat16": 2.0**-8, "tf32": 2.0**-11}


@pytest.mark.parametrize("precision", ROUNDINGS)
def test_only_inputs_are_rounded_and_sums_are_float32(precision) -> None:
    x, weight = torch.randn(40, 300, requires_grad=True), torch.randn(50, 300, requires_grad=True)
    bias = torch.randn(50)
    out = reduced_linear(x, weight, bias, precision, rounded(weight, precision))
    exact = x.double() @ weight.double().t() + bias.double()
    assert out.dtype == torch.float32
    limit = 2 * ROUNDINGS[precision] * (x.double().abs() @ weight.double().abs().t())
    assert ((out - exact).abs() <= limit + 1e-5).all()
    upstream = torch.randn(40, 50)
    gradients = torch.autograd.grad(out, (x, weight), upstream)
    for ours, plain in zip(gradients, torch.autograd.grad(x @ weight.t(), (x, weight), upstream), strict=True):
        assert ours.dtype == torch.float32 and float((ours - plain).norm() / plain.norm()) < 2 * ROUNDINGS[precision]
    # Numbers that have no more bits than that are not rounded at all.
    few = torch.randint(-8, 8, (30, 20)).float()
    assert torch.equal(reduced_linear(few, few, None, precision, rounded(few, precision)), few @ few.t())


FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "olmoe", "olmo2", "phi3"]


def norms_of(family: str) -> list[nn.Module]:
    """A norm of the family of 48 features with weights that differ, twice the same."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    [kind] = {value for name, value in vars(module).items() if name.endswith("RMSNorm") and value.__module__ == module.__name__}
    made = [kind(48), kind(48)]
    values = torch.rand(48, generator=torch.Generator().manual_seed(1)) + 0.5
    for norm in made:
        norm.weight.data.copy_(values)
    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_a_norm_in_one_function_has_the_values_and_gradients_of_the_familys(family: str) -> None:
    plain, fast = norms_of(family)
    use_fast_layers(fast)
    assert type(fast) is not type(plain) and isinstance(fast, type(plain))
    x, grad = torch.randn(3, 5, 48) * 4, torch.randn(3, 5, 48)
    results = []
    for norm in (plain, fast):
        own = x.clone().requires_grad_()
        out = norm(own)
        out.backward(grad)
        results.append((out.detach(), own.grad, norm.weight.grad))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=2e-6)
    half = x.bfloat16()
    assert torch.equal(plain.bfloat16()(half), fast.bfloat16()(half)), "other types go the family's own way"
