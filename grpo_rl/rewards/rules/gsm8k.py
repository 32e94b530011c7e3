"""Rule-based reward of GSM8K: the number after `####`, or the last number of the response."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

WINDOW = 300
"""Characters at the end of a response in which the answer is looked for, as verl does."""
MAX_LENGTH = 64
"""Digits of an answer; a longer run of digits is none."""
IN_A_NUMBER = "-$0123456789,."

# One pass each: no part of a pattern can match what its neighbour matches.
MARKED = re.compile(r"####[ \t]*(-?\$?[0-9][0-9,]*(?:\.[0-9]+)?)")
NUMBER = re.compile(r"-?\$?[0-9][0-9,]*(?:\.[0-9]+)?")


def gsm8k(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None) -> dict[str, float]:
    """`score` 1 when the last number after `####` in the last 300 characters equals the ground truth; 0 otherwise.

    Commas, `$` and a trailing dot do not matter, and 18.0 is 18. `answer` is the number, where there is one.
    """
    marked = MARKED.findall(solution_str, max(0, len(solution_str) - WINDOW))
    return _graded(marked, ground_truth)


def gsm8k_flexible(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, float]:
    """`score` 1 when the last number in the last 300 characters equals the ground truth, marked or not; 0 otherwise."""
    start = max(0, len(solution_str) - WINDOW)
    # Never begin inside a number.
    while start > 0 and solution_str[start] in IN_A_NUMBER and solution_str[start - 1] in IN_A_NUMBER:
        start -= 1
    return _graded(NUMBER.findall(solution_str, start), ground_truth)


def _graded(candidates: list[str], ground_truth: str) -> dict[str, float]:
    answer = to_number(candidates[-1]) if candidates else None
    if answer is None:
        return {"score": 0.0, "acc": 0.0}
    gold = to_number(str(ground_truth).strip())
    score = float(answer == gold)
    return {"score": score, "acc": score, "answer": float(answer)}


def to_number(text: str) -> Decimal | None:
    """The exact value of `1,000`, `$18` or `18.50`; None for anything else."""
    text = text.removesuffix(".")
    if len(text) > MAX_LENGTH or not NUMBER.fullmatch(text):
        return None
    return Decimal(text.replace(",", "").replace("$", ""))
