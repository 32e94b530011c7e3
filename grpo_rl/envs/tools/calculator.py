"""A calculator as a tool: exact arithmetic of an expression, which is read and never run."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from grpo_rl.envs.contract import Start, ToolResult
from grpo_rl.rewards.rules.expressions import NotAnExpression, formula

LARGEST = 10**30
DIGITS = 12


class Calculator:
    """The tool `calculator`: + - * / ** and brackets. Whole results are exact, others have 12 significant digits."""

    schema: Mapping[str, Any] = {
        "name": "calculator",
        "description": "Work out an arithmetic expression of numbers, + - * / ** and brackets.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "for example (12 + 7) * 3"}},
            "required": ["expression"],
        },
    }

    async def begin(self, start: Start) -> None:
        """Make no state: calls do not depend on each other."""

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        expression = arguments.get("expression")
        if not isinstance(expression, str):
            return ToolResult("expression must be a string such as (12 + 7) * 3", failed=True)
        try:
            return ToolResult(calculated(expression))
        except NotAnExpression as error:
            return ToolResult(f"not an expression: {error}", failed=True)

    async def close(self) -> None:
        """Release nothing."""


def calculated(expression: str) -> str:
    """Return the value of an expression as text. Raises NotAnExpression for other text, and for results of more than 30 digits."""
    try:
        value = Fraction(formula(expression, Fraction, {}, {}))
    except (OverflowError, ValueError, ZeroDivisionError) as error:
        raise NotAnExpression(str(error)) from error
    except TypeError:  # a root of a negative number is complex
        raise NotAnExpression("its value is no real number") from None
    if abs(value) > LARGEST:
        raise NotAnExpression("its value has more than 30 digits")
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.{DIGITS}g}"
