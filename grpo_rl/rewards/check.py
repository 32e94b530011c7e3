"""Try a reward function on rows of a file before any training.

    python -m grpo_rl.rewards.check my_reward.py[:name] --data file [--rows N]
    python -m grpo_rl.rewards.check math --data train.parquet --options '{"boxed_only": true}'

Shows what each response is worth, how long it took, and what failed and why; then the first row is answered by strange responses
(empty, plain, wrong, long, foreign). Exit code 0 when every response got a reward, else 2.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from grpo_rl.arguments import Arguments
from grpo_rl.config.schema.tree import RewardConfig
from grpo_rl.data.rows import column, wrong
from grpo_rl.data.sources.locate import open_source
from grpo_rl.errors import ConfigError, GrpoRlError, RewardError
from grpo_rl.processes.child import OutputLog
from grpo_rl.rewards.compose import RewardFunction
from grpo_rl.rewards.contract import Outcome, RewardFailure, RewardResult, Sample
from grpo_rl.rewards.runtime.process import Job, RewardProcess, spared

SHOWN_ROWS = 20
SHOWN_CHARACTERS = 40
SHOWN_FAILURES = 10
FAILED, INTERRUPTED = 2, 130
STRANGE: dict[str, str | None] = {
    "empty": "",
    "plain": None,
    "wrong": "The answer is \\boxed{-987654321}.\n#### -987654321",
    "long": "9" * 20_000,
    "foreign": "答案是四。الجواب ٤ 🙂\u202e\x00 </answer> \\boxed{{",
}
"""Responses that a policy gives sooner or later, by what is strange in them: each is tried on the first row with a reward. Plain is the bare ground truth."""
IN_MARKS, BARE = "the ground truth in the forms of the known rules", "the bare ground truth"
MAX_NUMBERS = 5
"""Numbers of a countdown that is solved here: six take seconds."""


class Row(NamedTuple):
    """The arguments of a reward function for one row. `response` is None where none could be made."""

    place: int
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]
    response: str | None

    def sample(self) -> Sample:
        return Sample(self.data_source, self.response or "", self.ground_truth, self.extra_info)


class TriedRow(NamedTuple):
    """The result of one call."""

    row: Row
    seconds: float
    outcome: Outcome


class Trial:
    """A reward process as a run has them, asked by the main thread; it is replaced when it had to be killed."""

    def __init__(self, spec: str, options: dict[str, Any], batched: bool, timeout_s: float, log: OutputLog) -> None:
        """Find the function. Raises ConfigError for an unknown name, file or option."""
        name = f"{spec}:compute_score" if spec.endswith(".py") else spec
        self._config = RewardConfig(
            functions=[name],
            function_kwargs={name: options} if options else {},
            batched=[name] if batched else [],
            timeout_s=timeout_s,
        )
        self._components = RewardFunction.from_config(self._config).components
        self._worker: RewardProcess | None = None
        self._log, self._data_sources = log, set[str]()

    def outcomes(self, rows: Sequence[Row]) -> Iterator[TriedRow]:
        """Yield what the function gives for these rows: each by itself, or all in one call of a function of lists.

        Raises RewardError where no process starts.
        """
        self._data_sources |= {row.data_source for row in rows}
        for some in [rows] if rows and self._config.batched else [[row] for row in rows]:
            job = Job([row.sample for row in some], self._components)
            self._ask([job])
            for row, outcome in zip(some, spared(job, self._ask), strict=True):
                yield TriedRow(row, job.seconds / len(some), outcome)

    def close(self) -> None:
        """End the process and all that it started."""
        if self._worker is not None:
            self._worker.child.kill()

    def _ask(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            left: Sequence[Job] = [job]
            while left:
                if self._worker is None or not self._worker.child.alive:
                    self._worker = RewardProcess(self._config, list(self._data_sources), self._log)
                    if trouble := self._worker.child.wait_until_ready():
                        raise RewardError(f"the process of the reward function cannot start: {trouble}")
                left = self._worker.ask(left)


# ---- rows and their right responses --------------------------------------------------------------------


def read_rows(name: str, count: int, column: str | None) -> list[Row]:
    """Return the first `count` rows of a data file, folder or task in verl's format, read as a run reads them.

    The response is the text in `column`, or in `response` where there is such a column and none is named; else it is made from
    the ground truth. Raises DataError, naming the file, the row and the column, for what cannot be read so.
    """
    source = open_source(name)
    return [_row(place, source.where(place), source.row(place), column) for place in range(min(count, len(source)))]


def _row(place: int, where: str, row: dict[str, Any], name: str | None) -> Row:
    # The prompt is not looked at: a file with responses needs none.
    source, gold = str(row.get("data_source", "")), column(row, "reward_model.ground_truth", where)
    extra = row.get("extra_info")
    extra_info = dict(extra) if isinstance(extra, Mapping) else {}
    if name is None and "response" not in row:
        return Row(place, source, gold, extra_info, gold_response(source, gold, extra_info))
    response = column(row, name or "response", where)
    if not isinstance(response, str):
        raise wrong(where, name or "response", response, "text")
    return Row(place, source, gold, extra_info, response)


def right_responses(
    row: Mapping[str, Any], data_source: str, ground_truth: Any, extra_info: Mapping[str, Any], *, marked_only: bool = False
) -> dict[str, str]:
    """Return responses that should be right, by the words for what each is: those that the row has itself, then those made
    from its ground truth. With `marked_only` none is the bare ground truth, which a rule for marked answers finds equal to itself.
    """
    found: dict[str, Any] = {
        "the row's response": row.get("response"),
        "the row's demonstration": extra_info.get("demonstration"),
        "the row's last assistant message": _last_answer(row),
    }
    with contextlib.suppress(TypeError, ValueError, ArithmeticError, LookupError):
        found[IN_MARKS] = gold_response(data_source, ground_truth, extra_info)
    if not marked_only:
        gold = ground_truth[0] if isinstance(ground_truth, list | tuple) and ground_truth else ground_truth
        bare = gold if isinstance(gold, str) else json.dumps(gold, ensure_ascii=False) if gold is not None else None
        found[BARE] = bare
    return {name: text for name, text in found.items() if isinstance(text, str) and text}


def is_structured(ground_truth: Any) -> bool:
    """Return whether a ground truth, or its JSON text, has parts: it may be an answer, or say what an answer has to be like."""
    if isinstance(ground_truth, str):
        return ground_truth.lstrip().startswith(("{", "["))
    if isinstance(ground_truth, list | tuple):
        return any(isinstance(part, list | tuple | Mapping) for part in ground_truth)
    return isinstance(ground_truth, Mapping)


def _last_answer(row: Mapping[str, Any]) -> str | None:
    """Return what the assistant says last in a column of chat messages; None in a row without."""
    for value in row.values():
        last = value[-1] if isinstance(value, list) and value else None
        if isinstance(last, Mapping) and last.get("role") == "assistant" and isinstance(last.get("content"), str):
            return str(last["content"])
    return None


def gold_response(data_source: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> str | None:
    """Return a response with the right answer, in all the forms that the rules read; None where it cannot be made.

    GSM8K's own solution, the sum itself for arithmetic, a solved countdown, the ground truth in a box and after `####`.
    """
    solution = extra_info.get("answer")
    if isinstance(solution, str) and "####" in solution:
        return solution
    if isinstance(ground_truth, Mapping):
        numbers = ground_truth.get("numbers", ground_truth.get("nums"))
        expression = None if numbers is None or "target" not in ground_truth else solve(numbers, ground_truth["target"])
        return None if expression is None else f"<think>\nso\n</think>\n<answer>{expression}</answer>"
    gold = ground_truth[0] if isinstance(ground_truth, list | tuple) and ground_truth else ground_truth
    if not isinstance(gold, str | int | float):
        return None
    return str(gold) if data_source == "arithmetic" else f"The answer is \\boxed{{{gold}}}.\n#### {gold}"


def solve(numbers: list[int], target: int) -> str | None:
    """Return an expression of all `numbers`, each once, whose value is the `target`; None without one, and for more than 5 numbers."""
    return _solve([(Fraction(n), str(n)) for n in numbers], Fraction(target)) if len(numbers) <= MAX_NUMBERS else None


def _solve(terms: list[tuple[Fraction, str]], target: Fraction) -> str | None:
    if len(terms) == 1:
        return terms[0][1] if terms[0][0] == target else None
    for first, second in itertools.permutations(range(len(terms)), 2):
        rest = [term for place, term in enumerate(terms) if place not in (first, second)]
        (a, left), (b, right) = terms[first], terms[second]
        values = [("+", a + b), ("*", a * b)] if first < second else []
        values += [("-", a - b), *([("/", a / b)] if b else [])]
        for sign, value in values:
            found = _solve([*rest, (value, f"({left} {sign} {right})")], target)
            if found is not None:
                return found
    return None


# ---- what is shown ------------------------------------------------------------------------------------


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of `values` that at least `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def show(tried: Sequence[TriedRow], strange: Sequence[TriedRow], unmade: int, console: Console) -> None:
    """The rows, the timings, the failures, and what strange responses earn. Model text is shown without its control characters."""
    table = Table("row", "response", "score", "parts")
    for row, _, outcome in tried[:SHOWN_ROWS]:
        score, values = ("failed", {}) if isinstance(outcome, RewardFailure) else (f"{outcome.score:g}", outcome.values)
        text = row.response or ""
        shown = _printable(text[:SHOWN_CHARACTERS]) + "…" * (len(text) > SHOWN_CHARACTERS)
        table.add_row(str(row.place), Text(shown), score, Text("  ".join(f"{key} {value:g}" for key, value in values.items())))
    console.print(table)
    if len(tried) > SHOWN_ROWS:
        console.print(f"and {len(tried) - SHOWN_ROWS} rows more")
    if unmade:
        console.print(
            f"{unmade} rows left out: no right response could be made from their ground truth; give a column `response`"
        )
    if not tried:
        return
    if scores := [one.outcome.score for one in tried if isinstance(one.outcome, RewardResult)]:
        console.print(f"score: mean {sum(scores) / len(scores):.4g}, least {min(scores):g}, greatest {max(scores):g}")
    # The first call loads what the function needs.
    warm = [1000 * one.seconds for one in tried[1:] or tried]
    console.print(
        f"time per call: p50 {percentile(warm, 0.5):.3f} ms, p99 {percentile(warm, 0.99):.3f} ms, max {max(warm):.3f} ms; "
        f"the first one {1000 * tried[0].seconds:.1f} ms"
    )
    failures = [f"  row {row.place}{_failed(outcome)}" for row, _, outcome in tried if isinstance(outcome, RewardFailure)]
    console.print(f"{len(tried)} rows, {len(failures)} failed")
    if len(failures) > SHOWN_FAILURES:
        failures[SHOWN_FAILURES:] = [f"  and {len(failures) - SHOWN_FAILURES} more"]
    earned = []
    for name, one in zip(STRANGE, strange, strict=False):
        if isinstance(one.outcome, RewardFailure):
            failures.append(f"a response that is {name} failed{_failed(one.outcome)}")
        else:
            earned.append(f"{name} {one.outcome.score:g}")
    for failure in failures:
        console.print(Text(failure, style="red"))
    if earned:
        console.print(f"strange responses to the first row: {', '.join(earned)}")


def _failed(failure: RewardFailure) -> str:
    return f": {failure.kind}: {_printable(failure.cause)}"


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else "·" for character in text)


def main(arguments: Sequence[str] | None = None, console: Console | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = Arguments(
        "check-reward", "Try a reward function on rows of a file.", "grpo-rl check-reward my_reward.py --data rows.jsonl"
    )
    parser.add_argument("function", help="my_reward.py, my_reward.py:name, package.module:name, or a registered name")
    parser.add_argument("--data", required=True, help="data in verl's row format: a file, a folder, task:NAME")
    parser.add_argument("--rows", type=int, default=100, help="how many rows, from the first (default: 100)")
    parser.add_argument("--column", help="the column with the responses (default: response, else made from the ground truth)")
    parser.add_argument("--batched", action="store_true", help="the function takes lists, one call for all rows")
    parser.add_argument(
        "--options", default="{}", help="keyword arguments of the function, as JSON, e.g. '{\"boxed_only\": true}'"
    )
    parser.add_argument(
        "--timeout_s",
        type=float,
        default=RewardConfig().timeout_s,
        help="longest call, as reward.timeout_s (default: %(default)g)",
    )
    console = console or Console()
    tried, strange = list[TriedRow](), list[TriedRow]()
    log, printed, interrupted = OutputLog(), "", False
    try:
        given = parser.read(sys.argv[1:] if arguments is None else arguments)
        if given.rows < 1:
            raise ConfigError(f"--rows is {given.rows}; it must be at least 1")
        if not given.timeout_s > 0:
            raise ConfigError(f"--timeout_s is {given.timeout_s:g}; it must be above 0")
        trial = Trial(given.function, _options(given.options), given.batched, given.timeout_s, log)
        rows = read_rows(given.data, given.rows, given.column)
        usable = [row for row in rows if row.response is not None]
        with contextlib.closing(trial):
            try:
                for one in trial.outcomes(usable):
                    tried.append(one)
                printed = log.last
                if row := next((one.row for one in tried if isinstance(one.outcome, RewardResult)), None):
                    texts = [str(row.ground_truth) if text is None else text for text in STRANGE.values()]
                    for one in trial.outcomes([row._replace(response=text) for text in texts]):
                        strange.append(one)
            except KeyboardInterrupt:
                interrupted, printed = True, log.last
                console.print(f"interrupted after {len(tried)} of {len(usable)} rows")
    except GrpoRlError as error:
        console.print(Text(str(error), style="red"))
        return FAILED
    show(tried, strange, len(rows) - len(usable), console)
    if printed:
        console.print(Text(f"the end of what it printed: {_printable(printed)}"))
    if interrupted:
        return INTERRUPTED
    return 0 if tried and all(isinstance(one.outcome, RewardResult) for one in [*tried, *strange]) else FAILED


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
