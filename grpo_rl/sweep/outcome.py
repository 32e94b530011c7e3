"""The result of a sweep: a table with mean and spread per setting, and a CSV file.

`python -m grpo_rl.sweep.outcome FOLDER` makes them from the folder of a sweep, also of one whose runs were submitted to a
cluster one by one.
"""

from __future__ import annotations

import argparse
import csv
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_rl.config.secrets import redact
from grpo_rl.errors import DataError
from grpo_rl.sweep.points import Point, name_of, read_points
from grpo_rl.telemetry.metrics.metrics_file import read_metrics
from grpo_rl.telemetry.metrics.validation import validation_score
from grpo_rl.telemetry.status import read_status
from grpo_rl.telemetry.terminal.text import encodable, number

LAST_STEPS = 5
"""The number of last training steps whose mean stands for the end of a run."""
LOSSES = {"validation loss": "val/loss", "training loss": "train/loss"}


@dataclass(frozen=True, slots=True)
class Result:
    """The end of one run."""

    point: Point
    state: str
    steps: int
    """The number of training steps that were logged."""
    values: Mapping[str, float]
    """The measures at the end, by the names of the table's columns."""


def summarize(folder: Path, points: Sequence[Point]) -> str:
    """Write sweep.csv, and return the table, which is written to sweep.txt too; one row per setting."""
    results = [_result(folder / point.name, point) for point in points]
    columns = list(dict.fromkeys(name for result in results for name in result.values))
    _write_csv(folder / "sweep.csv", results, columns)
    text = _table(results, columns)
    made = [folder / "sweep.txt", folder / "sweep.csv"]
    text += "\n\nWritten: " + ", ".join(str(path) for path in made)
    begun = [shlex.quote(str(folder / one.point.name)) for one in results if one.values]
    text += f"\nTheir curves over each other: grpo-rl page {' '.join(begun)}\n" if begun else "\n"
    made[0].write_text(text, encoding="utf-8", errors="backslashreplace")
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table of the sweep in a folder, and write it there."""
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
    print(encodable(redact(summarize(folder, points)), sys.stdout.encoding or "utf-8"))
    return 0


def _result(folder: Path, point: Point) -> Result:
    records = read_metrics(folder / "metrics.jsonl")
    values: dict[str, float] = {}
    scores = [score for record in records if (score := validation_score(record)) is not None]
    if scores:
        values["validation"] = scores[-1]
    for name, key in ({"reward": "reward/mean"} | LOSSES).items():
        points = [record[key] for record in records if key in record]
        if points:
            values[name] = points[-1] if key == "val/loss" else statistics.fmean(points[-LAST_STEPS:])
    seconds = [record["timing_s/step"] for record in records if "timing_s/step" in record]
    if seconds:
        values["s/step"] = statistics.median(seconds)
    state = str(read_status(folder).get("state", "not started"))
    return Result(point, state, sum(record["step"] > 0 for record in records), values)


def _table(results: Sequence[Result], columns: Sequence[str]) -> str:
    """Return one row per setting: its runs that are done, and mean and spread of each column over them."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(_label(result.point), []).append(result)
    width = max([len("setting"), *map(len, groups)]) + 2
    lines = [f"{'setting':<{width}}{'done':>7}" + "".join(f"{name:>22}" for name in columns)]
    for label, group in groups.items():
        done = [result for result in group if result.state == "done"]
        cells = "".join(f"{_mean_and_spread([r.values[name] for r in done if name in r.values]):>22}" for name in columns)
        lines.append(f"{label:<{width}}{f'{len(done)}/{len(group)}':>7}{cells}")
    lines.append(
        f"mean and standard deviation (n - 1) over the runs that are done; reward: of the last {LAST_STEPS} steps of each"
    )
    lines += [f"  {r.point.name}: {r.state}, {r.steps} steps" for r in results if r.state != "done"]
    return "\n".join(lines)


def _mean_and_spread(values: Sequence[float]) -> str:
    if not values:
        return "-"
    spread = f" ± {number(statistics.stdev(values), 9).strip()}" if len(values) > 1 else ""
    return f"{number(statistics.fmean(values), 9).strip()}{spread}"


def _label(point: Point) -> str:
    return name_of(dict(point.setting)).replace(",", ", ") or "all runs"


def _write_csv(file: Path, results: Sequence[Result], columns: Sequence[str]) -> None:
    """Write one line per run: its values, state, steps, and what it reached."""
    with file.open("w", newline="", encoding="utf-8") as opened:
        writer = csv.writer(opened)
        axes = list(dict.fromkeys(axis for result in results for axis in result.point.values))
        writer.writerow(["run", *axes, "state", "steps", *columns])
        for result in results:
            values = [result.point.values.get(axis, "") for axis in axes]
            reached = [result.values.get(name, "") for name in columns]
            writer.writerow([result.point.name, *values, result.state, result.steps, *reached])


if __name__ == "__main__":
    sys.exit(main())
