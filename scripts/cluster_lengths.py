"""Response lengths for the cluster model: sources that return so many lengths at a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np


def constant(length: int) -> Callable[[int], np.ndarray]:
    """Return a source of lengths that are all the same."""
    return lambda number: np.full(number, length, dtype=np.int64)


def lognormal(mean: float, spread: float, longest: int, seed: int = 0) -> Callable[[int], np.ndarray]:
    """Return a source of lognormal lengths with this mean before the cut at `longest`; `spread` is sigma of the logarithm."""
    rng = np.random.default_rng(seed)
    location = np.log(mean) - spread**2 / 2
    return lambda number: np.clip(np.rint(rng.lognormal(location, spread, number)), 1, longest).astype(np.int64)


def replayed(lengths: Sequence[int]) -> Callable[[int], np.ndarray]:
    """Return a source of measured lengths in their order, from the beginning again after the last."""
    measured, place = np.asarray(lengths, dtype=np.int64), 0

    def take(number: int) -> np.ndarray:
        nonlocal place
        taken = np.take(measured, range(place, place + number), mode="wrap")
        place += number
        return taken

    return take


def drawn_from(lengths: Sequence[int], seed: int = 0) -> Callable[[int], np.ndarray]:
    """Return a source that draws from measured lengths."""
    rng, measured = np.random.default_rng(seed), np.asarray(lengths, dtype=np.int64)
    return lambda number: rng.choice(measured, number)
