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


def arithmetic_process(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return what `arithmetic` gives, and each written character as a step: 1 where the answer has the same one there, else 0.

    `digits` is the share of places, of the answer or the response, whichever is longer, that agree.
    """
    result: dict[str, Any] = dict(arithmetic(data_source, solution_str, ground_truth, extra_info))
    given = solution_str.strip()
    start = solution_str.index(given)
    right = [float(character == ground_truth[place : place + 1]) for place, character in enumerate(given)]
    result["digits"] = sum(right) / max(len(given), len(ground_truth))
    result["steps"] = [(start + place + 1, reward) for place, reward in enumerate(right)]
    return result
