"""The table of a sweep, with mean and spread per setting.

`python -m grpo_rl.sweep.outcome FOLDER` makes it also from runs that were submitted to a cluster one by one.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import re
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from grpo_rl.config import overrides
from grpo_rl.config.secrets import redact
from grpo_rl.errors import ConfigError, DataError
from grpo_rl.frozen import frozen
from grpo_rl.run_files import read_json
from grpo_rl.telemetry.metrics.metrics_file import is_count, read_metrics
from grpo_rl.telemetry.metrics.validation import validation_score
from grpo_rl.telemetry.status import read_status
from grpo_rl.telemetry.terminal.text import number, say

SEED_AXES = ("seed", *overrides.SEEDS)
"""Results are averaged over these axes."""
SWEEP_FILE = "sweep.json"
_PLAIN = re.compile(r"[^A-Za-z0-9._+-]+")
_LONGEST = 60
LAST_STEPS = 5
"""Training steps whose mean stands for the end of a run."""
LOSSES = {"validation loss": "val/loss", "training loss": "train/loss"}


@frozen
class Point:
    values: Mapping[str, str]
    """By axis, as Hydra writes it."""
    name: str
    """The name of the run's folder, such as `lr=0.001,seed=2`."""

    @property
    def setting(self) -> tuple[tuple[str, str], ...]:
        """Runs with the same values are repetitions of each other."""
        return tuple((key, value) for key, value in self.values.items() if key not in SEED_AXES)


@frozen
class SweptRun:
    point: Point
    state: str
    progress: str
    """Training steps that were logged, and of how many."""
    values: Mapping[str, float]
    """By the names of the table's columns."""


def summarize(folder: Path, points: Sequence[Point]) -> str:
    """Also writes the table to sweep.txt."""
    results = [_result(folder / point.name, point) for point in points]
    columns = list(dict.fromkeys(name for result in results for name in result.values))
    file = folder / "sweep.txt"
    text = f"{_table(results, columns)}\n\nWritten: {file}"
    begun = [shlex.quote(str(folder / result.point.name)) for result in results if result.values]
    text += f"\nTheir curves over each other: grpo-rl page {' '.join(begun)}\n" if begun else "\n"
    file.write_text(text, encoding="utf-8", errors="backslashreplace")
    return text


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m grpo_rl.sweep.outcome",
        description="Make the table of a sweep from the folder in which its runs lie.",
        epilog="example: python -m grpo_rl.sweep.outcome runs/grpo_rl/my_sweep",
    )
    parser.add_argument("folder", type=Path, help="the folder in which the folders of the runs lie")
    folder = parser.parse_args(argv).folder
    points = read_points(folder)
    if not points:
        print(
            f"error: {folder}: there is neither a sweep.json nor the folder of a run named by values, as seed=1",
            file=sys.stderr,
        )
        return DataError.exit_code
    say(redact(summarize(folder, points)))
    return 0


def _result(folder: Path, point: Point) -> SweptRun:
    records = read_metrics(folder / "metrics.jsonl")
    values: dict[str, float] = {}
    if scores := [score for record in records if (score := validation_score(record)) is not None]:
        values["validation"] = scores[-1]
    for name, key in ({"reward": "reward/mean"} | LOSSES).items():
        if points := [record[key] for record in records if key in record]:
            values[name] = points[-1] if key == "val/loss" else statistics.fmean(points[-LAST_STEPS:])
    if seconds := [record["timing_s/step"] for record in records if "timing_s/step" in record]:
        values["s/step"] = statistics.median(seconds)
    status = read_status(folder)
    steps, total = sum(record["step"] > 0 for record in records), status.get("total")
    progress = f"{steps} of {total} steps" if is_count(total) else f"{steps} steps"
    return SweptRun(point, str(status.get("state", "not started")), progress, values)


def last_step(folder: Path) -> int:
    return max((int(record["step"]) for record in read_metrics(folder / "metrics.jsonl")), default=0)


def score_until(folder: Path, step: int) -> float:
    """The last validation, else the last rewards, else the loss; more is better."""
    records = [record for record in read_metrics(folder / "metrics.jsonl") if record["step"] <= step]
    scores = [score for record in records if record["step"] > 0 and (score := validation_score(record)) is not None]
    rewards = [record["reward/mean"] for record in records if "reward/mean" in record]
    losses = [-record[key] for key in ("train/loss", "val/loss") for record in records if key in record]
    return scores[-1] if scores else statistics.fmean(rewards[-LAST_STEPS:]) if rewards else (losses or [-math.inf])[-1]


def _table(results: Sequence[SweptRun], columns: Sequence[str]) -> str:
    """One row per setting."""
    groups: dict[str, list[SweptRun]] = {}
    for result in results:
        label = name_of(dict(result.point.setting)).replace(",", ", ") or "all runs"
        groups.setdefault(label, []).append(result)
    width = max([len("setting"), *map(len, groups)]) + 2
    lines = [f"{'setting':<{width}}{'done':>7}" + "".join(f"{name:>22}" for name in columns)]
    for label, group in groups.items():
        done = [result for result in group if result.state == "done"]
        cells = "".join(f"{_mean_and_spread([r.values[name] for r in done if name in r.values]):>22}" for name in columns)
        lines.append(f"{label:<{width}}{f'{len(done)}/{len(group)}':>7}{cells}")
    lines.append(
        f"mean and standard deviation (n - 1) over the runs that are done; reward: of the last {LAST_STEPS} steps of each"
    )
    for result in (result for result in results if result.state != "done"):
        reward = f"; reward {number(result.values['reward'], 9).strip()}" if "reward" in result.values else ""
        lines.append(f"  {result.point.name}: {result.state}, {result.progress}{reward}")
    return "\n".join(lines)


def _mean_and_spread(values: Sequence[float]) -> str:
    if not values:
        return "-"
    spread = f" ± {number(statistics.stdev(values), 9).strip()}" if len(values) > 1 else ""
    return f"{number(statistics.fmean(values), 9).strip()}{spread}"


def read_points(folder: Path) -> list[Point]:
    """If runs were submitted one by one, the folders' names have the values."""
    try:
        if (folder / SWEEP_FILE).exists():
            return [Point(dict(entry["values"]), str(entry["name"])) for entry in read_json(folder / SWEEP_FILE)]
        names = sorted(path.parent.name for path in folder.glob("*=*/config.yaml"))
        return [Point(dict(part.partition("=")[::2] for part in name.split(",")), name) for name in names]
    except (DataError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder / SWEEP_FILE} cannot be read: {error}") from None


def name_of(values: Mapping[str, str]) -> str:
    """`lr=0.001,seed=2`: the last parts of the keys, as many as tell them apart."""
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


if __name__ == "__main__":
    sys.exit(main())
