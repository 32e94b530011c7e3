"""Reward of the procedural arithmetic task."""

from __future__ import annotations

from typing import Any

MAX_EXACT_DIGITS = 15
"""Integers of so many digits are exact as floats, which the parts of a reward are."""


def arithmetic(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, float]:
    """`score` 1 when the response is the answer and nothing else, spaces around it aside; 0 otherwise.

    `answer` is the number that was given, where the response is one.
    """
    given = solution_str.strip()
    score = float(given == ground_truth)
    result = {"score": score, "acc": score}
    digits = given.removeprefix("-")
    if digits.isascii() and digits.isdigit() and len(digits) <= MAX_EXACT_DIGITS:
        result["answer"] = float(given)
    return result
