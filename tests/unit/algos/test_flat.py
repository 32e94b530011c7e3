"""Float64 arithmetic on a long axis, in pieces: against plain loops, with pieces far smaller than the input."""

from __future__ import annotations

import math
import random

import pytest
import torch

from grpo_rl.algos.advantages import blockwise
from grpo_rl.algos.group_statistics import Groups
from grpo_rl.algos.segments import Segments


@pytest.fixture(params=[1, 7, 64, 1 << 17])
def piece(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(blockwise, "PIECE", request.param)
    return int(request.param)


LENGTHS = [0, 3, 0, 1, 40, 2, 100, 0]


def nested(values: list[float]) -> list[list[float]]:
    out, start = [], 0
    for length in LENGTHS:
        out.append(values[start : start + length])
        start += length
    return out


def test_sums_are_those_of_each_response() -> None:
    rng = random.Random(1)
    values = torch.tensor([rng.gauss(0, 1e4) for _ in range(sum(LENGTHS))])
    expected = [math.fsum(tokens) for tokens in nested(values.tolist())]
    sums_N = Segments(torch.tensor(LENGTHS)).sum(values.double())
    assert sums_N.dtype == torch.float64
    assert sums_N.tolist() == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.99, 1.0])
def test_suffix_sums_put_together_are_those_of_a_loop(piece: int, decay: float) -> None:
    rng = random.Random(2)
    values = torch.tensor([rng.gauss(0, 1) for _ in range(sum(LENGTHS))])
    out_T = torch.full((len(values),), math.nan, dtype=torch.float64)
    lots = list(blockwise.lots(torch.tensor(LENGTHS)))
    for lot in lots:
        lot.write(blockwise.suffix_sums(lot.rows(values), decay), out_T)
    expected = []
    for tokens in nested(values.tolist()):
        y = 0.0
        sums = []
        for value in reversed(tokens):
            y = value + decay * y
            sums.append(y)
        expected += sums[::-1]
    assert out_T.tolist() == pytest.approx(expected, rel=1e-13, abs=1e-13)
    assert sorted(n for lot in lots for n in lot.rollouts) == [1, 3, 4, 5, 6]


def test_whitening_gives_mean_0_and_variance_1_and_zeros_for_equal_numbers(piece: int) -> None:
    x_T = torch.randn(501, generator=torch.Generator().manual_seed(0)) * 3 + 100
    white_T = blockwise.whiten_(x_T.clone()).double()
    assert white_T.mean().item() == pytest.approx(0, abs=1e-6)
    assert white_T.var().item() == pytest.approx(1, rel=1e-6)
    assert blockwise.whiten_(torch.full((9,), 0.1)).tolist() == [0.0] * 9
    assert blockwise.whiten_(torch.zeros(0)).tolist() == []


def test_statistics_of_groups_by_hand() -> None:
    groups = Groups(torch.tensor([7, 2, 7, 2, 7, 5]))
    x_N = torch.tensor([0.0, 1.0, 3.0, 1.0, 6.0, 4.0])
    assert groups.count_N.tolist() == [3, 2, 3, 2, 3, 1]
    assert groups.sum(x_N).tolist() == [9, 2, 9, 2, 9, 4]
    assert groups.highest(x_N).tolist() == [6, 1, 6, 1, 6, 4]
    assert groups.constant(x_N).tolist() == [False, True, False, True, False, True]
    assert groups.deviation(x_N).tolist() == [-3, 0, 0, 0, 3, 0]
    assert groups.std(groups.deviation(x_N)).tolist() == [3, 0, 3, 0, 3, 0]
