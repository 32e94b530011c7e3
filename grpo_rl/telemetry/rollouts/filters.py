"""Conditions on rollouts such as `reward<0.5` and `format==0`, read without running them."""

from __future__ import annotations

import difflib
import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_rl.errors import ConfigError

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
    return (
        {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}.get(value, value) if isinstance(value, str) else value
    )


def check_names(names: Sequence[str], records: Sequence[Record]) -> None:
    """Raise ConfigError, with the nearest names, for one that is neither a field nor a component of any of the rollouts."""
    components = {part for record in records for part in record.get("reward_parts", {})}
    known = [*FIELDS, *sorted(components)]
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
            hint = f" Did you mean {' or '.join(near)}?" if near else ""
            raise ConfigError(f"no rollout has {name!r}.{hint} There are {', '.join(known)}")


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return None if math.isnan(value) else value
