"""A tool that says whether an answer is right, for data whose ground truth is a number, such as GSM8K."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_rl.config.schema.kinds import Fraction
from grpo_rl.envs.contract import Start, ToolResult
from grpo_rl.errors import ConfigError
from grpo_rl.rewards.rules.number_rules import gsm8k_flexible


class CheckAnswer:
    """The tool `check_answer`: compares a number with the row's ground truth, and says whether it is right.

    It does the work of verl's Gsm8kTool, as which it takes `penalty` (0.05) off the reward for each answer that is no better than
    the one before: a wrong one, and a right one that is given again. The first right answer has the reward 0; what the solution is
    worth is for the reward functions to say. `extra_info.tools_kwargs.NAME.create_kwargs.ground_truth` has the precedence over the
    row's ground truth, as there.
    """

    schema: Mapping[str, Any] = {
        "name": "check_answer",
        "description": "Check whether a number is the right answer of the problem.",
        "parameters": {
            "type": "object",
            "properties": {"answer": {"type": "string", "description": "the number, in digits"}},
            "required": ["answer"],
        },
    }

    def __init__(self, *, penalty: Fraction = 0.05) -> None:
        if isinstance(penalty, bool) or not isinstance(penalty, int | float) or not 0 <= penalty <= 1:
            raise ConfigError(f"tool check_answer: penalty={penalty!r} must be a number from 0 to 1")
        self._penalty = float(penalty)
        self._source, self._right, self._best = "", "", 0.0

    async def begin(self, start: Start) -> None:
        """Keep the row's ground truth."""
        given = [one.get("create_kwargs") or {} for one in (start.extra_info.get("tools_kwargs") or {}).values() if one]
        own = [one["ground_truth"] for one in given if "ground_truth" in one]
        self._source, self._right = start.data_source, str(own[0] if own else start.ground_truth)

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        answer = str(arguments.get("answer", ""))
        score = gsm8k_flexible(self._source, answer, self._right)["score"]
        reward = 0.0 if score > self._best else -self._penalty
        self._best = score
        return ToolResult(f"{answer[:80]} is {'right' if score else 'wrong'}.", reward)

    async def close(self) -> None:
        """Release nothing."""
