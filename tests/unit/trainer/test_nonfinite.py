from __future__ import annotations

import math

import pytest
import torch
from test_sync_trainer import make, make_config  # noqa: F401

from grpo_rl.errors import DivergedError
from grpo_rl.telemetry.rollouts.rollout_log import read_rollouts
from grpo_rl.types import Counts
from grpo_rl.workers.trained_rank import step_optimizer


def test_so_many_bad_steps_in_a_row_pass_and_the_next_one_stops_the_run(make) -> None:  # noqa: F811
    run, policy = make(make_config(max_nonfinite_steps=2), total_steps=9, with_val=False)
    bad, update = (1, 2, 4, 5, 6), policy.update
    policy.update = lambda batch: update(batch) | {"actor/nonfinite": 0.5 * (policy.version in bad)}
    with pytest.raises(DivergedError, match=r"actor not finite in 3 steps in a row \(trainer.max_nonfinite_steps\)"):
        run.fit()
    folder = run.output.run_dir.path
    assert run.step == 6 and not (folder / "nonfinite_step_3.jsonl").exists()
    assert [row["sample"] for row in read_rollouts(folder / "nonfinite_step_6.jsonl")] == [0, 1, 2, 3] * 2


@pytest.mark.parametrize(
    ("loss", "grad_norm", "tokens", "nonfinite", "moves"),
    [
        (1.0, 2.0, 5, 0.0, True),
        (math.nan, 2.0, 5, 1.0, False),
        (1.0, math.inf, 5, 1.0, False),
        (0.0, 0.0, 0, 0.0, False),
    ],
)
def test_weights_and_moments_move_only_by_a_finite_step_on_trained_tokens(
    loss: float, grad_norm: float, tokens: int, nonfinite: float, moves: bool
) -> None:
    weight_D = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight_D], lr=0.1, weight_decay=0.5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    weight_D.grad = torch.full((2,), grad_norm)
    counts = Counts(num_tokens=tokens, num_sequences=1, num_groups=1)
    assert step_optimizer(optimizer, scheduler, counts, loss, grad_norm) == {"same/nonfinite": nonfinite}
    assert (weight_D.tolist() != [1.0, 1.0]) == moves
    assert bool(optimizer.state) == moves
    assert optimizer.param_groups[0]["lr"] == (0.05 if moves else 0.1)
