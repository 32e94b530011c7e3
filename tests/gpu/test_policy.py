"""The checks of `scripts/gpu_check.py` on a GPU: packed attention, bf16 layers under FSDP2, the chunked head and the rest."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none"),
]

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))
from gpu_checks import CHECKS  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that all checks share."""
    return tmp_path_factory.mktemp("models")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CHECKS)
def test_a_check_of_the_gpu_passes(name: str, folder: Path) -> None:
    from gpu_check import rows_of

    rows = list(rows_of(name, "cuda", folder))
    assert rows and not [row for row in rows if row.state == "failed"], rows


def test_the_objective_gives_the_same_loss_and_gradient_as_on_the_cpu() -> None:
    from grpo_rl.algos.losses.contract import LossInput
    from grpo_rl.algos.objective import Objective
    from grpo_rl.algos.segments import Segments
    from grpo_rl.types import Counts

    objective = Objective(loss_agg_mode="seq-mean-token-mean", kl_loss_type="low_var_kl", kl_loss_coef=0.1)
    generator = torch.Generator().manual_seed(3)
    lengths_N = torch.tensor([3, 1, 0, 7])
    columns = [torch.randn(11, generator=generator) - 2 for _ in range(4)]
    results = []
    for device in ("cpu", "cuda"):
        policy_T, old_T, ref_T, advantages_T = (column.detach().clone().to(device) for column in columns)
        policy_T.requires_grad_()
        segments = Segments(lengths_N.to(device))
        inputs = LossInput(policy_T, advantages_T, segments, old_logprobs_T=old_T, ref_logprobs_T=ref_T)
        loss, _ = objective(inputs, Counts(num_tokens=11, num_sequences=3, num_groups=2))
        loss.backward()
        assert policy_T.grad is not None
        results.append((loss.item(), policy_T.grad.cpu()))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-6)
    torch.testing.assert_close(results[0][1], results[1][1])
