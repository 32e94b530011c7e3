"""Segments: sums, means and broadcasts over ragged responses."""

from __future__ import annotations

import pytest
import torch

from grpo_rl.algos.segments import Segments

LENGTHS = torch.tensor([0, 2, 1, 0, 3, 0])
VALUES = [1.0, 2.0, 10.0, 3.0, 4.0, 8.0]


def test_sums_and_means_of_each_response_are_those_worked_out_by_hand() -> None:
    segments = Segments(LENGTHS)
    assert segments.sum(torch.tensor(VALUES)).tolist() == [0, 3, 10, 0, 15, 0]
    assert segments.mean(torch.tensor(VALUES)).tolist() == [0, 1.5, 10, 0, 5, 0]


def test_broadcast_puts_each_value_on_all_tokens() -> None:
    segments = Segments(LENGTHS)
    x_N = torch.tensor([7.0, 1.0, 2.0, 8.0, 3.0, 9.0])
    assert segments.broadcast(x_N).tolist() == [1, 1, 2, 3, 3, 3]


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
def test_batches_without_a_token_give_zeros_and_no_tokens(lengths: list[int]) -> None:
    segments = Segments(torch.tensor(lengths, dtype=torch.long))
    nothing_T = torch.zeros(0)
    zeros_N = [0.0] * len(lengths)
    assert segments.sum(nothing_T).tolist() == zeros_N
    assert segments.mean(nothing_T).tolist() == zeros_N
    assert segments.broadcast(torch.ones(len(lengths))).tolist() == []
