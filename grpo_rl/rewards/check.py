"""`grpo-rl check-reward`: try a reward function on rows of a file before any training.

Exit code 0 if every response got a reward, else 2.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from grpo_rl.arguments import Arguments, whole_number
from grpo_rl.config.compose import compose
from grpo_rl.config.schema.tree import DataConfig, RewardConfig
from grpo_rl.data.rows import at, column, wrong
from grpo_rl.data.sources.locate import open_source
from grpo_rl.data.sources.source import Joined
from grpo_rl.errors import ConfigError, GrpoRlError, RewardError
from grpo_rl.processes.child import OutputLog
from grpo_rl.rewards.compose import RewardFunction
from grpo_rl.rewards.contract import Outcome, RewardFailure, RewardResult, Sample
from grpo_rl.rewards.registry import reads_marks
from grpo_rl.rewards.rules.answers import golds_of
from grpo_rl.rewards.rules.number_rules import countdown_task
from grpo_rl.rewards.runtime.process import Job, RewardProcess, spared

SHOWN_ROWS = 20
TRIED_ROWS = 8
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
"""Each is tried on the first row with a reward. Plain is the bare ground truth."""
IN_MARKS, BARE = "the ground truth in the forms of the known rules", "the bare ground truth"
PLAIN_DIGITS = 6
"""More digits before or behind the point are written with a power of ten."""
MAX_NUMBERS = 5
"""Numbers of a countdown that is solved: six take seconds."""


class Row(NamedTuple):
    place: int
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]
    forms: dict[str, str]
    """Responses that should be right, by the words for what each is; none if the row has a response."""
    response: str | None = None

    def sample(self) -> Sample:
        return Sample(self.data_source, self.response or "", self.ground_truth, self.extra_info)


class TriedRow(NamedTuple):
    row: Row
    seconds: float
    outcome: Outcome


class Trial:
    def __init__(self, config: RewardConfig, log: OutputLog) -> None:
        components = RewardFunction.from_config(config).components
        self._config, self._components = config, sorted(components, key=lambda component: component.batched)
        self._worker: RewardProcess | None = None
        self._log, self._data_sources = log, set[str]()

    def outcomes(self, rows: Sequence[Row]) -> Iterator[TriedRow]:
        """One call for each row, or one for all if a function takes lists."""
        self._data_sources |= {row.data_source for row in rows}
        batched = [component.name for component in self._components if component.batched]
        singly = [component.name for component in self._components if not component.batched]
        for some in [rows] if rows and batched else [[row] for row in rows]:
            samples = [row.sample for row in some]
            jobs = [Job([sample], singly) for sample in samples] if singly else []
            joint = [Job(samples, [name], batched=True) for name in batched]
            self._ask([*jobs, *joint])
            further = [spared(job, self._ask) for job in joint]
            seconds = sum(job.seconds for job in (*jobs, *joint)) / len(some)
            for number, row in enumerate(some):
                single = jobs[number].outcomes if jobs else []
                yield TriedRow(row, seconds, self._sum([*single, *(outcomes[number] for outcomes in further)]))

    def _sum(self, outcomes: Sequence[Outcome]) -> Outcome:
        score, values = 0.0, dict[str, float]()
        for component, outcome in zip(self._components, outcomes, strict=False):
            if isinstance(outcome, RewardFailure) or len(self._components) == 1:
                return outcome
            score += component.factor * outcome.score
            values |= outcome.parts(component.name)
        return RewardResult(score, values)

    def close(self) -> None:
        if self._worker is not None:
            self._worker.child.kill()

    def _ask(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            waiting: Sequence[Job] = [job]
            while waiting:
                if self._worker is None or not self._worker.child.alive:
                    self._worker = RewardProcess(self._config, list(self._data_sources), self._log)
                    if trouble := self._worker.child.wait_until_ready():
                        raise RewardError(f"the process of the reward function cannot start: {trouble}")
                waiting = self._worker.ask(waiting)


def read_rows(names: Sequence[str], count: int, response: str | None, data: DataConfig, functions: Sequence[str]) -> list[Row]:
    """`response` names the responses' column. Raises DataError, naming the file, the row and the column."""
    source = Joined("the data", [open_source(name) for name in names])
    rows = []
    for place in range(min(count, len(source))):
        row = source.row(place)
        with at(source.where(place)):
            rows.append(_row(place, row, response, data, functions))
    return rows


def _row(place: int, row: dict[str, Any], response: str | None, data: DataConfig, functions: Sequence[str]) -> Row:
    # The prompt is not looked at: a file with responses needs none.
    source = data.data_source or str(row.get(data.reward_fn_key, ""))
    gold, extra = column(row, data.ground_truth_key), column(row, data.extra_info_key, optional=True)
    extra_info = dict(extra) if isinstance(extra, Mapping) else {}
    if response is None and "response" not in row:
        marked = all(reads_marks(name, source) for name in functions)
        return Row(place, source, gold, extra_info, right_responses(row, source, gold, extra_info, marked_only=marked))
    text = column(row, response or "response")
    if not isinstance(text, str):
        raise wrong(response or "response", text, "text")
    return Row(place, source, gold, extra_info, {}, text)


def best_form(trial: Trial, rows: Sequence[Row]) -> str:
    forms = list(dict.fromkeys(form for row in rows for form in row.forms))
    tries = [(form, row._replace(response=row.forms[form])) for form in forms for row in rows[:TRIED_ROWS] if form in row.forms]
    worth = dict.fromkeys(forms, 0.0)
    if len(forms) > 1:
        for (form, _), outcome in zip(tries, trial.outcomes([row for _, row in tries]), strict=True):
            worth[form] += outcome.outcome.score if isinstance(outcome.outcome, RewardResult) else 0.0
    return max(forms, key=worth.__getitem__)


def right_responses(
    row: Mapping[str, Any], data_source: str, ground_truth: Any, extra_info: Mapping[str, Any], *, marked_only: bool = False
) -> dict[str, str]:
    """Responses that should be right, by the words for what each is.

    With `marked_only` none is the bare ground truth, which a rule for marked answers finds equal to itself.
    """
    summary: dict[str, Any] = {
        "the row's response": row.get("response"),
        "the row's demonstration": extra_info.get("demonstration"),
        "the row's last assistant message": _last_answer(row),
    }
    with contextlib.suppress(TypeError, ValueError, ArithmeticError, LookupError):
        summary[IN_MARKS] = gold_response(data_source, ground_truth, extra_info)
    if not marked_only:
        gold = ground_truth[0] if isinstance(ground_truth, list | tuple) and ground_truth else ground_truth
        bare = gold if isinstance(gold, str) else json.dumps(gold, ensure_ascii=False) if gold is not None else None
        summary[BARE] = bare
    return {name: text for name, text in summary.items() if isinstance(text, str) and text}


def is_structured(ground_truth: Any) -> bool:
    if isinstance(ground_truth, str):
        return ground_truth.lstrip().startswith(("{", "["))
    if isinstance(ground_truth, list | tuple):
        return any(isinstance(part, list | tuple | Mapping) for part in ground_truth)
    return isinstance(ground_truth, Mapping)


def _last_answer(row: Mapping[str, Any]) -> str | None:
    for value in row.values():
        last = value[-1] if isinstance(value, list) and value else None
        if isinstance(last, Mapping) and last.get("role") == "assistant" and isinstance(last.get("content"), str):
            return str(last["content"])
    return None


def gold_response(data_source: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> str | None:
    """A right response in all the forms that the rules read; None if it cannot be made.

    Raises ValueError for an object that is no task of countdown.
    """
    solution = extra_info.get("answer")
    if isinstance(solution, str) and "####" in solution:
        return solution
    if isinstance(ground_truth, Mapping):
        expression = solve(*countdown_task(ground_truth))
        return None if expression is None else f"<think>\nso\n</think>\n<answer>{expression}</answer>"
    try:
        gold = golds_of(ground_truth)[0]
    except ValueError:
        return None
    # In a form of its own if there is one: a rule that cannot read the ground truth would find its own text in it.
    written = _scientific(gold) if isinstance(ground_truth, float) else gold
    return gold if data_source == "arithmetic" else f"The answer is \\boxed{{{written}}}.\n#### {gold}"


def _scientific(gold: str) -> str:
    """602000000 as `6.02 \\times 10^{8}`; a number of few digits as it is."""
    exponent = Decimal(gold).adjusted()
    mantissa = Decimal(gold).scaleb(-exponent).normalize()
    return rf"{mantissa} \times 10^{{{exponent}}}" if abs(exponent) > PLAIN_DIGITS else gold


def solve(numbers: list[int], target: Fraction) -> str | None:
    """An expression of all `numbers`, each once, whose value is `target`."""
    return _solve([(Fraction(n), str(n)) for n in numbers], target) if len(numbers) <= MAX_NUMBERS else None


def _solve(terms: list[tuple[Fraction, str]], target: Fraction) -> str | None:
    if len(terms) == 1:
        return terms[0][1] if terms[0][0] == target else None
    for first, second in itertools.permutations(range(len(terms)), 2):
        rest = [term for place, term in enumerate(terms) if place not in (first, second)]
        (a, a_text), (b, b_text) = terms[first], terms[second]
        values = [("+", a + b), ("*", a * b)] if first < second else []
        values += [("-", a - b), *([("/", a / b)] if b else [])]
        for sign, value in values:
            expression = _solve([*rest, (value, f"({a_text} {sign} {b_text})")], target)
            if expression is not None:
                return expression
    return None


def show(tried: Sequence[TriedRow], strange: Sequence[TriedRow], unmade: int, console: Console) -> None:
    table = Table("row", "response", "score", "parts")
    for row, _, outcome in tried[:SHOWN_ROWS]:
        score, values = ("failed", {}) if isinstance(outcome, RewardFailure) else (f"{outcome.score:g}", outcome.values)
        text = row.response or ""
        start = _printable(text[:SHOWN_CHARACTERS]) + "…" * (len(text) > SHOWN_CHARACTERS)
        table.add_row(str(row.place), Text(start), score, Text("  ".join(f"{key} {value:g}" for key, value in values.items())))
    console.print(table)
    if len(tried) > SHOWN_ROWS:
        console.print(f"and {len(tried) - SHOWN_ROWS} rows more")
    if unmade:
        console.print(
            f"{unmade} rows left out: no right response could be made from their ground truth; give a column `response`"
        )
    if not tried:
        return
    if scores := [tried_row.outcome.score for tried_row in tried if isinstance(tried_row.outcome, RewardResult)]:
        console.print(f"score: mean {sum(scores) / len(scores):.4g}, least {min(scores):g}, greatest {max(scores):g}")
    # The first call loads what the function needs.
    warm = [1000 * tried_row.seconds for tried_row in tried[1:] or tried]
    median, p99, maximum = np.percentile(warm, (50, 99, 100), method="inverted_cdf")
    console.print(
        f"time per call: p50 {median:.3f} ms, p99 {p99:.3f} ms, max {maximum:.3f} ms; "
        f"the first one {1000 * tried[0].seconds:.1f} ms"
    )
    failures = [
        f"  row {row.place}: {_failure_text(outcome)}" for row, _, outcome in tried if isinstance(outcome, RewardFailure)
    ]
    console.print(f"{len(tried)} rows, {len(failures)} failed")
    if len(failures) > SHOWN_FAILURES:
        failures[SHOWN_FAILURES:] = [f"  and {len(failures) - SHOWN_FAILURES} more"]
    earned = []
    for name, tried_row in zip(STRANGE, strange, strict=False):
        if isinstance(tried_row.outcome, RewardFailure):
            failures.append(f"a response that is {name} failed: {_failure_text(tried_row.outcome)}")
        else:
            earned.append(f"{name} {tried_row.outcome.score:g}")
    for failure in failures:
        console.print(Text(failure, style="red"))
    if earned:
        console.print(f"strange responses to the first row: {', '.join(earned)}")


def _failure_text(failure: RewardFailure) -> str:
    return f"{failure.kind}: {_printable(failure.cause)}"


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else "·" for character in text)


def main(arguments: Sequence[str] | None = None, console: Console | None = None) -> int:
    parser = Arguments(
        "check-reward",
        "Try a reward on rows before any training. Columns, options and recipes are those of a run: data.ground_truth_key=age,\n"
        "recipe=./my.yaml; a recipe may give the functions and the data too.",
        "grpo-rl check-reward my_reward.py --data rows.jsonl\n  grpo-rl check-reward recipe=real/json_extraction",
    )
    parser.add_argument(
        "function",
        nargs="?",
        help="my_reward.py, my_reward.py:name, package.module:name, a registered name (as the recipe has it)",
    )
    parser.add_argument("--data", help="a file, a folder, task:NAME (as the recipe has it: data.train_files)")
    parser.add_argument("--rows", type=whole_number, default=100, help="how many rows, from the first (default: 100)")
    parser.add_argument(
        "--column", help="the column with the responses (default: response, a demonstration, or made from the gold)"
    )
    parser.add_argument("--batched", action="store_true", help="the function takes lists, one call for all rows")
    parser.add_argument(
        "--options", default="{}", help="keyword arguments of the function, as JSON, e.g. '{\"boxed_only\": true}'"
    )
    parser.add_argument("--timeout_s", type=float, help="maximum call (as reward.timeout_s)")
    console = console or Console()
    tried, strange = list[TriedRow](), list[TriedRow]()
    log, printed, interrupted = OutputLog(), "", False
    try:
        options, words = parser.read_with_settings(sys.argv[1:] if arguments is None else arguments)
        if options.timeout_s is not None and not options.timeout_s > 0:
            raise ConfigError(f"--timeout_s is {options.timeout_s:g}; it must be above 0")
        config = compose(words).config
        if options.data is None and not any(word.startswith(("recipe=", "data.train_files=")) for word in words):
            raise ConfigError("--data is missing: a file, a folder, task:NAME; or a recipe with data.train_files")
        reward = _reward_of(options, config.reward)
        with contextlib.closing(Trial(reward, log)) as trial:
            data = [options.data] if options.data is not None else config.data.train_files
            rows = read_rows(data, options.rows, options.column, config.data, reward.functions)
            usable = list[Row]()
            try:
                if without := [row for row in rows if row.forms]:
                    form = best_form(trial, without)
                    console.print(f"responses: {form}")
                    rows = [row._replace(response=row.forms[form]) if form in row.forms else row for row in rows]
                usable = [row for row in rows if row.response is not None]
                tried.extend(trial.outcomes(usable))
                printed = log.last
                if row := next((tried_row.row for tried_row in tried if isinstance(tried_row.outcome, RewardResult)), None):
                    texts = [str(row.ground_truth) if text is None else text for text in STRANGE.values()]
                    strange.extend(trial.outcomes([row._replace(response=text) for text in texts]))
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
    return 0 if tried and all(isinstance(tried_row.outcome, RewardResult) for tried_row in [*tried, *strange]) else FAILED


def _reward_of(given: argparse.Namespace, config: RewardConfig) -> RewardConfig:
    timeout_s = config.timeout_s if given.timeout_s is None else given.timeout_s
    try:
        options = json.loads(given.options)
    except ValueError as error:
        raise ConfigError(f"--options is no JSON: {error}") from None
    if not isinstance(options, dict):
        raise ConfigError(f"--options is {given.options!r}; it must be a JSON object, e.g. {{}}")
    if given.function is None:
        if options or given.batched:
            raise ConfigError("--options and --batched belong to a function that is named; a recipe has reward.function_kwargs")
        return replace(config, timeout_s=timeout_s)
    name = f"{given.function}:compute_score" if given.function.endswith(".py") else given.function
    return RewardConfig(
        functions=[name],
        function_kwargs={name: options} if options else {},
        batched=[name] if given.batched else [],
        timeout_s=timeout_s,
    )


if __name__ == "__main__":
    sys.exit(main())
