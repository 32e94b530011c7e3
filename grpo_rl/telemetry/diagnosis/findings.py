"""Findings of the doctor, the rules that make them, and their order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any

from grpo_rl.telemetry.diagnosis.run_record import RunRecord


class Weight(IntEnum):
    """The rank of a finding; the smaller, the earlier it is shown."""

    ILL = 0
    """Training does not work, or what it shows is not true."""
    WATCH = 1
    """Something is on its way to go wrong, or costs much."""
    NOTE = 2
    """Something looks odd and is right, or could be cheaper."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One diagnosis: what was seen, what it usually means, and what to change."""

    name: str
    weight: Weight
    title: str
    """The diagnosis in one sentence."""
    since: int
    """The step from which on it holds."""
    evidence: str
    """The numbers that it rests on, with their steps."""
    meaning: str
    """The usual cause."""
    advice: tuple[str, ...]
    """The changes to make, the likeliest first, with the keys."""
    source: str
    """The place that describes this: a paper with its section, or the formula itself."""

    def as_json(self) -> dict[str, Any]:
        """Return the finding as JSON can hold it."""
        return asdict(self) | {"weight": self.weight.name.lower()}


Rule = Callable[[RunRecord], Finding | None]


FEWEST_STEPS = 5
"""The training steps below which finding nothing says nothing: most rules need as many."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All findings about a run, the most important first."""

    findings: tuple[Finding, ...]
    num_steps: int

    @property
    def first(self) -> Finding | None:
        """The finding that explains most; None for a run that is well."""
        return next((one for one in self.findings if one.weight is not Weight.NOTE), None)

    @property
    def is_healthy(self) -> bool:
        """True where nothing but notes was found."""
        return self.first is None

    @property
    def is_undecided(self) -> bool:
        """True where nothing was found, in too few steps to find much."""
        return self.is_healthy and self.num_steps < FEWEST_STEPS
