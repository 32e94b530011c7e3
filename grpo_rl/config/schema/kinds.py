"""Kinds of values: numbers with bounds, and names of which one is chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal


@dataclass(frozen=True, slots=True)
class Range:
    """Bounds of a number, used as `Annotated[float, Range(gt=0)]`. NaN is never inside."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None


Count = Annotated[int, Range(ge=1)]
CountOrZero = Annotated[int, Range(ge=0)]
CountOrOff = Annotated[int, Range(ge=-1)]
"""-1 switches it off, as in verl."""
Positive = Annotated[float, Range(gt=0, lt=float("inf"))]
NonNegative = Annotated[float, Range(ge=0, lt=float("inf"))]
Fraction = Annotated[float, Range(ge=0, le=1)]

RejectionMode = Literal[
    "token_k1", "token_k2", "token_k3",
    "seq_sum_k1", "seq_sum_k2", "seq_sum_k3",
    "seq_mean_k1", "seq_mean_k2", "seq_mean_k3",
    "seq_max_k2", "seq_max_k3",
]  # fmt: skip
