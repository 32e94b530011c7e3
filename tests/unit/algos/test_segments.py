"""Segments: sums, means and broadcasts over ragged responses."""

from __future__ import annotations

import pytest
import torch

from grpo_rl.algos.segments import Segments


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
