"""Reward of the form `<think>...</think><answer>...</answer>` (DeepSeek-R1's format reward)."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import Any

OPEN_THINK, CLOSE_THINK, OPEN_ANSWER, CLOSE_ANSWER = TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def think_answer(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None) -> float:
    """1 when the response is one thought and then one answer, each in its tags, with only space around them; else 0.

    Every tag must be there exactly once; thought and answer have a letter, a digit or a mathematical sign each. Takes time linear in the length.
    """
    text = solution_str.strip()
    if any(text.count(tag) != 1 for tag in TAGS) or not (text.startswith(OPEN_THINK) and text.endswith(CLOSE_ANSWER)):
        return 0.0
    thought_end, answer_start = text.index(CLOSE_THINK), text.index(OPEN_ANSWER)
    if answer_start < thought_end:
        return 0.0
    thought, between = text[len(OPEN_THINK) : thought_end], text[thought_end + len(CLOSE_THINK) : answer_start]
    answer = text[answer_start + len(OPEN_ANSWER) : -len(CLOSE_ANSWER)]
    return float(not between.strip() and _says_something(thought) and _says_something(answer))


def _says_something(text: str) -> bool:
    return any(character.isalnum() or unicodedata.category(character) == "Sm" for character in text)


def tags(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    names: Sequence[str] = ("think", "answer"),
) -> dict[str, float]:
    """The share of the opening and closing tags of `names` that are there exactly once; 0 where these are out of order.

    `once` is that share whatever the order, `ordered` 1 where those that are there once stand in order. A softer
    `think_answer`, for models that have not learnt the form yet. Takes time linear in the length. Raises ValueError
    without names.
    """
    wanted = [tag for name in names for tag in (f"<{name}>", f"</{name}>")]
    if not wanted:
        raise ValueError("names is empty; give at least one tag, e.g. [think, answer]")
    places = [solution_str.find(tag) for tag in wanted if solution_str.count(tag) == 1]
    once = len(places) / len(wanted)
    ordered = float(bool(places) and places == sorted(places))
    return {"score": once * ordered, "once": once, "ordered": ordered}
