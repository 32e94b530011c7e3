"""What the doctor reads of a run, and what it finds in it."""

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
from grpo_rl.frozen import frozen
from grpo_rl.telemetry.metrics.metrics_file import JsonObject, Records, read_metrics
from grpo_rl.telemetry.metrics.validation import validation_keys
from grpo_rl.telemetry.rollout_log import read_rollouts, step_files
from grpo_rl.telemetry.rundir import run_config


@dataclass(frozen=True)
class Series:
    """The finite values of a metric, as (step, value). False without a value."""

    points: Sequence[tuple[int, float]]

    def __len__(self) -> int:
        return len(self.points)

    @cached_property
    def values(self) -> list[float]:
        return [value for _, value in self.points]

    @property
    def window(self) -> int:
        """Values that are averaged at either end: a fifth, from 1 to 10."""
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

    def since(self, compare: Callable[[float, float], bool], bound: float) -> int:
        """Return the step since which `compare` has held of value and bound; the last one if it does not."""
        step = self.points[-1][0]
        for at, value in reversed(self.points):
            if not compare(value, bound):
                break
            step = at
        return step

    def ends(self, digits: int = 3) -> str:
        return f"{self.first:.{digits}f} at first, {self.last:.{digits}f} now"


@dataclass(frozen=True)
class RunRecord:
    """A run as its folder shows it, finished or not; reading it starts no process and loads no torch."""

    config: Mapping[str, Any]  # as config.yaml, nested
    records: Records  # as `read_metrics` returns them
    rollout_files: Mapping[int, Path] = field(default_factory=dict)  # logged training rollouts by step
    val_files: Mapping[int, Path] = field(default_factory=dict)  # logged validation rollouts by step

    @classmethod
    def of_folder(cls, folder: Path) -> RunRecord:
        """Raises DataError if it is no run; one may have failed before its first step."""
        records = read_metrics(folder / "metrics.jsonl")
        if not records and not (folder / "status.json").is_file():
            raise DataError(
                f"{folder}: there is no metrics.jsonl with a step in it, and no status.json; give the folder of a run"
            )
        config: JsonObject = {}
        with suppress(DataError):
            config = run_config(folder)
        return cls(config, records, dict(step_files(folder / "rollouts")), dict(step_files(folder / "val")))

    @cached_property
    def training(self) -> Records:
        """Without the validation before training."""
        return [record for record in self.records if record.get("step", 0) > 0]

    @property
    def num_steps(self) -> int:
        return len(self.training)

    @cached_property
    def _settings(self) -> JsonObject:
        return flat(self.config)

    def setting(self, key: str, default: Any = None) -> Any:
        """Return a configured value, `default` if there is none that the key takes."""
        value = self._settings.get(key, default)
        return default if value_problem(key, value) else value

    def keys(self, prefix: str) -> list[str]:
        """Return the names of training metrics that begin so, in the order of the log."""
        return list(dict.fromkeys(key for record in self.training for key in record if key.startswith(prefix)))

    def series(self, key: str) -> Series:
        records = self.records if key.startswith("val/") else self.training
        points = [(int(record["step"]), float(record[key])) for record in records if key in record]
        return Series([(step, value) for step, value in points if math.isfinite(value)])

    @cached_property
    def validation_keys(self) -> list[str]:
        return list(dict.fromkeys(key for record in self.records for key in validation_keys(record)))

    @cached_property
    def rewards(self) -> Series:
        return self.series("reward/mean")

    @property
    def reward_range(self) -> tuple[float, float]:
        """The lowest and the highest reward of any response; (0, 0) if none was logged."""
        low, high = self.series("reward/min").values, self.series("reward/max").values
        return min(low, default=0.0), max(high, default=0.0)

    @property
    def solved_share(self) -> float:
        """The present mean reward's place within `reward_range`, from 0 to 1."""
        low, high = self.reward_range
        return (self.rewards.last - low) / (high - low) if self.rewards and high > low else 0.0

    @property
    def gain(self) -> float:
        """The mean reward's rise since the beginning, as a share of `reward_range`."""
        low, high = self.reward_range
        return (self.rewards.last - self.rewards.first) / (high - low) if self.rewards and high > low else 0.0

    def entropy(self) -> Series:
        """In nats per token: the exact one, which is measured on demand, or its estimate."""
        return self.series("actor/entropy") or self.series("rollout/entropy")

    @cached_property
    def first_rollouts(self) -> list[JsonObject]:
        return _read(self.rollout_files, min(self.rollout_files, default=0))

    @cached_property
    def last_rollouts(self) -> list[JsonObject]:
        return _read(self.rollout_files, max(self.rollout_files, default=0))

    def validated(self, step: int) -> list[JsonObject]:
        return _read(self.val_files, step)


def _read(files: Mapping[int, Path], step: int) -> list[JsonObject]:
    with suppress(DataError, KeyError):
        return read_rollouts(files[step])
    return []


@frozen
class Finding:
    name: str
    weight: Literal["ill", "watch"]
    """ill: training does not work, or shows what is not true; watch: on its way there, or costly."""
    title: str  # the diagnosis in one sentence
    since: int  # the first step
    evidence: str  # numbers with their steps
    meaning: str  # the usual cause
    advice: tuple[str, ...]  # changes to make, with keys, the likeliest first
    source: str  # paper and section, or the formula itself
