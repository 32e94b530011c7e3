"""The runs of a sweep: one for each combination of values, with a name that depends on nothing but its values."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_rl.config import overrides
from grpo_rl.config.compose import Composed, compose
from grpo_rl.errors import ConfigError, DataError
from grpo_rl.run_files import read_json
from grpo_rl.telemetry.rundir import dated_name

SEED_AXES = ("seed", *overrides.SEEDS)
"""Axes whose runs differ by chance alone: results are averaged over them."""
SWEEP_FILE = "sweep.json"
_PLAIN = re.compile(r"[^A-Za-z0-9._+-]+")
_LONGEST = 60


@dataclass(frozen=True, slots=True)
class Point:
    """One run of a sweep."""

    values: Mapping[str, str]
    """The value of each axis, as Hydra writes it."""
    name: str
    """The name of the run's folder, such as `lr=0.001,seed=2`."""

    @property
    def setting(self) -> tuple[tuple[str, str], ...]:
        """The values that are no seeds: runs with the same ones are repetitions of each other."""
        return tuple((key, value) for key, value in self.values.items() if key not in SEED_AXES)


@dataclass(frozen=True, slots=True)
class Sweep:
    """The runs of a sweep and where they lie."""

    folder: Path
    points: Sequence[Point]
    words: Mapping[str, list[str]]
    """The command line of each run, by its name."""
    composed: Mapping[str, Composed]
    """The configuration of each run, by its name."""
    is_named: bool
    """True where the sweep has a name by which the same command goes on."""

    @property
    def dry_run(self) -> bool:
        """Return whether the runs are only to be planned."""
        return any(composed.config.trainer.dry_run for composed in self.composed.values())

    def write(self) -> None:
        """Write down what the runs are, for the summary that is made from the folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        record = [{"name": point.name, "values": dict(point.values)} for point in self.points]
        (self.folder / SWEEP_FILE).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def read_points(folder: Path) -> list[Point]:
    """Return the runs of the sweep in `folder`; those of runs that were submitted one by one go by the names of their folders."""
    try:
        if (folder / SWEEP_FILE).exists():
            return [Point(dict(entry["values"]), str(entry["name"])) for entry in read_json(folder / SWEEP_FILE)]
        names = sorted(path.parent.name for path in folder.glob("*=*/config.yaml"))
        return [Point(dict(part.partition("=")[::2] for part in name.split(",")), name) for name in names]
    except (DataError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder / SWEEP_FILE} cannot be read: {error}") from None


def sweep_of(words: Sequence[str]) -> Sweep:
    """Return the sweep that the words describe.

    Raises ConfigError with every problem of every run, before any of them starts; each names the runs that it is in.
    """
    axes = overrides.axes(words)
    if "trainer.experiment_name" in axes.values:
        axes.problems.append("trainer.experiment_name: a sweep has one name, and its runs are named after their values")
    if axes.problems:
        raise ConfigError(axes.problems)
    combinations = [dict(zip(axes.values, values, strict=True)) for values in itertools.product(*axes.values.values())]
    points = [Point(values, name_of(values)) for values in combinations]
    settings = {point.name: [*axes.fixed, *(f"{key}={value}" for key, value in point.values.items())] for point in points}
    given = _given_name(settings[points[0].name])
    name = given or f"sweep_{dated_name()}"
    found: dict[str, list[str]] = {}
    composed: dict[str, Composed] = {}
    lines = {
        point: [*words, f"trainer.experiment_name={overrides.quoted(f'{name}/{point}')}"] for point, words in settings.items()
    }
    for point, line in lines.items():
        try:
            composed[point] = compose(line)
        except ConfigError as error:
            for problem in error.problems:
                found.setdefault(problem, []).append(point)
    if found:
        raise ConfigError(with_places(found, len(points)))
    folders = {str(Path(one.config.trainer.default_local_dir).expanduser()) for one in composed.values()}
    if len(folders) > 1:
        raise ConfigError(f"--multirun: the runs of a sweep lie in one folder, not in {' and '.join(sorted(folders))}")
    return Sweep(Path(folders.pop()) / name, points, lines, composed, is_named=given is not None)


def _given_name(line: Sequence[str]) -> str | None:
    """Return the name that the words or their recipe give; None without one, and where the words are wrong, which shows later."""
    try:
        return compose(line).config.trainer.experiment_name
    except ConfigError:
        return None


def with_places(found: Mapping[str, Sequence[str]], num_runs: int) -> list[str]:
    """Return each problem with the runs in which it is; a problem of all runs is not one of a value."""
    lines = []
    for problem, names in found.items():
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        lines.append(problem if len(names) == num_runs else f"{problem} (in run {shown})")
    return lines


def name_of(values: Mapping[str, str]) -> str:
    """Return `lr=0.001,seed=2`: the last parts of the keys, as many as tell them apart, and the values in plain letters."""
    return ",".join(f"{_shortest(key, list(values))}={_plain(value)}" for key, value in values.items())


def _shortest(key: str, keys: Sequence[str]) -> str:
    parts = key.split(".")
    for count in range(1, len(parts) + 1):
        ending = ".".join(parts[-count:])
        if sum(f".{other}".endswith(f".{ending}") for other in keys) == 1:
            return ending
    return key


def _plain(value: str) -> str:
    text = value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value
    plain = _PLAIN.sub("-", text)[:_LONGEST]
    # Two values that look alike without their special characters must not share a folder.
    return plain if plain == text else f"{plain}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"
