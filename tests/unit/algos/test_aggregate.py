"""Averaging modes: values by hand, the reference, and the sum of shares."""

from __future__ import annotations

import algos_reference as reference
import pytest
import torch

from grpo_rl.algos.aggregate import AGGREGATIONS
from grpo_rl.algos.segments import Segments
from grpo_rl.types import Counts

ALL = sorted(AGGREGATIONS)
LENGTHS = torch.tensor([3, 1, 0, 2])
VALUES = torch.tensor([1.0, 2.0, 3.0, 10.0, 4.0, 6.0])  # sums 6, 10, -, 10; means 2, 10, -, 5
COUNTS = Counts(num_tokens=6, num_sequences=3, num_groups=2)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("token-mean", 26 / 6), ("seq-mean-token-sum", 26 / 3), ("seq-mean-token-mean", 17 / 3)],
)
def test_averages_by_hand(mode: str, expected: float) -> None:
    share = AGGREGATIONS.get(mode)(VALUES, Segments(LENGTHS), COUNTS)
    assert share.shape == ()
    assert share.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("mode", ALL)
def test_only_the_global_counts_divide(mode: str) -> None:
    twice = Counts(num_tokens=12, num_sequences=6, num_groups=4)
    aggregate = AGGREGATIONS.get(mode)
    assert 2 * aggregate(VALUES, Segments(LENGTHS), twice) == aggregate(VALUES, Segments(LENGTHS), COUNTS)


@pytest.mark.parametrize("mode", ALL)
@pytest.mark.parametrize("seed", range(4))
def test_every_mode_agrees_with_the_plain_python_reference(mode: str, seed: int) -> None:
    data = reference.ragged(seed, num_rollouts=20)
    share = AGGREGATIONS.get(mode)(reference.as_float32(data.policy), Segments(torch.tensor(data.lengths)), data.counts())
    assert share.item() == pytest.approx(reference.average(mode, data.nested(data.policy)), rel=1e-12)


@pytest.mark.parametrize("mode", ALL)
def test_a_micro_batch_without_tokens_contributes_zero_with_a_gradient(mode: str) -> None:
    values_T = torch.zeros(0, requires_grad=True)
    for counts in (COUNTS, Counts(num_tokens=0, num_sequences=0, num_groups=0)):
        share = AGGREGATIONS.get(mode)(values_T, Segments(torch.tensor([0, 0])), counts)
        assert share.item() == 0
        share.backward()


@pytest.mark.parametrize("mode", ALL)
def test_gradients_of_every_mode_are_those_of_finite_differences(mode: str) -> None:
    values_T = VALUES.double().requires_grad_()
    assert torch.autograd.gradcheck(lambda v: AGGREGATIONS.get(mode)(v, Segments(LENGTHS), COUNTS), values_T)
