"""Runs side by side: which of them differ only in seeds, what differs in configuration, and whether results differ.

Results are compared at equal steps, at equal tokens and at equal seconds: a method that needs fewer steps may need more of
the others. Which test is made depends on what there is, and the result says which:
- two runs or more on both sides: a permutation test over runs, which is about the method;
- else, with validation responses in the folders: a paired test over prompts, which is about these runs only, as it does not
  contain what another seed would change;
- else none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import numpy as np

from grpo_rl.config.schema.fields import flat, leaves
from grpo_rl.errors import DataError
from grpo_rl.evaluation import estimates
from grpo_rl.evaluation.estimates import Difference
from grpo_rl.telemetry.metrics.metrics_file import read_metrics
from grpo_rl.telemetry.metrics.validation import validation_keys
from grpo_rl.telemetry.rollouts.rollout_log import prompt_key, read_rollouts, step_files
from grpo_rl.telemetry.rundir import run_config

Axis = Literal["step", "tokens", "seconds"]
AXES: dict[Axis, str] = {"step": "", "tokens": "perf/total_num_tokens", "seconds": "timing_s/step"}
"""The metric of a step whose sum so far is the place on each axis; of steps it is their number."""
SEEDS = ("trainer.seed", "data.seed", "actor_rollout_ref.rollout.seed", "actor_rollout_ref.actor.data_loader_seed")
LOCAL = ("trainer.default_local_dir", "trainer.experiment_name", "trainer.project_name", "trainer.logger", "trainer.dry_run")
"""Keys about names and places, in which runs of the same method differ."""
REWARD = "reward/mean"
LAST_STEPS = 5
"""Training steps whose mean reward counts: single ones are of few prompts."""


@dataclass(frozen=True)
class ComparedRun:
    """A run as its folder shows it."""

    folder: Path
    config: Mapping[str, Any]
    """Flat: values by dotted key."""
    records: Sequence[Mapping[str, float]]

    @property
    def seed_text(self) -> str:
        """The seeds of the run in one word: of the trainer, and of data and sampling where they are others."""
        return "/".join(dict.fromkeys(str(self.config[key]) for key in SEEDS[:3] if self.config.get(key) is not None))

    def curve(self, metric: str, axis: Axis) -> tuple[np.ndarray, np.ndarray]:
        """Return places and values of a metric along an axis; empty where it was not measured."""
        places, values, place = [], [], 0.0
        for record in self.records:
            place = float(record["step"]) if axis == "step" else place + record.get(AXES[axis], 0.0) * (record["step"] > 0)
            if metric in record:
                places.append(place)
                values.append(record[metric])
        return np.array(places), np.array(values)

    def nearest(self, metric: str, axis: Axis, at: float) -> tuple[int, float] | None:
        """Return step and value of the measurement that is nearest to a place of the axis; None without any."""
        places, values = self.curve(metric, axis)
        if not len(places):
            return None
        index = int(np.argmin(np.abs(places - at)))
        steps = [int(record["step"]) for record in self.records if metric in record]
        return steps[index], float(values[index])

    def recent(self, metric: str, axis: Axis, at: float) -> float | None:
        """Return the mean of the last few values up to a place of the axis; None where there is none up to there."""
        places, values = self.curve(metric, axis)
        before = values[places <= at * (1 + 1e-9)]
        return float(before[-LAST_STEPS:].mean()) if len(before) else None


@dataclass(frozen=True)
class RunGroup:
    """Runs that differ in nothing but seeds, names and places."""

    label: str
    runs: Sequence[ComparedRun]


@dataclass(frozen=True)
class Comparison:
    """One metric of two groups at equal places of one axis."""

    metric: str
    axis: Axis
    at: float
    first: float
    second: float
    difference: Difference | None
    over: str
    """The units of the test, in words: runs, or prompts of these runs; or why there is none."""


def read_run(folder: Path) -> ComparedRun:
    """Return the run in `folder`. Raises DataError where nothing was measured yet."""
    records = read_metrics(folder / "metrics.jsonl")
    if not records:
        raise DataError(f"{folder}: there is no metrics.jsonl with a step in it; give the folder of a run")
    config: dict[str, Any] = {}
    with suppress(DataError):
        config = flat(run_config(folder))
    return ComparedRun(folder, config, records)


def grouped(runs: Sequence[ComparedRun]) -> list[RunGroup]:
    """Return the runs in groups of the same configuration but for seeds, names and places, in the order of their first run."""
    found: dict[str, list[ComparedRun]] = {}
    for run in runs:
        own = {key: value for key, value in run.config.items() if key not in (*SEEDS, *LOCAL)}
        found.setdefault(json.dumps(own, sort_keys=True, default=str), []).append(run)
    groups = []
    for members in found.values():
        more = f" and {len(members) - 1} more" if len(members) > 1 else ""
        groups.append(RunGroup(f"{members[0].folder.name}{more}", members))
    return groups


def config_differences(groups: Sequence[RunGroup]) -> list[tuple[str, list[Any]]]:
    """Return the keys in which groups differ, each with its value in every group; seeds, names and places are left out."""
    configs = [group.runs[0].config for group in groups]
    keys = dict.fromkeys(key for config in configs for key in config)
    rows = []
    for key in keys:
        values = [config.get(key, leaves()[key].default if key in leaves() else None) for config in configs]
        if key not in (*SEEDS, *LOCAL) and any(value != values[0] for value in values[1:]):
            rows.append((key, values))
    return rows


def metrics_of(groups: Sequence[RunGroup]) -> list[str]:
    """Return the metrics that are compared: validation by source, then the training reward, as far as all runs have them."""
    runs = [run for group in groups for run in group.runs]
    names = [*dict.fromkeys(key for run in runs for record in run.records for key in validation_keys(record)), REWARD]
    return [name for name in names if all(any(name in record for record in run.records) for run in runs)]


def compare(first: RunGroup, second: RunGroup, metric: str, axis: Axis) -> Comparison | None:
    """Return the two groups' values at the last place that all runs reached; None where nothing was measured up to there."""
    runs = [*first.runs, *second.runs]
    ends = [run.curve("step", axis)[0][-1] for run in runs]
    at = float(min(ends))
    values = [_value_at(run, metric, axis, at) for run in runs]
    if any(value is None for value in values):
        return None
    numbers = [value for value in values if value is not None]
    ours, theirs = numbers[: len(first.runs)], numbers[len(first.runs) :]
    difference, over = _tested(first, second, metric, axis, at, ours, theirs)
    return Comparison(metric, axis, at, fmean(ours), fmean(theirs), difference, over)


def _value_at(run: ComparedRun, metric: str, axis: Axis, at: float) -> float | None:
    """Return the mean reward of the steps up to a place, or the validation that is nearest to it."""
    if metric == REWARD:
        return run.recent(metric, axis, at)
    found = run.nearest(metric, axis, at)
    return None if found is None else found[1]


def _tested(
    first: RunGroup,
    second: RunGroup,
    metric: str,
    axis: Axis,
    at: float,
    ours: Sequence[float],
    theirs: Sequence[float],
) -> tuple[Difference | None, str]:
    if min(len(ours), len(theirs)) >= 2:
        return estimates.difference_of_runs(ours, theirs), f"{len(ours)} and {len(theirs)} runs"
    if metric == REWARD:
        return None, "one run: no test"
    sides = [_by_prompt(group, metric, axis, at) for group in (first, second)]
    common = sorted(sides[0].keys() & sides[1].keys())
    if len(common) < 2:
        return None, "no responses of both"
    mine, other = (np.array([side[prompt] for prompt in common]) for side in sides)
    return estimates.paired_difference(mine, other), f"{len(common)} prompts"


def _by_prompt(group: RunGroup, metric: str, axis: Axis, at: float) -> dict[tuple[str, str], float]:
    """Return the mean value of the responses to each validation prompt, over the group's runs, at the validation nearest there."""
    from grpo_rl.evaluation.evaluation_results import values_of

    source = metric.removeprefix("val/").rpartition("/")[0]
    found: dict[tuple[str, str], list[float]] = {}
    for run in group.runs:
        nearest = run.nearest(metric, axis, at)
        files = dict(step_files(run.folder / "val"))
        if nearest is None or nearest[0] not in files:
            return {}
        records: dict[tuple[str, str], list[dict[str, Any]]] = {}
        try:
            for record in read_rollouts(files[nearest[0]]):
                if record["data_source"] == source:
                    records.setdefault(prompt_key(record), []).append(record)
        except (DataError, KeyError):
            return {}
        sizes = {len(group) for group in records.values()}
        if len(sizes) != 1:
            return {}
        values = values_of(dict(enumerate(records.values())))
        for prompt, value in zip(records, values.values_PN.mean(axis=1), strict=True):
            found.setdefault(prompt, []).append(float(value))
    return {prompt: fmean(values) for prompt, values in found.items() if len(values) == len(group.runs)}
