"""Checks of a reward function's return value: a finite number, or a dict with `score`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any, NamedTuple

from grpo_rl.rewards.contract.failures import INVALID, RewardFailure

LONGEST_SHOWN = 200


class Result(NamedTuple):
    """One function's view of one response."""

    score: float
    values: dict[str, float]
    """Further numbers of the dict, by their key."""
    steps: Any
    """The value under `steps`, unread; None where there is none."""

    def plain(self) -> dict[str, Any]:
        """A dict that `read_result` reads as the same result."""
        steps = {} if self.steps is None else {"steps": self.steps}
        return {**self.values, **steps, "score": self.score}


def read_result(value: Any) -> Result:
    """The result in `value`. Raises RewardFailure (`reward_invalid`), with the value and the rule, where there is none."""
    if not isinstance(value, Mapping):
        return Result(_number(value, "score"), {}, None)
    if "score" not in value:
        raise RewardFailure(INVALID, f"the dict has no 'score', it has {', '.join(map(str, value)) or 'nothing'}")
    numbers = {
        str(key): _number(number, str(key))
        for key, number in value.items()
        if key not in ("score", "steps") and isinstance(number, Real)  # text is for the user's own logs
    }
    return Result(_number(value["score"], "score"), numbers, value.get("steps"))


def _number(value: Any, key: str) -> float:
    if not isinstance(value, Real):
        raise RewardFailure(INVALID, f"{key} is {_shown(value)} ({type(value).__name__}), not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RewardFailure(INVALID, f"{key} is {number}, not a finite number")
    return number


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."
