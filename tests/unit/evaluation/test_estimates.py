"""The statistics of evaluations, against values worked out by hand and against simulation."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_rl.evaluation.estimates import (
    interval,
    ks_of,
    paired_difference,
    pass_at_k,
)


@given(st.integers(1, 8), st.data())
def test_pass_at_k_counts_every_choice(n: int, data: st.DataObject) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    passed = [index < c for index in range(n)]
    choices = list(itertools.combinations(passed, k))
    assert pass_at_k(np.array([c]), n, k)[0] == pytest.approx(sum(map(any, choices)) / len(choices))


def test_pass_at_more_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="pass@5 needs"):
        pass_at_k(np.array([1]), 4, 5)
    assert ks_of(1) == [1] and ks_of(4) == [1, 2, 4] and ks_of(6) == [1, 2, 4, 6] and ks_of(16) == [1, 2, 4, 8, 16]


def test_an_interval_has_the_width_of_the_normal_one_where_that_holds() -> None:
    values = np.random.default_rng(1).normal(0.5, 1.0, size=400)
    found = interval(values)
    half = 1.96 * values.std() / math.sqrt(400)
    assert found.mean == values.mean()
    assert found.low == pytest.approx(values.mean() - half, abs=0.01)
    assert found.high == pytest.approx(values.mean() + half, abs=0.01)
    assert interval(values) == found, "seeded: the same again"
    assert math.isnan(interval(np.array([1.0])).low)


def test_a_paired_test_counts_all_signs_of_few_prompts() -> None:
    # Differences 1, 1, 1, 0: three that differ have 8 signs, of which two (all plus, all minus) are as far from 0.
    found = paired_difference(np.array([0.0, 0, 0, 1]), np.array([1.0, 1, 1, 1]))
    assert found.mean == 0.75 and found.p == pytest.approx(2 / 8)
    # Differences 3, -1: sums of signs 4, 2, -2, -4, of which all are at least |2|.
    assert paired_difference(np.array([0.0, 1]), np.array([3.0, 0])).p == pytest.approx(1.0)
    same = paired_difference(np.array([0.2, 0.4]), np.array([0.2, 0.4]))
    assert (same.mean, same.low, same.high, same.p) == (0.0, 0.0, 0.0, 1.0)


def test_drawn_signs_agree_with_the_test_that_is_exact_for_large_samples() -> None:
    rng = np.random.default_rng(3)
    first, second = rng.normal(0, 1, 200), rng.normal(0.2, 1, 200)
    differences = second - first
    z = differences.mean() / (differences.std() / math.sqrt(200))
    normal = math.erfc(abs(z) / math.sqrt(2))
    assert paired_difference(first, second).p == pytest.approx(normal, abs=0.01)
