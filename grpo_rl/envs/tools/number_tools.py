from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from grpo_rl.config.schema.kinds import Fraction as Share
from grpo_rl.envs.contract import SimpleTool, Start, ToolResult, text_tool
from grpo_rl.rewards.math.math_values import NoExpression, typed_value
from grpo_rl.rewards.rules.number_rules import gsm8k_flexible

LARGEST = 10**30
DIGITS = 12


class Calculator(SimpleTool):
    """The tool `calculator`: + - * / ** and brackets. Whole results are exact, others have 12 significant digits."""

    schema = text_tool(
        "calculator",
        "Work out an arithmetic expression of numbers, + - * / ** and brackets.",
        "expression",
        "for example (12 + 7) * 3",
    )

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        expression = arguments.get("expression")
        if not isinstance(expression, str):
            return ToolResult("expression must be a string such as (12 + 7) * 3", failed=True)
        try:
            return ToolResult(calculated(expression))
        except NoExpression:
            return ToolResult(
                "not an expression: numbers, + - * / ** and brackets are read, without a division by zero, and with a "
                "real value of at most 30 digits",
                failed=True,
            )


def calculated(expression: str) -> str:
    """Raises NoExpression, also for results of more than 30 digits."""
    value, _ = typed_value(expression)
    if isinstance(value, complex):
        if value.imag:
            raise NoExpression
        value = Fraction(value.real)
    if abs(value) > LARGEST:
        raise NoExpression
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.{DIGITS}g}"


class CheckAnswer(SimpleTool):
    """The tool `check_answer`: compares a number with the row's ground truth, and says whether it is right.

    Like verl's Gsm8kTool it takes `penalty` (0.05) off the reward for each answer that is no better than the
    one before: a wrong one, and a right one that is given again. The first right answer has the reward 0;
    what the solution is worth is for the reward functions to say.
    `extra_info.tools_kwargs.NAME.create_kwargs.ground_truth` has the precedence over the row's ground truth.
    """

    schema = text_tool(
        "check_answer", "Check whether a number is the right answer of the problem.", "answer", "the number, in digits"
    )

    def __init__(self, *, penalty: Share = 0.05) -> None:
        self._penalty = float(penalty)
        self._source, self._right, self._best = "", "", 0.0

    async def begin(self, start: Start) -> None:
        tool_options = [
            entry.get("create_kwargs") or {} for entry in (start.extra_info.get("tools_kwargs") or {}).values() if entry
        ]
        ground_truths = [options["ground_truth"] for options in tool_options if "ground_truth" in options]
        self._source, self._right = start.data_source, str(ground_truths[0] if ground_truths else start.ground_truth)

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        answer = str(arguments.get("answer", ""))
        score = gsm8k_flexible(self._source, answer, self._right)["score"]
        reward = 0.0 if score > self._best else -self._penalty
        self._best = score
        return ToolResult(f"{answer[:80]} is {'right' if score else 'wrong'}.", reward)
