"""Averaging modes and sums over ragged responses: values by hand, and the sum of shares."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from grpo_rl.algos.aggregate import AGGREGATIONS, group_tokens
from grpo_rl.algos.segments import Segments
from grpo_rl.registry import own_options
from grpo_rl.types import Counts

ALL = sorted(AGGREGATIONS)
LENGTHS = torch.tensor([3, 1, 0, 2])
VALUES = torch.tensor([1.0, 2.0, 3.0, 10.0, 4.0, 6.0])  # sums 6, 10, -, 10; means 2, 10, -, 5
GROUP = torch.tensor([5, 8, 8, 5])
COUNTS = Counts(num_tokens=6, num_sequences=3, num_groups=2)
FACTOR = 7.0


def average(mode: str, values_T: Tensor, lengths_N: Tensor, counts: Counts, tokens_N: Tensor) -> Tensor:
    """The mode called with the keywords that it takes."""
    aggregate = AGGREGATIONS.get(mode)
    keywords = {"group_tokens_N": tokens_N, "loss_scale_factor": FACTOR}
    return aggregate(values_T, Segments(lengths_N), counts, **own_options(aggregate, keywords))


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 26 / 6),
        ("token-sum", 26),
        ("seq-mean-token-sum", 26 / 3),
        ("seq-mean-token-sum-norm", 26 / 3 / 7),
        ("seq-mean-token-mean", 17 / 3),
        ("prompt-mean", (16 / 5 + 10 / 1) / 2),  # 6 + 10 over 3 + 2 tokens of one prompt, 10 over 1 of the other
    ],
)
def test_averages_by_hand(mode: str, expected: float) -> None:
    share = average(mode, VALUES, LENGTHS, COUNTS, group_tokens(LENGTHS, GROUP))
    assert share.shape == ()
    assert share.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("mode", sorted(set(ALL) - {"token-sum"}))
def test_only_the_global_counts_divide(mode: str) -> None:
    twice = Counts(num_tokens=12, num_sequences=6, num_groups=4)
    tokens_N = group_tokens(LENGTHS, GROUP)
    share = average(mode, VALUES, LENGTHS, COUNTS, tokens_N)
    assert 2 * average(mode, VALUES, LENGTHS, twice, tokens_N).item() == pytest.approx(share.item(), rel=1e-14)


@pytest.mark.parametrize("mode", ALL)
def test_a_micro_batch_without_tokens_contributes_zero_with_a_gradient(mode: str) -> None:
    values_T = torch.zeros(0, requires_grad=True)
    for counts in (COUNTS, Counts(num_tokens=0, num_sequences=0, num_groups=0)):
        share = average(mode, values_T, torch.tensor([0, 0]), counts, torch.tensor([0, 3]))
        assert share.item() == 0
        share.backward()


def test_counts_leave_out_what_has_no_trained_token() -> None:
    lengths_N, group_N = torch.tensor([3, 0, 2, 0]), torch.tensor([1, 1, 4, 9])
    assert Counts.of(lengths_N, group_N) == Counts(num_tokens=5, num_sequences=2, num_groups=2)
    assert group_tokens(lengths_N, torch.tensor([1, 1, 4, 1])).tolist() == [3, 3, 2, 3]
    assert group_tokens(lengths_N[:0], group_N[:0]).tolist() == []


@pytest.mark.parametrize(
    ("lengths", "values", "sums", "means"),
    [
        ([0, 2, 1, 0, 3, 0], [1.0, 2.0, 10.0, 3.0, 4.0, 8.0], [0, 3, 10, 0, 15, 0], [0, 1.5, 10, 0, 5, 0]),
        ([], [], [], []),
        ([0, 0], [], [0, 0], [0, 0]),
    ],
)
def test_sums_means_and_broadcasts_by_hand(
    lengths: list[int], values: list[float], sums: list[float], means: list[float]
) -> None:
    segments, values_T = Segments(torch.tensor(lengths, dtype=torch.long)), torch.tensor(values)
    assert segments.sum(values_T).tolist() == sums
    assert segments.mean(values_T).tolist() == means
    numbers = [number for number, length in enumerate(lengths) for _ in range(length)]
    assert segments.broadcast(torch.arange(len(lengths))).tolist() == numbers
