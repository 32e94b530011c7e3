"""Noise of sampling by counting: values worked out with Python's integers, and whether draws look independent."""

from __future__ import annotations

import math

import pytest
import torch

from grpo_rl.rollout.counter_noise import exponential_noise, row_keys

MASK = 0xFFFFFFFF
VOCAB = 50_000


def splitmix(x: int) -> int:
    """Return the next number of SplitMix64, as its paper has it."""
    x = (x + 0x9E3779B97F4A7C15) & (2**64 - 1)
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return x ^ (x >> 31)


def lowbias(x: int) -> int:
    x ^= x >> 16
    x = (x * 0x7FEB352D) & MASK
    x ^= x >> 15
    x = (x * 0x846CA68B) & MASK
    return x ^ (x >> 16)


def noise(key: int, token: int) -> float:
    x = lowbias(lowbias(lowbias(token) ^ (key & MASK)) ^ (key >> 32))
    signed = x - 2**32 if x >= 2**31 else x
    return -math.log1p(-min(max(abs(signed) / 2**31, 2**-33), 1 - 2**-24))


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the distance in standard deviations of the statistic, which has nearly that many normal ones above its mean."""
    statistic = float(((counts - expected) ** 2 / expected).sum())
    freedom = len(counts) - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


def test_the_numbers_are_those_of_plain_arithmetic() -> None:
    seeds, positions = [0, 1, 2**63 - 1, -5], [0, 3, 2**20, 7]
    keys_B = row_keys(seeds, positions)
    assert keys_B.tolist() == [splitmix(splitmix(s % 2**64) ^ p) for s, p in zip(seeds, positions, strict=True)]
    noise_BV = exponential_noise(keys_B, 1000)
    for row, key in enumerate(keys_B.tolist()):
        expected = [-math.expm1(-noise(key, token)) for token in range(1000)]
        assert (-(-noise_BV[row].double()).expm1()).tolist() == pytest.approx(expected, rel=1e-6, abs=2**-24)


def test_a_row_has_the_same_bits_alone_and_in_any_company() -> None:
    seeds = list(range(9))
    together = exponential_noise(row_keys(seeds, seeds), VOCAB)
    for row in (8, 0, 4):
        assert torch.equal(exponential_noise(row_keys([row], [row]), VOCAB)[0], together[row])


def test_the_numbers_are_exponential_above_zero_and_finite() -> None:
    noise_BV = exponential_noise(row_keys(range(40), [0] * 40), VOCAB)
    assert float(noise_BV.min()) > 0 and bool(noise_BV.isfinite().all())
    # 64 intervals of equal probability.
    bins = (-(-noise_BV).expm1() * 64).long().clamp(max=63).flatten()
    counts = torch.bincount(bins, minlength=64).double()
    assert abs(chi_square(counts, torch.full((64,), counts.sum().item() / 64))) < 5
    # The small ones win a draw: they must not lie on a coarse grid.
    smallest = noise_BV.flatten().sort().values[:200].double()
    assert len(smallest.unique()) == 200 and float(smallest[0]) < 5e-6


@pytest.mark.parametrize("across", ["seeds", "positions"])
def test_tokens_are_drawn_as_often_as_their_probabilities_say(across: str) -> None:
    probs_V = torch.arange(1, 65).double().reciprocal()
    probs_V /= probs_V.sum()
    count = 60_000
    rows = list(range(count))
    keys_B = row_keys(rows, [11] * count) if across == "seeds" else row_keys([11] * count, rows)
    tokens_B = (probs_V / exponential_noise(keys_B, 64)).argmax(-1)
    counts = torch.bincount(tokens_B, minlength=64).double()
    assert abs(chi_square(counts, count * probs_V)) < 5
