"""`grpo-rl compare RUN RUN ...`: what differs between runs in configuration, and whether their results do."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from grpo_rl.arguments import Arguments
from grpo_rl.errors import ConfigError
from grpo_rl.evaluation.evaluation_results import p_text
from grpo_rl.evaluation.response_file import write_whole
from grpo_rl.evaluation.run_comparison import (
    AXES,
    Comparison,
    RunGroup,
    compare,
    config_differences,
    grouped,
    metrics_of,
    read_run,
)
from grpo_rl.telemetry.metrics.metrics_file import jsonable
from grpo_rl.telemetry.rundir import find_run
from grpo_rl.telemetry.terminal.console import Console
from grpo_rl.telemetry.terminal.text import duration, safe_text

_SHORT = 44


def main(argv: Sequence[str]) -> int:
    """Print the comparison, and write it as JSON. Returns 0. Raises ConfigError and DataError for what is no run."""
    options = _parser().read(argv)
    folders = list(dict.fromkeys(find_run(text).resolve() for text in options.runs))
    if len(folders) < 2:
        raise ConfigError("grpo-rl compare needs two runs at least: grpo-rl compare runs/grpo_rl/a runs/grpo_rl/b")
    groups = grouped([read_run(folder) for folder in folders])
    console = Console()
    try:
        _configurations(groups, console)
        found = _results(groups, console)
        _write(groups, found, Path(options.output).expanduser(), console)
    finally:
        console.close()
    return 0


def _configurations(groups: Sequence[RunGroup], console: Console) -> None:
    for number, group in enumerate(groups):
        names = ", ".join(f"{run.folder.name} (seed {run.seed_text})" for run in group.runs)
        console.info(f"{_letter(number)}: {names}, {max(int(run.records[-1]['step']) for run in group.runs)} steps")
    if len(groups) == 1:
        console.info("these runs differ in nothing but seeds, names and places: there is one method, and nothing to test")
        return
    rows = [[key, *(_value(value) for value in values)] for key, values in config_differences(groups)]
    console.info("")
    console.table("configuration: what differs", rows, ["key", *map(_letter, range(len(groups)))])


def _results(groups: Sequence[RunGroup], console: Console) -> list[tuple[str, Comparison]]:
    """Print the table of results; return each comparison with the letters of its two groups."""
    found: list[tuple[str, Comparison]] = []
    for metric in metrics_of(groups):
        for axis in AXES:
            for number in range(1, len(groups)):
                one = compare(groups[0], groups[number], metric, axis)
                if one is not None:
                    found.append((f"{_letter(0)}, {_letter(number)}", one))
    if not found:
        console.info("" if len(groups) == 1 else "no metric was measured in all of the runs")
        return found
    header = ["metric", "sides", "at", "first", "second", "change", "95 % interval", "p", "tested over"]
    rows = [
        [_metric(one), sides, _place(one), f"{one.first:.3f}", f"{one.second:.3f}", *_difference(one)] for sides, one in found
    ]
    console.info("")
    console.table("results at equal steps, tokens and seconds", rows, header)
    for line in _honest(groups, found):
        console.info(line)
    return found


def _honest(groups: Sequence[RunGroup], found: Sequence[tuple[str, Comparison]]) -> list[str]:
    """Return what the tests say and what they do not."""
    lines = [
        "Each row is at the last place that both sides reached: validation measured nearest to it, and the mean reward of the "
        "five training steps before it. Tests: permutation over runs where both sides have two or more, else over prompts."
    ]
    if any(len(group.runs) == 1 for group in groups):
        lines.append(
            "One run of a method: the tests over prompts say whether these two policies differ, and nothing about another seed. "
            "For the methods themselves, train each with three seeds or more (trainer.seed)."
        )
    tested = [
        one.difference for _, one in found if one.difference is not None and "runs" in one.over and "these" not in one.over
    ]
    least = max((one.least_p for one in tested), default=0.0)
    if least > 0.05:
        lines.append(f"With so few runs no difference can have a p below {least:.2f}, however large it is.")
    if len([one for _, one in found if one.difference is not None]) > 1:
        lines.append("Several tests are made: of twenty without any difference, one has p below 0.05.")
    return lines


def _write(groups: Sequence[RunGroup], found: Sequence[tuple[str, Comparison]], folder: Path, console: Console) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        content = {
            "groups": {_letter(number): [str(run.folder) for run in group.runs] for number, group in enumerate(groups)},
            "configuration": dict(config_differences(groups)),
            "results": [{"sides": sides, **dataclasses.asdict(one)} for sides, one in found],
        }
        write_whole(folder / "comparison.json", json.dumps(jsonable(content), indent=1))
    except OSError as error:
        raise ConfigError(f"--output {folder}: cannot be written: {error.strerror or error}") from error
    runs = " ".join(shlex.quote(safe_text(str(run.folder))) for group in groups for run in group.runs)
    console.info("")
    console.info(f"written: {folder / 'comparison.json'}")
    console.info(f"their curves over each other: grpo-rl page {runs}")


def _place(one: Comparison) -> str:
    if one.axis == "seconds":
        return duration(one.at)
    return f"step {one.at:.0f}" if one.axis == "step" else f"{one.at:,.0f} tokens"


def _difference(one: Comparison) -> list[str]:
    change = f"{one.second - one.first:+.3f}"
    if one.difference is None:
        return [change, "", "", one.over]
    return [change, f"{one.difference.low:+.3f} to {one.difference.high:+.3f}", p_text(one.difference.p), one.over]


def _metric(one: Comparison) -> str:
    return safe_text(one.metric.removeprefix("val/"), limit=30)


def _letter(number: int) -> str:
    return chr(ord("A") + number) if number < 26 else f"Z{number}"


def _value(value: object) -> str:
    return safe_text("null" if value is None else str(value), limit=_SHORT)


def _parser() -> Arguments:
    parser = Arguments(
        "compare",
        "Compare runs: the keys in which they differ, and tests at equal steps, tokens and seconds. Runs that\n"
        "differ only in seeds count as one method.",
        "grpo-rl compare runs/grpo_rl/grpo runs/grpo_rl/dapo\n"
        "  grpo-rl compare grpo_seed0 grpo_seed1 grpo_seed2 dapo_seed0 dapo_seed1 dapo_seed2 --output grpo_dapo",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folders or names of runs")
    parser.add_argument("--output", metavar="FOLDER", default="comparison", help="for comparison.json (comparison)")
    return parser
