"""Rules for arithmetic, GSM8K and countdown."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

from grpo_rl.config.schema.kinds import Factor
from grpo_rl.rewards.math.math_values import NoExpression, typed_value
from grpo_rl.rewards.rules.answers import ExtraInfo, golds_of, last_pair, verdict

MAX_EXACT_DIGITS = 15


def arithmetic(data_source: str, solution_str: str, ground_truth: str, extra_info: ExtraInfo = None) -> dict[str, float]:
    """`score` 1 when the response is the answer and nothing else, spaces around it aside; 0 otherwise.

    `answer` is the number that was given, if the response is one.
    """
    answer = solution_str.strip()
    result = verdict(answer in golds_of(ground_truth))
    digits = answer.removeprefix("-")
    if digits.isascii() and digits.isdigit() and len(digits) <= MAX_EXACT_DIGITS:
        result["answer"] = float(answer)
    return result


def arithmetic_process(data_source: str, solution_str: str, ground_truth: str, extra_info: ExtraInfo = None) -> dict[str, Any]:
    """Return what `arithmetic` gives, and each written character as a step: 1 if the answer has the same one there, else 0.

    `digits` is the share of places, of the answer or the response, whichever is longer, that agree.
    """
    result: dict[str, Any] = arithmetic(data_source, solution_str, ground_truth, extra_info)
    ground_truth = golds_of(ground_truth)[0]
    answer = solution_str.strip()
    start = solution_str.index(answer)
    right = [float(character == ground_truth[place : place + 1]) for place, character in enumerate(answer)]
    steps = [(start + place, reward) for place, reward in enumerate(right, start=1)]
    return result | {"digits": sum(right) / max(len(answer), len(ground_truth)), "steps": steps}


COLUMN = re.compile("[0-9]{1,2}")
"""A column's sum; its carry is the first of two digits."""


def written_sum(data_source: str, solution_str: str, ground_truth: str, extra_info: ExtraInfo = None) -> dict[str, Any]:
    """`score` 1 when the last line is that of the ground truth; each line is a step: 1 if it follows, else 0.

    The rows are those of `task:rated_sums`. A line follows from those before, right or wrong.
    """
    lines, right = solution_str.strip().split("\n"), ground_truth.split("\n")
    end = solution_str.index(lines[0])
    steps, columns = [], ["0"]
    for place, line in enumerate(lines):
        end += len(line) + (place > 0)
        follows = False
        if place < len(right) - 1:
            first, second = map(int, right[place].partition("=")[0].split("+")[:2])
            carry = int(len(columns[-1]) == 2)
            follows = line == f"{first}+{second}{'+1' * carry}={first + second + carry}"
            column = line.rpartition("=")[2]
            columns.append(column if COLUMN.fullmatch(column) else str(first + second + carry))
        elif place == len(right) - 1:
            follows = line == columns[-1] + "".join(column[-1] for column in columns[-2:0:-1])
        if line:
            steps.append((end, float(follows)))
    return verdict(lines[-1] == right[-1], steps=steps)


WINDOW = 300
"""Last characters in which the answer is looked for, as verl does."""
MAX_LENGTH = 64
IN_A_NUMBER = "-$0123456789,."

# One pass each: no part of a pattern can match what its neighbour matches.
MARKED = re.compile(r"####[ \t]*(-?\$?[0-9][0-9,]*(?:\.[0-9]+)?)")
NUMBER = re.compile(r"-?\$?[0-9][0-9,]*(?:\.[0-9]+)?")


def gsm8k(data_source: str, solution_str: str, ground_truth: str, extra_info: ExtraInfo = None) -> dict[str, float]:
    """`score` 1 when the last number after `####` in the last 300 characters equals the ground truth, else 0.

    Commas, `$` and a trailing dot do not matter, and 18.0 is 18. `answer` is the number, if there is one.
    Raises ValueError if the ground truth is neither a number nor a solution of GSM8K's.
    """
    marked = MARKED.findall(solution_str, max(0, len(solution_str) - WINDOW))
    return _graded(marked, ground_truth)


def gsm8k_flexible(data_source: str, solution_str: str, ground_truth: str, extra_info: ExtraInfo = None) -> dict[str, float]:
    """`score` 1 when the last number in the last 300 characters equals the ground truth, marked or not; 0 otherwise."""
    start = max(0, len(solution_str) - WINDOW)
    # Never begin inside a number.
    while start > 0 and solution_str[start] in IN_A_NUMBER and solution_str[start - 1] in IN_A_NUMBER:
        start -= 1
    return _graded(NUMBER.findall(solution_str, start), ground_truth)


def _graded(candidates: list[str], ground_truth: str) -> dict[str, float]:
    golds = [to_number(gold) for gold in golds_of(ground_truth)]
    if all(gold is None for gold in golds):
        raise ValueError(f"the ground truth {str(ground_truth)[:100]!r} is no number; expected one, alone or after ####")
    answer = to_number(candidates[-1]) if candidates else None
    return verdict(0.0) if answer is None else verdict(answer in golds, answer=float(answer))


def to_number(text: str) -> Decimal | None:
    """The exact value of `1,000`, `$18` or `18.50`."""
    text = text.removesuffix(".")
    if len(text) > MAX_LENGTH or not NUMBER.fullmatch(text):
        return None
    return Decimal(text.replace(",", "").replace("$", ""))


NEAR = Fraction(1, 100_000)


def countdown(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: ExtraInfo = None,
    score: Factor = 1.0,
    format_score: Factor = 0.1,
    last_line: bool = True,
) -> dict[str, float]:
    """`score` for the right expression, `format_score` for any other between `<answer>` tags, 0 without them.

    The last pair of tags counts, in the last line only unless `last_line` is off, as TinyZero does. Right is an expression of
    `+ - * /`, brackets and each given number exactly once, whose exact value is within 1e-5 of the target. `acc` is 1 for a
    right one, `answered` if there are tags. `ground_truth` has `numbers` (or `nums`) and `target`; raises ValueError else.
    """
    numbers, target = countdown_task(ground_truth)
    text = solution_str[solution_str.rfind("\n") + 1 :] if last_line else solution_str
    answer = last_pair(text)
    if answer is None:
        return verdict(0.0, answered=0.0)
    try:
        value, used = typed_value(answer)
        are_whole = "**" not in answer and all(map(str.isdigit, used))
        each_once = are_whole and sorted(map(int, used)) == sorted(numbers)
        right = each_once and isinstance(value, Fraction) and abs(value - target) < NEAR
    except NoExpression:
        right = False
    return {"score": score if right else format_score, "acc": float(right), "answered": 1.0}


def countdown_task(ground_truth: Any) -> tuple[list[int], Fraction]:
    task = json.loads(ground_truth) if isinstance(ground_truth, str) and ground_truth[:1] == "{" else ground_truth
    numbers = task.get("numbers", task.get("nums")) if isinstance(task, Mapping) else None
    if numbers is None or "target" not in task:
        raise ValueError(f"the ground truth of countdown has 'numbers' and 'target'; this one is {str(ground_truth)[:100]!r}")
    return [int(number) for number in numbers], Fraction(str(task["target"]))
