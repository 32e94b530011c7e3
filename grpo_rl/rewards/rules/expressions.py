"""Arithmetic that a model wrote, worked out without ever running them.

The text becomes a syntax tree; only the operators named here are followed, with bounds on length, depth, digits and
exponents, so that no text can run code or make a number that does not fit into memory.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable
from fractions import Fraction
from typing import Any

MAX_LENGTH = 1000
MAX_DEPTH = 40
MAX_DIGITS = 30
MAX_EXPONENT = 64
MAX_BITS = 8_000
"""Bits of a fraction, numerator and denominator together: about 2,400 digits."""
LITERAL = re.compile(r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3})?")
"""A number as it may be written: Python's 1e1_000_000, with a million digits, is none."""
CHARACTERS = re.compile(r"[0-9eE+\-*/(). \t\n]*")
ARITHMETIC = re.compile(r"[0-9+\-*/() \t\n]*")
INTEGERS = re.compile(r"[0-9]+")


class NotAnExpression(ValueError):
    """An error: the text is not an expression of the kind that is read here, or exceeds a bound."""


def arithmetic_value(text: str) -> tuple[Fraction, list[int]]:
    """The exact value of an expression of whole numbers, + - * / and parentheses, and the numbers in it, in order.

    Raises NotAnExpression for anything else, a division by zero included.
    """
    if not ARITHMETIC.fullmatch(text) or "**" in (plain := " ".join(text.split())):
        raise NotAnExpression("only whole numbers, + - * / and parentheses are read")
    return value_of(plain), [int(digits) for digits in INTEGERS.findall(text)]


def value_of(text: str) -> Any:
    """The value of numbers with + - * / and **: a Fraction, or what a root of numbers is, a float or a complex number.

    Exponents are numbers of at most 64, and no power is raised again. Raises NotAnExpression for other syntax and larger sizes.
    """

    def follow(node: ast.expr) -> Any:
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            return Fraction(_literal(source, node))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
            value = follow(node.operand)
            return -value if isinstance(node.op, ast.USub) else value
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
            if isinstance(node.op, ast.Pow):
                _check_power(node)
            return _apply(node.op, follow(node.left), follow(node.right))
        raise NotAnExpression(f"{type(node).__name__} is not read in an expression")

    source = text.strip()
    return follow(_tree(source))


OPERATIONS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: lambda left, right: left + right,
    ast.Sub: lambda left, right: left - right,
    ast.Mult: lambda left, right: left * right,
    ast.Div: lambda left, right: left / right,
    ast.Pow: lambda left, right: left**right,
}


def _literal(source: str, node: ast.Constant) -> str:
    written = source.split("\n")[node.lineno - 1][node.col_offset : node.end_col_offset]
    if not LITERAL.fullmatch(written):
        raise NotAnExpression("a number is digits with a point and an exponent of at most 3 digits, if any")
    return written


def _apply(operator: ast.operator, left: Any, right: Any) -> Any:
    power = isinstance(operator, ast.Pow)
    if (_bits(left) * abs(right) if power and isinstance(right, Fraction) else _bits(left) + _bits(right)) > MAX_BITS:
        raise NotAnExpression(f"a number on the way has more than {MAX_BITS} bits")
    try:
        return OPERATIONS[type(operator)](left, right)
    except ZeroDivisionError as error:
        raise NotAnExpression("a division by zero") from error


def _bits(value: Any) -> int:
    """The bits of a fraction; 0 for anything else, whose size is bounded by itself."""
    return value.numerator.bit_length() + value.denominator.bit_length() if isinstance(value, Fraction) else 0


def _tree(text: str) -> ast.expr:
    text = text.strip()
    if len(text) > MAX_LENGTH:
        raise NotAnExpression(f"{len(text)} characters are more than {MAX_LENGTH}")
    if not CHARACTERS.fullmatch(text):
        raise NotAnExpression("characters that no expression has")
    if any(len(digits) > MAX_DIGITS for digits in INTEGERS.findall(text)):
        raise NotAnExpression(f"a number of more than {MAX_DIGITS} digits")
    depth = deepest = 0
    for character in text:
        depth += (character == "(") - (character == ")")
        deepest = max(deepest, depth)
    if deepest > MAX_DEPTH:
        raise NotAnExpression(f"parentheses nested deeper than {MAX_DEPTH}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise NotAnExpression("not an expression") from error
    if _height(tree) > MAX_LENGTH // 2:
        raise NotAnExpression("operations nested too deeply")
    return tree


def _height(tree: ast.AST) -> int:
    height, level = 0, [tree]
    while level:
        height, level = height + 1, [child for node in level for child in ast.iter_child_nodes(node)]
    return height


def _check_power(node: ast.BinOp) -> None:
    base, exponent = _plain_number(node.left), _plain_number(node.right)
    if base is None or exponent is None or abs(exponent) > MAX_EXPONENT:
        raise NotAnExpression(f"a power of numbers with another exponent than a number of at most {MAX_EXPONENT}")


def _plain_number(node: ast.expr) -> Fraction | None:
    """The value of a number, a negative one or a quotient of two; None for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        try:
            return Fraction(node.value)
        except (OverflowError, ValueError):
            return None
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _plain_number(node.operand)
        return None if value is None else -value
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        left, right = _plain_number(node.left), _plain_number(node.right)
        return left / right if left is not None and right else None
    return None
