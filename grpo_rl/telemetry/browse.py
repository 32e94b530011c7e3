"""`grpo-rl browse RUN [--where "reward<0.5"] [--sort reward]`: a run's rollouts, chosen and shown."""

from __future__ import annotations

import argparse
import math
import operator
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_rl.arguments import Arguments
from grpo_rl.errors import ConfigError, did_you_mean
from grpo_rl.telemetry.metrics.metrics_file import NON_FINITE
from grpo_rl.telemetry.rollouts.rollout_log import read_rollouts, step_file
from grpo_rl.telemetry.rundir import find_run
from grpo_rl.telemetry.terminal.text import safe_text, say

Record = dict[str, Any]

COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
FIELDS = {
    "reward": "reward",
    "advantage": "advantage",
    "baseline": "baseline",
    "failure": "failure",
    "cause": "failure_cause",
    "finish_reason": "finish_reason",
    "ended": "ended",
    "turns": "num_turns",
    "data_source": "data_source",
    "ground_truth": "ground_truth",
    "uid": "uid",
    "sample": "sample",
    "response_length": "response_length",
    "prompt_length": "prompt_length",
    "logprob": "rollout_logprob_mean",
    "prompt": "prompt",
    "response": "response",
}
"""Names of a rollout's fields in conditions; any other name is a component of the reward, which also goes before a field."""
CONDITION = re.compile(r"\s*([A-Za-z_][\w./-]*)\s*(==|!=|<=|>=|<|>|~)\s*(.*?)\s*", re.DOTALL)
WIDTH = 110
SHORTENED = 1200
"""Characters of a prompt or response that are shown unless the whole is asked for."""


def main(argv: Sequence[str]) -> int:
    """Print the rollouts that the command line asks for. Returns 0.

    Raises ConfigError for wrong options and what is no run, DataError where there are no rollouts or they cannot be read.
    """
    say(browse(_parser().read(argv)))
    return 0


def browse(arguments: argparse.Namespace) -> str:
    """Return the rollouts that are shown."""
    conditions = [parse_condition(text) for text in arguments.where]
    step, path = step_file(find_run(arguments.run) / ("val" if arguments.val else "rollouts"), arguments.step)
    records = read_rollouts(path)
    wanted = [condition.name for condition in conditions] + ([arguments.sort.lstrip("-")] if arguments.sort else [])
    check_names(wanted, records)
    chosen = select(records, conditions, arguments.sort)
    shown = chosen[: arguments.limit]
    title = f"{path}: {len(chosen)} of {len(records)} rollouts of step {step}"
    if conditions:
        title += " with " + " and ".join(arguments.where)
    if len(shown) < len(chosen):
        title += f", the first {len(shown)} shown"
    return as_text(title, shown, full=arguments.full)


def select(records: Sequence[Record], conditions: Sequence[Condition], sort: str | None) -> list[Record]:
    """Return the rollouts that meet all conditions, sorted by the field or component `sort`; `-sort` is from large to small.

    Rollouts without the field, or with NaN, come last either way.
    """
    chosen = [record for record in records if all(condition.holds(record) for condition in conditions)]
    if sort is None:
        return chosen
    name = sort.lstrip("-")
    valued = [(value, record) for record in chosen if (value := field(record, name)) is not None and value == value]
    numbers = all(isinstance(value, int | float) for value, _ in valued)
    valued.sort(key=lambda each: each[0] if numbers else str(each[0]), reverse=sort.startswith("-"))
    ranked = [record for _, record in valued]
    return ranked + [record for record in chosen if not any(record is other for other in ranked)]


@dataclass(frozen=True, slots=True)
class Condition:
    """`name` compared with `value`; `~` asks whether the text holds the value."""

    name: str
    comparison: str
    value: str

    def holds(self, record: Record) -> bool:
        """Return whether the rollout meets the condition. A field that it does not have meets only `!=`, and `==none`."""
        found = field(record, self.name)
        if self.value.lower() == "none" and self.comparison in ("==", "!="):
            return (found is None) == (self.comparison == "==")
        if found is None:
            return self.comparison == "!="
        if self.comparison == "~":
            return self.value in str(found)
        wanted = _number(self.value)
        if isinstance(found, int | float) and wanted is not None:
            return COMPARISONS[self.comparison](found, wanted)
        if self.comparison in ("==", "!="):
            return COMPARISONS[self.comparison](str(found), self.value)
        return False


def parse_condition(text: str) -> Condition:
    """Parse `NAME(==|!=|<|<=|>|>=|~)VALUE`. Raises ConfigError for another form."""
    match = CONDITION.fullmatch(text)
    if match is None or not match[3]:
        raise ConfigError(
            f"--where {text!r}: write NAME, a comparison (== != < <= > >= or ~ for holds), and a value: reward<0.5, "
            f"format==0, failure==reward_timeout, response~sorry"
        )
    condition = Condition(match[1], match[2], match[3])
    if condition.comparison in ("<", "<=", ">", ">=") and _number(condition.value) is None:
        raise ConfigError(f"--where {text!r}: {condition.value!r} is not a number; {condition.comparison} compares numbers")
    return condition


def field(record: Record, name: str) -> Any:
    """Return the field or the component `name` of the rollout; None where it has none. NaN is a number again."""
    parts = record.get("reward_parts", {})
    value = parts[name] if name in parts else record.get(FIELDS.get(name, ""))
    return NON_FINITE.get(value, value) if isinstance(value, str) else value


def check_names(names: Sequence[str], records: Sequence[Record]) -> None:
    """Raise ConfigError, with the nearest names, for one that is neither a field nor a component of any of the rollouts."""
    components = {part for record in records for part in record.get("reward_parts", {})}
    known = [*FIELDS, *sorted(components)]
    for name in names:
        if name not in known:
            raise ConfigError(f"no rollout has {name!r}.{did_you_mean(name, known)} There are {', '.join(known)}")


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return None if math.isnan(value) else value


def as_text(title: str, records: Sequence[Record], *, full: bool = False) -> str:
    """Return one block of text per rollout: facts, prompt, ground truth, response.

    Every character that a terminal would obey is escaped.
    """
    lines = [safe_text(title)]
    for record in records:
        lines.append("-" * WIDTH)
        lines += _wrapped("", "  ".join(f"{name}={value}" for name, value in facts(record)), drop=True)
        for label, text in texts(record):
            shown = safe_text(text, limit=None if full else SHORTENED, keep_newlines=True)
            for number, part in enumerate(shown.split("\n")):
                lines += _wrapped(label if number == 0 else "", part)
    return "\n".join(lines)


def facts(record: Record) -> list[tuple[str, str]]:
    """Return reward, components, advantage and the other short facts, in the order in which they are shown."""
    names = ["reward", "failure", *record.get("reward_parts", {}), "advantage", "baseline"]
    names += ["ended", "turns", "finish_reason", "response_length", "data_source", "uid", "sample"]
    found = [(name, value) for name in names if (value := field(record, name)) is not None]
    return [(name, f"{value:.4g}" if isinstance(value, float) else str(value)) for name, value in found]


def texts(record: Record) -> list[tuple[str, str]]:
    """Return prompt, ground truth, response or the turns of an episode, and why there is no score, with their labels.

    Assistant turns, whose tokens are trained, have a `*`.
    """
    pairs = [("prompt", record["prompt"]), ("truth", record.get("ground_truth"))]
    if record.get("episode"):
        for message in record["episode"].get("messages", ()):
            role = str(message.get("role", ""))
            pairs.append(("turn *" if role == "assistant" else role, message.get("content", "")))
    else:
        pairs.append(("response", record["response"]))
    return [(label, str(text)) for label, text in [*pairs, ("cause", record.get("failure_cause"))] if text is not None]


def _wrapped(label: str, text: str, *, drop: bool = False) -> list[str]:
    return textwrap.wrap(
        safe_text(text),
        width=WIDTH,
        initial_indent=f"{label:<10}",
        subsequent_indent=" " * 10,
        drop_whitespace=drop,
        replace_whitespace=False,
        break_on_hyphens=False,
    ) or [f"{label:<10}".rstrip()]


def _parser() -> Arguments:
    parser = Arguments(
        "browse",
        "Show rollouts of a run, one step at a time. Names in --where and --sort are the components of the reward, and\n"
        + textwrap.fill(", ".join(FIELDS), 110),
        "grpo-rl browse my_run --where 'reward<0.5' --sort=-response_length",
    )
    parser.add_argument("run", metavar="RUN", help="the folder or the name of a run")
    parser.add_argument("--step", type=int, help="the step; the last one if not given")
    parser.add_argument("--val", action="store_true", help="validation instead of training")
    parser.add_argument(
        "--where", action="append", default=[], metavar="CONDITION", help="such as reward<0.5; all that are given must hold"
    )
    parser.add_argument("--sort", metavar="NAME", help="from small to large; --sort=-NAME from large to small")
    parser.add_argument("--limit", type=int, default=10, help="rollouts at most (10)")
    parser.add_argument("--full", action="store_true", help="long prompts and responses whole")
    return parser
