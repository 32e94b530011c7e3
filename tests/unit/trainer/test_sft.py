"""The supervised schedule: demonstrations as batches, drawn in a seeded order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from grpo_rl.algos.losses.contract import LossInput
from grpo_rl.algos.objective import Objective
from grpo_rl.algos.segments import Segments
from grpo_rl.trainer import sft
from grpo_rl.types import Batch, Metrics


class Recorder:
    """An actor that remembers what it was trained on."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []

    def update(self, batch: Batch) -> Metrics:
        self.batches.append(batch)
        return {"actor/pg_loss": float(len(self.batches))}


def test_a_supervised_batch_trains_the_answers_alone_with_advantage_one():
    batch = sft.supervised_batch([((5, 6, 7), (8, 9)), ((4,), (3,))])
    assert batch.prompt_lengths_N.tolist() == [3, 1]
    assert batch.response_lengths_N.tolist() == [2, 1]
    assert batch.token_ids_S.tolist() == [5, 6, 7, 8, 9, 4, 3]
    assert batch.advantages_T.tolist() == [1, 1, 1]
    assert batch.group_N.tolist() == [0, 1]
    assert batch.old_logprobs_T is None and batch.counts().num_tokens == 3


def test_its_loss_is_the_mean_cross_entropy_of_the_answers_tokens():
    batch = sft.supervised_batch([((5, 6), (8, 9)), ((4,), (3,))])
    logprobs_T = torch.tensor([-0.5, -1.5, -4.0], requires_grad=True)
    inputs = LossInput(logprobs_T, batch.advantages_T, Segments(batch.response_lengths_N))
    loss, stats = Objective(loss_mode="reinforce")(inputs, batch.counts())
    assert float(loss.detach()) == pytest.approx(2.0) == float(stats["share/pg_loss"])
    loss.backward()
    assert logprobs_T.grad.tolist() == pytest.approx([-1 / 3] * 3)


def fit(num_rows: int, num_steps: int, batch_size: int, seed: int) -> tuple[list[list[int]], list[tuple[int, Any]]]:
    """The answers trained in each step; what was reported."""
    recorder, reported = Recorder(), []
    demonstrations = [((1,), (row,)) for row in range(num_rows)]
    sft.fit(
        recorder,  # type: ignore[arg-type]
        demonstrations,
        num_steps=num_steps,
        batch_size=batch_size,
        seed=seed,
        on_step=lambda step, metrics: reported.append((step, metrics["actor/pg_loss"])),
    )
    return [batch.token_ids_S.tolist()[1::2] for batch in recorder.batches], reported


def test_every_epoch_visits_every_row_once_in_a_new_order():
    steps, reported = fit(num_rows=6, num_steps=4, batch_size=3, seed=0)
    first, second = steps[0] + steps[1], steps[2] + steps[3]
    assert sorted(first) == sorted(second) == list(range(6))
    assert first != second
    assert reported == [(0, 1.0), (1, 2.0), (2, 3.0), (3, 4.0)]


def test_rows_left_over_at_the_end_of_an_epoch_open_the_next_batch():
    steps, _ = fit(num_rows=5, num_steps=5, batch_size=3, seed=1)
    drawn = [row for step in steps for row in step]
    assert sorted(drawn[:5]) == sorted(drawn[5:10]) == sorted(drawn[10:]) == list(range(5))


def test_a_batch_may_be_larger_than_the_data():
    steps, _ = fit(num_rows=2, num_steps=1, batch_size=5, seed=0)
    assert sorted(steps[0][:2]) == sorted(steps[0][2:4]) == [0, 1]


def test_the_order_depends_on_the_seed_alone():
    assert fit(20, 3, 6, seed=4) == fit(20, 3, 6, seed=4)
    assert fit(20, 3, 6, seed=4) != fit(20, 3, 6, seed=5)
