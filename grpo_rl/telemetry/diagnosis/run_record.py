"""What the doctor reads of a run, its configuration, its metrics by step and its rollouts, and what it finds in it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from grpo_rl.config.convert import value_problem
from grpo_rl.config.schema.fields import flat
from grpo_rl.errors import DataError
from grpo_rl.telemetry.metrics.metrics_file import read_metrics
from grpo_rl.telemetry.metrics.validation import validation_keys
from grpo_rl.telemetry.rollout_log import read_rollouts, step_files
from grpo_rl.telemetry.rundir import run_config


@dataclass(frozen=True)
class Series:
    """The finite values of one metric over the steps at which it was measured, as (step, value). Without a value it is false."""

    points: Sequence[tuple[int, float]]

    def __len__(self) -> int:
        return len(self.points)

    @cached_property
    def values(self) -> list[float]:
        return [value for _, value in self.points]

    @property
    def window(self) -> int:
        """How many values at either end are averaged: a fifth of them, at least 1, at most 10."""
        return max(1, min(10, len(self.points) // 5))

    @property
    def first(self) -> float:
        return statistics.fmean(self.values[: self.window])

    @property
    def last(self) -> float:
        return statistics.fmean(self.values[-self.window :])

    @property
    def now(self) -> float:
        return self.values[-1]

    def since(self, holds: Callable[[float], bool]) -> int:
        """Return the step from which on the condition has held without a break until now; the last one if it does not hold."""
        step = self.points[-1][0]
        for at, value in reversed(self.points):
            if not holds(value):
                break
            step = at
        return step

    def ends(self, digits: int = 3) -> str:
        """Return the means of both ends in words."""
        return f"{self.first:.{digits}f} at first, {self.last:.{digits}f} now"


@dataclass(frozen=True)
class RunRecord:
    """A run as its folder shows it, finished or not. Nothing here starts a process or loads torch."""

    config: Mapping[str, Any]
    """The resolved configuration, nested as in config.yaml."""
    records: Sequence[Mapping[str, float]]
    """The metrics of each step, ascending, as `read_metrics` returns them."""
    rollout_files: Mapping[int, Path] = field(default_factory=dict)
    """The training rollouts that were logged, by step."""
    val_files: Mapping[int, Path] = field(default_factory=dict)
    """The validation rollouts that were logged, by step."""

    @classmethod
    def of_folder(cls, folder: Path) -> RunRecord:
        """Return the record of the run in `folder`, which may have failed before its first step. Raises DataError for another folder."""
        records = read_metrics(folder / "metrics.jsonl")
        if not records and not (folder / "status.json").is_file():
            raise DataError(
                f"{folder}: there is no metrics.jsonl with a step in it, and no status.json; give the folder of a run"
            )
        config: dict[str, Any] = {}
        with suppress(DataError):
            config = run_config(folder)
        return cls(config, records, dict(step_files(folder / "rollouts")), dict(step_files(folder / "val")))

    @cached_property
    def training(self) -> Sequence[Mapping[str, float]]:
        """The records of training steps: without the validation before training."""
        return [record for record in self.records if record.get("step", 0) > 0]

    @property
    def num_steps(self) -> int:
        return len(self.training)

    @cached_property
    def _settings(self) -> dict[str, Any]:
        return flat(self.config)

    def setting(self, key: str, default: Any = None) -> Any:
        """Return the value of a dotted key of the configuration, `default` if there is none that the key takes."""
        value = self._settings.get(key, default)
        return default if value_problem(key, value) else value

    def series(self, key: str, *, validation: bool = False) -> Series:
        """Return the finite values of a metric over the training steps; with `validation` also that before training."""
        records = self.records if validation else self.training
        points = [(int(record["step"]), float(record[key])) for record in records if key in record]
        return Series([(step, value) for step, value in points if math.isfinite(value)])

    @cached_property
    def validation_keys(self) -> list[str]:
        """The metrics `val/<source>/mean@n` of the run."""
        return list(dict.fromkeys(key for record in self.records for key in validation_keys(record)))

    @property
    def reward_range(self) -> tuple[float, float]:
        """The lowest and the highest reward that any response got; (0, 0) if none was logged."""
        low, high = self.series("reward/min").values, self.series("reward/max").values
        return min(low, default=0.0), max(high, default=0.0)

    @property
    def solved_share(self) -> float:
        """The place of the present reward between the lowest and the highest that any response got, from 0 to 1."""
        (low, high), rewards = self.reward_range, self.series("reward/mean")
        return (rewards.last - low) / (high - low) if rewards and high > low else 0.0

    @property
    def gain(self) -> float:
        """The rise of the mean reward since the beginning, as a share of the distance of the lowest from the highest."""
        (low, high), rewards = self.reward_range, self.series("reward/mean")
        return (rewards.last - rewards.first) / (high - low) if rewards and high > low else 0.0

    def entropy(self) -> Series:
        """Return the entropy in nats per token by step: the exact one, which is measured on demand, or else its estimate."""
        return self.series("actor/entropy") or self.series("rollout/entropy")

    @cached_property
    def first_rollouts(self) -> list[dict[str, Any]]:
        """The rollouts of the first logged step; none if there is no file that can be read."""
        return _read(self.rollout_files, min(self.rollout_files, default=0))

    @cached_property
    def last_rollouts(self) -> list[dict[str, Any]]:
        return _read(self.rollout_files, max(self.rollout_files, default=0))

    def validated(self, step: int) -> list[dict[str, Any]]:
        return _read(self.val_files, step)


def _read(files: Mapping[int, Path], step: int) -> list[dict[str, Any]]:
    with suppress(DataError):
        return read_rollouts(files[step]) if step in files else []
    return []


@dataclass(frozen=True, slots=True)
class Finding:
    """One diagnosis: what was seen, what it usually means, and what to change."""

    name: str
    weight: Literal["ill", "watch"]
    """Whether training does not work, or what it shows is not true; or something is on its way to go wrong, or costs much."""
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
