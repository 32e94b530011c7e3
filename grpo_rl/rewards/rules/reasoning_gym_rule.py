"""Reward of the reasoning-gym data sets: each one's own scorer, kept away from text that could harm it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from grpo_rl import gym
from grpo_rl.errors import RewardError
from grpo_rl.rewards.rules.expressions import NotAnExpression
from grpo_rl.rewards.rules.gym_scorers import SCORERS, Unreadable

OPEN, CLOSE = "<answer>", "</answer>"
LONGEST_ANSWER = 4096
LONGEST_NUMBER = 100
"""Digits in a row; a data set whose own answer has more allows twice as many as that."""
LONGEST_REPEAT = 2
"""Digits of a number that is a count of repetitions."""
REPEATS = frozenset({"rubiks_cube", "rush_hour"})
"""Data sets whose scorer makes as many moves as a number demands: R99999999 is one of their moves."""
SHORT_ANSWERS = {"codeio": 1000, "propositional_logic": 400}
"""Data sets whose scorer takes more than linear time; the longest answer, or three times the right one."""
DIGITS = re.compile(r"\d+")
"""Digits of any script: Python reads them all as numbers."""
HUGE_EXPONENT = re.compile(r"[\d.][eE][+-]?\d{4,}")


def reasoning_gym(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> dict[str, float]:
    """`score` is what the data set's own scorer gives, from 0 to 1; `acc` is 1 for full marks.

    The answer is the text between the last <answer> tags (`tagged` 1), or else the whole response. `refused` is 1
    where the answer was not shown to the scorer, or could not be read by it, and scored 0: too long, numbers too
    large, or text that the scorer fails on. Raises RewardError for a row without `extra_info.gym`.
    """
    carried = (extra_info or {}).get("gym")
    if not data_source.startswith(gym.SOURCE_PREFIX) or not isinstance(carried, dict):
        raise RewardError(
            f"reasoning_gym scores rows of data.train_files=reasoning_gym:NAME, which have extra_info.gym; "
            f"this row is from {data_source!r}"
        )
    name = data_source.removeprefix(gym.SOURCE_PREFIX)
    answer, tagged = extract_answer(solution_str)
    options = tuple(sorted((str(key), str(text)) for key, text in carried["options"].items()))
    score, refused = 0.0, not _may_be_read(name, answer, ground_truth)
    if not refused:
        entry = _entry(name, options, carried, ground_truth)
        dataset = gym.build(name, options, 0)
        score, refused = _score(name, dataset, answer, entry)
    return {"score": score, "acc": float(score >= 1), "tagged": float(tagged), "refused": float(refused)}


def extract_answer(response: str) -> tuple[str, bool]:
    """The text between the last <answer> and the </answer> after it, stripped, and True; else the whole response and False."""
    end = response.rfind(CLOSE)
    start = response.rfind(OPEN, 0, end) if end >= 0 else -1
    if start < 0:
        return response.strip(), False
    return response[start + len(OPEN) : end].strip(), True


def _may_be_read(name: str, answer: str, truth: Any) -> bool:
    """Return whether the scorer's work on this answer is bounded."""
    right = truth if isinstance(truth, str) else ""
    if answer == right:
        return True
    if len(answer) > max(LONGEST_ANSWER, 2 * len(right)):
        return False
    if name in SHORT_ANSWERS and len(answer) > max(SHORT_ANSWERS[name], 3 * len(right)):
        return False
    answer = answer.replace("_", "")  # which Python allows between digits
    longest = max(map(len, DIGITS.findall(answer)), default=0)
    if name in REPEATS and longest > LONGEST_REPEAT:
        return False
    allowed = max(LONGEST_NUMBER, 2 * max(map(len, DIGITS.findall(right)), default=0))
    return longest <= allowed and not HUGE_EXPONENT.search(answer)


def _entry(name: str, options: gym.Options, carried: dict[str, Any], truth: Any) -> dict[str, Any]:
    if "metadata" in carried:
        return {"answer": truth, "metadata": gym.decode(carried["metadata"])}
    return gym.remade_entry(name, options, carried["seed"], carried["entry"])


def _score(name: str, dataset: Any, answer: str, entry: dict[str, Any]) -> tuple[float, bool]:
    """The score, and whether the scorer could not read the answer."""
    scorer: Callable[[Any, str, dict[str, Any]], float] = SCORERS.get(name, _own_scorer)
    try:
        return float(scorer(dataset, answer, entry)), False
    except (Unreadable, NotAnExpression):
        return 0.0, True
    except Exception:  # the package's scorers raise for text they did not expect, each something else
        return 0.0, True


def _own_scorer(dataset: Any, answer: str, entry: dict[str, Any]) -> float:
    return dataset.score_answer(answer, entry)
