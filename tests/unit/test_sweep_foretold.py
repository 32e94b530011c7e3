"""The end of a reward curve from its beginning: its interval holds what comes as often as it says."""

from __future__ import annotations

import numpy as np
import pytest

from grpo_rl.sweep.outcome import expected_end


def curve(generator: np.random.Generator, steps: int) -> np.ndarray:
    start, end, halfway, exponent = (generator.uniform(*bounds) for bounds in ((0.1, 0.4), (0.5, 1.0), (5, 60), (0.8, 2.0)))
    clean = start + (end - start) / (1 + (halfway / np.arange(1, steps + 1)) ** exponent)
    return clean + generator.normal(0, 0.03, steps)


def test_nine_of_ten_intervals_hold_the_end() -> None:
    generator = np.random.default_rng(4)
    held = []
    for _ in range(40):
        rewards = curve(generator, 60)
        found = expected_end(rewards[:30].tolist(), 60, 5)
        assert found is not None
        held.append(found.low <= rewards[-5:].mean() <= found.high)
    assert 0.80 <= np.mean(held) <= 0.98


def test_a_flat_curve_stays_and_few_steps_say_nothing() -> None:
    found = expected_end([0.5] * 20, 100, 5)
    assert found is not None and (found.low, found.mean, found.high) == pytest.approx((0.5, 0.5, 0.5), abs=1e-3)
    assert expected_end([0.5] * 7, 100, 5) is None
