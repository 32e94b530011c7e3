"""Estimates from a sample of prompts, with seeded draws. Axes: `_P` prompts, `_PN` the n responses to
each."""

from __future__ import annotations

import itertools
import math

import numpy as np

from grpo_rl.frozen import frozen

LEVEL = 0.95
SEED = 0
RESAMPLES = 10_000
SHUFFLES = 100_000
EXACT_UP_TO = 16
"""Prompts for which all signs are counted; for more they are drawn."""
_AT_ONCE = 2**22
"""Numbers drawn at a time, for any number of prompts."""


@frozen
class Estimate:
    mean: float
    low: float
    high: float


@frozen
class Difference(Estimate):
    p: float
    """The probability of a difference at least as large, either way, were the two sides exchangeable."""


def pass_at_k(passed_P: np.ndarray, n: int, k: int) -> np.ndarray:
    """For each prompt the unbiased estimate of the probability that one of k responses passes.

    1 - C(n - c, k) / C(n, k) for c of n that passed, as the product 1 - prod_{i = n-c+1}^{n} (1 - k / i), which does not
    overflow: Chen et al., "Evaluating large language models trained on code" (arXiv 2107.03374), section 2.1.
    """
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs at least {k} responses to each prompt; there are {n}")
    of_count = np.array([1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1)) for c in range(n + 1)])
    chances_P: np.ndarray = of_count[np.asarray(passed_P, dtype=np.int64)]
    return chances_P


def ks_of(n: int) -> list[int]:
    """The powers of two up to n, and n."""
    return [*(2**exponent for exponent in range(n.bit_length()) if 2**exponent < n), n]


def interval(values_P: np.ndarray) -> Estimate:
    """The mean, and percentiles (95 %) of the means of resampled prompts; of one prompt both ends are NaN.

    Efron and Tibshirani, "An introduction to the bootstrap" (1993), section 13.3.
    """
    values_P = np.asarray(values_P, dtype=np.float64)
    if len(values_P) < 2:
        return Estimate(float(values_P.mean()), math.nan, math.nan)
    low, high = np.quantile(_resampled_means(values_P), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(float(values_P.mean()), float(low), float(high))


def paired_difference(first_P: np.ndarray, second_P: np.ndarray) -> Difference:
    """The second model's values minus the first's.

    The interval is that of a bootstrap over prompts. `p` is of a permutation test: each prompt's difference
    keeps or changes its sign at random (Good, "Permutation, parametric and bootstrap tests of hypotheses",
    2005, section 3.2). All signs are counted for up to 16 prompts that differ, else 100,000 are drawn and the
    data count as one more.
    """
    differences_P = np.asarray(second_P, dtype=np.float64) - np.asarray(first_P, dtype=np.float64)
    if len(np.atleast_1d(first_P)) != len(np.atleast_1d(second_P)):
        raise ValueError(f"a paired test needs the same prompts: {len(first_P)} and {len(second_P)}")
    difference = interval(differences_P)
    return Difference(difference.mean, difference.low, difference.high, _sign_flips(differences_P))


def _resampled_means(values: np.ndarray) -> np.ndarray:
    rng, count = np.random.default_rng(SEED), len(values)
    at_once = max(1, _AT_ONCE // count)
    parts = [
        values[rng.integers(0, count, size=(min(at_once, RESAMPLES - start), count))].mean(axis=1)
        for start in range(0, RESAMPLES, at_once)
    ]
    return np.concatenate(parts)


def _sign_flips(differences: np.ndarray) -> float:
    """The two-sided p of the mean under random signs. Zeros have no sign."""
    sizes = np.abs(differences[differences != 0])
    if not len(sizes):
        return 1.0
    # Sums that are equal but for rounding are as far from 0.
    least = abs(float(differences.sum())) - 1e-12 * (1.0 + sizes.sum())
    if len(sizes) <= EXACT_UP_TO:
        signs = np.array(list(itertools.product((-1.0, 1.0), repeat=len(sizes))))
        return float(np.mean(np.abs(signs @ sizes) >= least))
    rng, count = np.random.default_rng(SEED), 0
    at_once = max(1, _AT_ONCE // len(sizes))
    for start in range(0, SHUFFLES, at_once):
        size = (min(at_once, SHUFFLES - start), len(sizes))
        signs = rng.integers(0, 2, size=size, dtype=np.int8) * 2.0 - 1.0
        count += int(np.count_nonzero(np.abs(signs @ sizes) >= least))
    return (count + 1) / (SHUFFLES + 1)
