"""The end of a reward curve, foretold from its beginning: a saturating curve, and an interval.

The curve is ScaleRL's (arXiv 2510.13786, equation 1): R(t) = R0 + (A - R0) / (1 + (T / t)^B), with a start R0, an asymptote A, the
step T at which half of the way is made, and an exponent B.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from grpo_rl.evaluation.estimates import Estimate

LEAST_STEPS = 8
"""Fewer than twice as many steps as the curve has parameters say nothing about its end."""
LEVEL = 0.90
_HALFWAYS = np.geomspace(0.1, 10.0, 30)
"""T, in lengths of what has been seen: beyond, the curve is flat or straight."""
_EXPONENTS = (0.7, 1.0, 1.4, 2.0, 3.0)
_DRAWS = 20_000


def expected_end(rewards: Sequence[float], end: int, last: int) -> Estimate | None:
    """Return the mean reward of steps `end - last + 1` to `end`, foretold from that of the first steps, with its 90 % interval.

    None for fewer than eight steps. The noise of a step is unknown. For each T and B of a grid the rest is a linear model in R0 and
    A - R0, whose posterior is a Student's t (Gelman et al., "Bayesian Data Analysis", section 14.2); the prior of A - R0 has three
    times the range of the rewards that were seen as its standard deviation, for a curve that has hardly begun to rise says nothing of A. The
    interval is taken from draws of the mixture over the grid, with the noise of the last steps added.
    """
    seen_T = np.asarray(rewards, dtype=np.float64)
    count = len(seen_T)
    if count < LEAST_STEPS:
        return None
    noise = max(np.std(np.diff(seen_T)) / np.sqrt(2), 1e-6)
    precision = np.diag([1e-9, (noise / max(3 * np.ptp(seen_T), 1e-6)) ** 2])
    fits = [
        _posterior(
            seen_T, _curve(1, count, halfway, exponent), _curve(end - last + 1, end, halfway, exponent).mean(0), precision
        )
        for halfway in _HALFWAYS * count
        for exponent in _EXPONENTS
    ]
    log_weight_G, mean_G, spread_G, noise_G = np.array(fits).T
    weight_G = np.exp(log_weight_G - log_weight_G.max())
    generator = np.random.default_rng(0)
    drawn_D = generator.choice(len(fits), _DRAWS, p=weight_G / weight_G.sum())
    spread_D = np.sqrt(spread_G[drawn_D] + noise_G[drawn_D] / last)
    end_D = mean_G[drawn_D] + generator.standard_t(count - 2, _DRAWS) * spread_D
    tail = (1 - LEVEL) / 2
    low, middle, high = np.quantile(end_D, [tail, 0.5, 1 - tail])
    return Estimate(float(middle), float(low), float(high))


def _curve(first: int, last: int, halfway: float, exponent: float) -> np.ndarray:
    """Return [steps, 2]: what R0 and A - R0 are multiplied by in each step."""
    steps_T = np.arange(first, last + 1, dtype=np.float64)
    return np.stack([np.ones_like(steps_T), 1.0 / (1.0 + (halfway / steps_T) ** exponent)], axis=-1)


def _posterior(seen_T: np.ndarray, curve_TP: np.ndarray, end_P: np.ndarray, precision_PP: np.ndarray) -> tuple[float, ...]:
    """Return the logarithm of the evidence, the expected end, its variance, and the variance of one step's noise."""
    moments_PP = curve_TP.T @ curve_TP + precision_PP
    fitted_P = np.linalg.solve(moments_PP, curve_TP.T @ seen_T)
    residual_T = seen_T - curve_TP @ fitted_P
    loss = max(float(residual_T @ residual_T + fitted_P @ precision_PP @ fitted_P), 1e-12)
    freedom = len(seen_T) - 2
    log_evidence = -freedom / 2 * np.log(loss) - np.linalg.slogdet(moments_PP)[1] / 2
    variance = loss / freedom
    return log_evidence, float(end_P @ fitted_P), float(variance * end_P @ np.linalg.solve(moments_PP, end_P)), variance
