"""Rule-based reward of countdown: an expression that uses the given numbers once each and equals the target (TinyZero)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from grpo_rl.config.schema.kinds import Factor
from grpo_rl.rewards.rules.answers import last_pair

MAX_LENGTH = 1_000
MAX_NUMBERS = 100
MAX_DIGITS = 12
MAX_NESTING = 50
NEAR = Fraction(1, 100_000)

TOKEN = re.compile(r"[0-9]+|[-+*/()]")
SYMBOLS = frozenset("0123456789+-*/() \t\n")


class NoValue(Exception):
    """An error: the text is no arithmetic expression, or it divides by zero."""


def countdown(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    score: Factor = 1.0,
    format_score: Factor = 0.1,
    last_line: bool = True,
) -> dict[str, float]:
    """`score` for the right expression, `format_score` for any other between `<answer>` tags, 0 without them.

    The last pair of tags counts, in the last line only unless `last_line` is off, as TinyZero does. Right is an expression of
    `+ - * /`, brackets and each given number exactly once, whose exact value is within 1e-5 of the target. `acc` is 1 for a
    right one, `answered` where there are tags. `ground_truth` has `numbers` (or `nums`) and `target`; raises ValueError else.
    """
    numbers, target = _task(ground_truth)
    text = solution_str[solution_str.rfind("\n") + 1 :] if last_line else solution_str
    answer = last_pair(text)
    if answer is None:
        return {"score": 0.0, "acc": 0.0, "answered": 0.0}
    try:
        used, value = evaluate(answer.strip())
        right = sorted(used) == sorted(numbers) and abs(value - target) < NEAR
    except NoValue:
        right = False
    return {"score": score if right else format_score, "acc": float(right), "answered": 1.0}


def _task(ground_truth: Any) -> tuple[list[int], Fraction]:
    task = json.loads(ground_truth) if isinstance(ground_truth, str) and ground_truth[:1] == "{" else ground_truth
    numbers = task.get("numbers", task.get("nums")) if isinstance(task, Mapping) else None
    if numbers is None or "target" not in task:
        raise ValueError(f"the ground truth of countdown has 'numbers' and 'target'; this one is {str(ground_truth)[:100]!r}")
    return [int(number) for number in numbers], Fraction(str(task["target"]))


def evaluate(text: str) -> tuple[list[int], Fraction]:
    """The numbers of an arithmetic expression, as they come, and its exact value.

    Raises NoValue for anything but `+ - * /`, brackets and whole numbers without leading zeros, for a division by zero, and
    beyond 1,000 characters, 100 numbers of 12 digits or 50 brackets in each other.
    """
    if len(text) > MAX_LENGTH or not SYMBOLS.issuperset(text):
        raise NoValue
    expression = _Expression(TOKEN.findall(text))
    value = expression.sum(0)
    if expression.next():
        raise NoValue
    return expression.numbers, value


class _Expression:
    def __init__(self, tokens: list[str]) -> None:
        self._tokens, self._place = tokens, 0
        self.numbers: list[int] = []

    def next(self) -> str:
        return self._tokens[self._place] if self._place < len(self._tokens) else ""

    def _take(self) -> str:
        token = self.next()
        self._place += 1
        return token

    def sum(self, depth: int) -> Fraction:
        if depth > MAX_NESTING:
            raise NoValue
        total = self._product(depth)
        while self.next() in ("+", "-"):
            sign = 1 if self._take() == "+" else -1
            total += sign * self._product(depth)
        return total

    def _product(self, depth: int) -> Fraction:
        total = self._factor(depth)
        while self.next() in ("*", "/"):
            operator, factor = self._take(), self._factor(depth)
            if operator == "/" and not factor:
                raise NoValue
            total = total * factor if operator == "*" else total / factor
        return total

    def _factor(self, depth: int) -> Fraction:
        sign = 1
        while self.next() in ("+", "-"):
            sign = -sign if self._take() == "-" else sign
        token = self._take()
        if token == "(":
            value = self.sum(depth + 1)
            if self._take() != ")":
                raise NoValue
            return sign * value
        if not token.isdigit() or len(token) > MAX_DIGITS or (token[0] == "0" and token != "0"):
            raise NoValue
        if len(self.numbers) == MAX_NUMBERS:
            raise NoValue
        self.numbers.append(int(token))
        return sign * Fraction(int(token))
