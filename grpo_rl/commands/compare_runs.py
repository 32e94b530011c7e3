"""`grpo-rl compare RUN RUN ...`: what differs between runs in configuration, and whether their results do.

Results are compared at equal steps, at equal tokens and at equal seconds: a method that needs fewer steps may need more of
the others. Two runs or more on both sides are tested by a permutation over runs, which is about the method. Whether the
policies of two single runs differ is what `grpo-rl eval` says of the files of their validations.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import numpy as np

from grpo_rl.arguments import Arguments
from grpo_rl.config.convert import show
from grpo_rl.config.schema.fields import flat, leaves
from grpo_rl.errors import ConfigError, DataError
from grpo_rl.evaluation.estimates import Difference, difference_of_runs
from grpo_rl.evaluation.evaluation_results import p_text
from grpo_rl.telemetry.metrics.metrics_file import read_metrics
from grpo_rl.telemetry.metrics.validation import validation_keys
from grpo_rl.telemetry.rundir import find_run, run_config
from grpo_rl.telemetry.terminal.console import Console
from grpo_rl.telemetry.terminal.text import duration, safe_text

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

    def places(self, axis: Axis) -> np.ndarray:
        """Return the place of each record on an axis."""
        if axis == "step":
            return np.array([float(record["step"]) for record in self.records])
        return np.cumsum([record.get(AXES[axis], 0.0) * (record["step"] > 0) for record in self.records])

    def value_at(self, metric: str, axis: Axis, at: float) -> tuple[int, float] | None:
        """Return step and value of a metric at a place of the axis; None where it was not measured.

        Of a validation it is the one that is nearest, of the training reward the mean of the last few steps up to there.
        """
        measured = np.flatnonzero([metric in record for record in self.records])
        places = self.places(axis)[measured]
        if metric == REWARD:
            chosen = measured[places <= at * (1 + 1e-9)][-LAST_STEPS:]
        else:
            chosen = measured[np.argsort(np.abs(places - at), kind="stable")[:1]]
        if not len(chosen):
            return None
        records = [self.records[index] for index in chosen.tolist()]
        return int(records[-1]["step"]), fmean(record[metric] for record in records)


Method = Sequence[ComparedRun]
"""Runs that differ in nothing but seeds, names and places."""


@dataclass(frozen=True)
class Comparison:
    """One metric of two groups at equal places of one axis."""

    metric: str
    axis: Axis
    at: float
    first: float
    second: float
    difference: Difference | None
    """None where a side has one run alone."""


def read_run(folder: Path) -> ComparedRun:
    """Return the run in `folder`. Raises DataError where nothing was measured yet."""
    records = read_metrics(folder / "metrics.jsonl")
    if not records:
        raise DataError(f"{folder}: there is no metrics.jsonl with a step in it; give the folder of a run")
    config: dict[str, Any] = {}
    with suppress(DataError):
        config = flat(run_config(folder))
    return ComparedRun(folder, config, records)


def grouped(runs: Sequence[ComparedRun]) -> list[Method]:
    """Return the runs in groups of the same configuration but for seeds, names and places, in the order of their first run."""
    found: dict[str, list[ComparedRun]] = {}
    for run in runs:
        own = {key: value for key, value in run.config.items() if key not in (*SEEDS, *LOCAL)}
        found.setdefault(json.dumps(own, sort_keys=True, default=str), []).append(run)
    return list(found.values())


def config_differences(groups: Sequence[Method]) -> list[tuple[str, list[Any]]]:
    """Return the keys in which groups differ, each with its value in every group; seeds, names and places are left out."""
    configs = [group[0].config for group in groups]
    keys = dict.fromkeys(key for config in configs for key in config)
    rows = []
    for key in keys:
        values = [config.get(key, leaves()[key].default if key in leaves() else None) for config in configs]
        if key not in (*SEEDS, *LOCAL) and any(value != values[0] for value in values[1:]):
            rows.append((key, values))
    return rows


def metrics_of(groups: Sequence[Method]) -> list[str]:
    """Return the metrics that are compared: validation by source, then the training reward, as far as all runs have them."""
    runs = [run for group in groups for run in group]
    names = [*dict.fromkeys(key for run in runs for record in run.records for key in validation_keys(record)), REWARD]
    return [name for name in names if all(any(name in record for record in run.records) for run in runs)]


def compare(first: Method, second: Method, metric: str, axis: Axis) -> Comparison | None:
    """Return the two methods' values at the last place that all runs reached; None where nothing was measured up to there."""
    at = float(min(run.places(axis)[-1] for run in (*first, *second)))
    sides = [[found[1] for run in side if (found := run.value_at(metric, axis, at)) is not None] for side in (first, second)]
    if [len(side) for side in sides] != [len(first), len(second)]:
        return None
    difference = difference_of_runs(*sides) if min(map(len, sides)) >= 2 else None
    return Comparison(metric, axis, at, fmean(sides[0]), fmean(sides[1]), difference)


def main(argv: Sequence[str]) -> int:
    """Print the comparison. Returns 0. Raises ConfigError and DataError for what is no run."""
    options = _parser().read(argv)
    folders = list(dict.fromkeys(find_run(text).resolve() for text in options.runs))
    if len(folders) < 2:
        raise ConfigError("grpo-rl compare needs two runs at least: grpo-rl compare runs/grpo_rl/a runs/grpo_rl/b")
    groups = grouped([read_run(folder) for folder in folders])
    with closing(Console()) as console:
        _configurations(groups, console)
        _results(groups, console)
        runs = " ".join(shlex.quote(safe_text(str(run.folder))) for group in groups for run in group)
        console.info("")
        console.info(f"their curves over each other: grpo-rl page {runs}")
    return 0


def _configurations(groups: Sequence[Method], console: Console) -> None:
    for number, group in enumerate(groups):
        names = ", ".join(f"{run.folder.name} (seed {run.seed_text})" for run in group)
        console.info(f"{_letter(number)}: {names}, {max(int(run.records[-1]['step']) for run in group)} steps")
    if len(groups) == 1:
        console.info("these runs differ in nothing but seeds, names and places: there is one method, and nothing to test")
        return
    rows = [[key, *(safe_text(show(value), limit=44) for value in values)] for key, values in config_differences(groups)]
    console.info("")
    console.table("configuration: what differs", rows, ["key", *map(_letter, range(len(groups)))])


def _results(groups: Sequence[Method], console: Console) -> None:
    """Print the table of results, each comparison with the letters of its two groups."""
    found: list[tuple[str, Comparison]] = []
    for metric in metrics_of(groups):
        for axis in AXES:
            for number in range(1, len(groups)):
                one = compare(groups[0], groups[number], metric, axis)
                if one is not None:
                    found.append((f"{_letter(0)}, {_letter(number)}", one))
    if not found:
        console.info("" if len(groups) == 1 else "no metric was measured in all of the runs")
        return
    header = ["metric", "sides", "at", "first", "second", "change", "95 % interval", "p"]
    rows = [
        [
            safe_text(one.metric.removeprefix("val/"), limit=30),
            sides,
            _place(one),
            f"{one.first:.3f}",
            f"{one.second:.3f}",
            *_difference(one),
        ]
        for sides, one in found
    ]
    console.info("")
    console.table("results at equal steps, tokens and seconds", rows, header)
    for line in _honest(groups, [one for _, one in found]):
        console.info(line)


def _honest(groups: Sequence[Method], found: Sequence[Comparison]) -> list[str]:
    """Return what the tests say and what they do not."""
    lines = [
        "Each row is at the last place that both sides reached: validation measured nearest to it, and the mean reward of the "
        "five training steps before it. Tests: permutation over runs where both sides have two or more."
    ]
    if any(len(group) == 1 for group in groups):
        lines.append(
            "One run of a method says nothing about another seed: train each with three seeds or more (trainer.seed). Whether two "
            "policies differ on the validation prompts: grpo-rl eval RUN/val/step_N.jsonl OTHER/val/step_N.jsonl"
        )
    tested = [one for one in found if one.difference is not None]
    least = max((one.difference.least_p for one in tested if one.difference), default=0.0)
    if least > 0.05:
        lines.append(f"With so few runs no difference can have a p below {least:.2f}, however large it is.")
    if len(tested) > 1:
        lines.append("Several tests are made: of twenty without any difference, one has p below 0.05.")
    return lines


def _place(one: Comparison) -> str:
    if one.axis == "seconds":
        return duration(one.at)
    return f"step {one.at:.0f}" if one.axis == "step" else f"{one.at:,.0f} tokens"


def _difference(one: Comparison) -> list[str]:
    change = f"{one.second - one.first:+.3f}"
    if one.difference is None:
        return [change, "", ""]
    return [change, f"{one.difference.low:+.3f} to {one.difference.high:+.3f}", p_text(one.difference.p)]


def _letter(number: int) -> str:
    return chr(ord("A") + number) if number < 26 else f"Z{number}"


def _parser() -> Arguments:
    parser = Arguments(
        "compare",
        "Compare runs: the keys in which they differ, and tests at equal steps, tokens and seconds. Runs that\n"
        "differ only in seeds count as one method.",
        "grpo-rl compare runs/grpo_rl/grpo runs/grpo_rl/dapo\n"
        "  grpo-rl compare grpo_seed0 grpo_seed1 grpo_seed2 dapo_seed0 dapo_seed1 dapo_seed2",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folders or names of runs")
    return parser
