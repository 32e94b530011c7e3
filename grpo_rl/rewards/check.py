"""Try a reward function on rows of a file before any training.

    python -m grpo_rl.rewards.check my_reward.py[:name] --data file [--rows N]
    python -m grpo_rl.rewards.check math --data train.parquet --options '{"boxed_only": true}'

Shows what each response is worth, how long it took, and what failed and why. Exit code 0 when every row got a reward, else 2.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import inspect
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from grpo_rl.errors import ConfigError, GrpoRlError
from grpo_rl.rewards.check_data import Row, read_rows
from grpo_rl.rewards.registry import REWARDS

SHOWN_ROWS = 20
SHOWN_CHARACTERS = 40
SHOWN_FAILURES = 10
FAILED = 2


@dataclass(slots=True)
class Outcome:
    """What one call gave."""

    row: Row
    seconds: float = 0.0
    score: float | None = None
    parts: dict[str, float] = field(default_factory=dict)
    failure: str | None = None


def load(spec: str, options: dict[str, Any]) -> Callable[..., Any]:
    """The function that `spec` names, with its options. Raises ConfigError for an unknown name, file or option."""
    name = f"{spec}:compute_score" if spec.endswith(".py") else spec
    function = REWARDS.get(name)
    REWARDS.check_options(name, options)
    return functools.partial(function, **options)


def try_row(function: Callable[..., Any], row: Row) -> Outcome:
    """Call the function as a run does; a failure of whatever kind becomes the outcome's cause."""
    outcome = Outcome(row)
    start = time.perf_counter()
    try:
        result = function(
            data_source=row.data_source,
            solution_str=row.response,
            ground_truth=row.ground_truth,
            extra_info=row.extra_info,
        )
        if inspect.isawaitable(result):
            result = asyncio.run(_finished(result))
    except (Exception, SystemExit) as error:  # a user's code: whatever it raises is what this command is to show
        outcome.failure = f"{type(error).__name__}: {error}"
        return outcome
    finally:
        outcome.seconds = time.perf_counter() - start
    _read(result, outcome)
    return outcome


def try_batch(function: Callable[..., Any], rows: Sequence[Row]) -> list[Outcome]:
    """Call a function of lists once, all at once; the time is shared out among the rows."""
    outcomes = [Outcome(row) for row in rows]
    failure: str | None = None
    results: Any = None
    start = time.perf_counter()
    try:
        results = function(
            data_sources=[row.data_source for row in rows],
            solution_strs=[row.response for row in rows],
            ground_truths=[row.ground_truth for row in rows],
            extra_infos=[row.extra_info for row in rows],
        )
        if inspect.isawaitable(results):
            results = asyncio.run(_finished(results))
    except (Exception, SystemExit) as error:  # as in `try_row`
        failure = f"{type(error).__name__}: {error}"
    seconds = (time.perf_counter() - start) / max(1, len(rows))
    results = results.tolist() if hasattr(results, "tolist") else results
    if failure is None and (not isinstance(results, list | tuple) or len(results) != len(rows)):
        given = f"{len(results)} results" if isinstance(results, list | tuple) else f"a {type(results).__name__}"
        failure = f"it returned {given} for {len(rows)} rows; a batched function returns a list of one result for each"
    for place, outcome in enumerate(outcomes):
        outcome.seconds, outcome.failure = seconds, failure
        if failure is None and isinstance(results, list | tuple):
            _read(results[place], outcome)
    return outcomes


async def _finished(result: Any) -> Any:
    return await result


def _read(result: Any, outcome: Outcome) -> None:
    values = result if isinstance(result, dict) else {"score": result}
    if "score" not in values:
        outcome.failure = f"the dict has no 'score', it has {', '.join(map(str, values)) or 'nothing'}"
        return
    for key, value in values.items():
        if not isinstance(value, Real):
            if key == "score":
                outcome.failure = f"score is {str(value)[:100]!r} ({type(value).__name__}), not a number"
            continue
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            outcome.failure = f"{key} is {number}, not a finite number"
        elif key == "score":
            outcome.score = number
        else:
            outcome.parts[str(key)] = number


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of `values` that at least `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def show(outcomes: Sequence[Outcome], unmade: int, console: Console) -> None:
    """The table of rows, the timings and the failures. Model text is shown without its control characters."""
    table = Table("row", "response", "score", "parts")
    for outcome in outcomes[:SHOWN_ROWS]:
        score = "failed" if outcome.failure is not None or outcome.score is None else f"{outcome.score:g}"
        parts = "  ".join(f"{key} {value:g}" for key, value in outcome.parts.items())
        table.add_row(str(outcome.row.place), Text(_start(outcome.row.response or "")), score, Text(parts))
    console.print(table)
    if len(outcomes) > SHOWN_ROWS:
        console.print(f"and {len(outcomes) - SHOWN_ROWS} rows more")
    if unmade:
        console.print(
            f"{unmade} rows left out: no right response could be made from their ground truth; give a column `response`"
        )
    if not outcomes:
        return
    scores = [outcome.score for outcome in outcomes if outcome.score is not None and outcome.failure is None]
    if scores:
        console.print(f"score: mean {sum(scores) / len(scores):.4g}, least {min(scores):g}, greatest {max(scores):g}")
    # The first call loads what the function needs.
    warm = [1000 * outcome.seconds for outcome in outcomes[1:] or outcomes]
    console.print(
        f"time per call: p50 {percentile(warm, 0.5):.3f} ms, p99 {percentile(warm, 0.99):.3f} ms, max {max(warm):.3f} ms; "
        f"the first one {1000 * outcomes[0].seconds:.1f} ms"
    )
    failed = [outcome for outcome in outcomes if outcome.failure is not None]
    console.print(f"{len(outcomes)} rows, {len(failed)} failed")
    for outcome in failed[:SHOWN_FAILURES]:
        console.print(Text(f"  row {outcome.row.place}: {_printable(outcome.failure or '')}", style="red"))
    if len(failed) > SHOWN_FAILURES:
        console.print(f"  and {len(failed) - SHOWN_FAILURES} more")


def _start(text: str) -> str:
    return _printable(text[:SHOWN_CHARACTERS]) + ("…" if len(text) > SHOWN_CHARACTERS else "")


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else "·" for character in text)


def main(arguments: Sequence[str] | None = None, console: Console | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m grpo_rl.rewards.check", description="Try a reward function on rows of a file."
    )
    parser.add_argument("function", help="my_reward.py, my_reward.py:name, package.module:name, or a registered name")
    parser.add_argument("--data", required=True, help="a parquet, jsonl or json file in verl's row format")
    parser.add_argument("--rows", type=int, default=100, help="how many rows, from the first (default: 100)")
    parser.add_argument("--column", help="the column with the responses (default: response, else made from the ground truth)")
    parser.add_argument("--batched", action="store_true", help="the function takes lists, one call for all rows")
    parser.add_argument(
        "--options", default="{}", help="keyword arguments of the function, as JSON, e.g. '{\"boxed_only\": true}'"
    )
    given = parser.parse_args(arguments)
    console = console or Console()
    try:
        if given.rows < 1:
            raise ConfigError(f"--rows is {given.rows}; it must be at least 1")
        function = load(given.function, _options(given.options))
        rows = read_rows(given.data, given.rows, given.column)
    except GrpoRlError as error:
        console.print(Text(str(error), style="red"))
        return FAILED
    usable = [row for row in rows if row.response is not None]
    outcomes = try_batch(function, usable) if given.batched else [try_row(function, row) for row in usable]
    show(outcomes, len(rows) - len(usable), console)
    return 0 if outcomes and all(outcome.failure is None for outcome in outcomes) else FAILED


def _options(text: str) -> dict[str, Any]:
    try:
        options = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--options is no JSON: {error}") from None
    if not isinstance(options, dict):
        raise ConfigError(f"--options is {text!r}; it must be a JSON object, e.g. {{}}")
    return options


if __name__ == "__main__":
    sys.exit(main())
