"""Quality of a reward model's scores, as its schedule measures, writes and draws it: values worked out by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from grpo_rl.algos.scoring_quality import pair_quality
from grpo_rl.data.training_rows.pairs import Pair, pair_batch
from grpo_rl.trainer.rows import scored_rows
from grpo_rl.types import Batch


class Rows(list[Pair]):
    """Pairs that make batches."""

    def batch(self, rows: range) -> Batch:
        return pair_batch([self[row] for row in rows])


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_the_quality_of_pairs_by_hand():
    measured = pair_quality(column(1.0, 0.0), column(0.0, 2.0), column(0.0, 0.5), center_coef=0.1)
    losses = [math.log1p(math.exp(-1.0)) + 0.1 * 1.0, math.log1p(math.exp(2.5)) + 0.1 * 4.0]
    assert measured["loss"] == pytest.approx(sum(losses) / 2)
    assert measured["accuracy"] == 0.5 and measured["margin"] == -0.5
    # Chosen 1 and 0 against rejected 0 and 2: one win, one tie, two losses.
    assert measured["auc"] == pytest.approx(1.5 / 4)
    sure = [1 / (1 + math.exp(-1.0)), 1 / (1 + math.exp(-2.0))]
    assert measured["brier"] == pytest.approx(((1 - sure[0]) ** 2 + sure[1] ** 2) / 2)
    assert measured["calibration_error"] == pytest.approx((1 - sure[0] + sure[1]) / 2)


def test_all_rows_are_scored_in_their_order_whatever_the_batch():
    pairs = [
        Pair(column(1).int().numpy(), column(*[2] * n).int().numpy(), column(*[3] * (n + 1)).int().numpy()) for n in (1, 2, 3)
    ]
    data = Rows(pairs)
    model = SimpleNamespace(scores=lambda batch: batch.response_lengths_N.float())
    for size in (1, 2, 5):
        scored = scored_rows(model, data, size)
        assert scored["chosen_P"].tolist() == [1, 2, 3] and scored["rejected_P"].tolist() == [2, 3, 4]
        assert not scored["margin_P"].any()
