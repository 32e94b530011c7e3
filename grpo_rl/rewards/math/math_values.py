"""Values of expressions: exact fractions where the expression has one, complex numbers otherwise, all of bounded size.

A recursive descent over tokens, not an algebra system: a variable gets a number, so that two expressions are the same where
they agree at several points (for polynomials and fractions exactly). Nothing here grows with the value of the text.
"""

from __future__ import annotations

import cmath
import math
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

MAX_DEPTH = 40
MAX_TOKENS = 500
MAX_BITS = 8_000
"""Bits of a numerator or denominator: about 2,400 digits."""
MAX_DIGITS = 1_000
MAX_FACTORIAL = 500
MAX_CHOSEN = 100
"""Factors of a binomial coefficient."""

Number = Fraction | complex

CONSTANTS: dict[str, complex] = {"\\pi": math.pi, "e": math.e, "i": 1j}
GREEK = frozenset(
    f"\\{name}"
    for name in re.findall("[a-z]+", "alpha beta gamma delta theta lambda mu omega phi varphi rho sigma tau epsilon ell")
)
FUNCTIONS: dict[str, Callable[[complex], complex]] = {
    "\\sin": cmath.sin,
    "\\cos": cmath.cos,
    "\\tan": cmath.tan,
    "\\cot": lambda x: 1 / cmath.tan(x),
    "\\sec": lambda x: 1 / cmath.cos(x),
    "\\csc": lambda x: 1 / cmath.sin(x),
    "\\arcsin": cmath.asin,
    "\\arccos": cmath.acos,
    "\\arctan": cmath.atan,
    "\\ln": cmath.log,
    "\\log": cmath.log10,
    "\\exp": cmath.exp,
}
ENDS = frozenset((")", "}", "]", ",", "=", "+", "-", "*", "/", "^", "%", "\\choose", ""))
POINTS = 3


class NoExpression(Exception):
    """An error: the tokens are no expression that has a value here."""


class TwoNumbers(NoExpression):
    """An error: two numbers stand side by side, as in `1 2`, where neither 12 nor a product is meant for sure."""


class Expression:
    """Evaluates tokens at point number `point`: each variable has a fixed positive value there."""

    def __init__(self, tokens: tuple[str, ...], point: int = 0) -> None:
        if len(tokens) > MAX_TOKENS:
            raise NoExpression
        self._tokens = [piece for token in tokens for piece in _letters(token)]
        self._point, self._place, self._depth = point, 0, 0

    def value(self) -> Number:
        """Return the value. Raises NoExpression for tokens that are no expression, and for infinite or huge values."""
        try:
            found = self._sum()
            if self._next():
                raise NoExpression
            return _bounded(found)
        except (ArithmeticError, ValueError) as error:
            raise NoExpression from error

    def _next(self) -> str:
        return self._tokens[self._place] if self._place < len(self._tokens) else ""

    def _take(self) -> str:
        token = self._next()
        self._place += 1
        return token

    def _expect(self, token: str) -> None:
        if self._take() != token:
            raise NoExpression

    def _sum(self) -> Number:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise NoExpression
        total = self._product()
        while self._next() in ("+", "-"):
            operation = operator.add if self._take() == "+" else operator.sub
            total = _bounded(_apply(operation, total, self._product()))
        self._depth -= 1
        return total

    def _product(self) -> Number:
        sign = 1
        while self._next() in ("+", "-"):
            sign = -sign if self._take() == "-" else sign
        total, _ = self._power()
        while self._next() not in ENDS or self._next() in ("*", "/"):
            sign_between = self._take() if self._next() in ("*", "/") else ""
            while sign_between and self._next() in ("+", "-"):
                sign = -sign if self._take() == "-" else sign
            factor, is_number = self._power()
            if not sign_between and is_number:
                # `1 2`, or `x 2`: what is meant is not clear.
                raise TwoNumbers
            total = _bounded(_apply(operator.truediv if sign_between == "/" else operator.mul, total, factor))
        return sign * total

    def _power(self) -> tuple[Number, bool]:
        """The value of an atom with its power, and whether it is a plain number."""
        is_number = self._next()[:1].isdigit() or self._next()[:1] == "."
        base = self._mixed() if is_number else self._atom()
        while self._next() in ("!", "%"):
            base = _factorial(base) if self._take() == "!" else _apply(operator.truediv, base, Fraction(100))
        if self._next() == "^":
            self._take()
            sign = -1 if self._next() == "-" and self._take() else 1
            exponent = _read_number(self._take()) if self._next().isdigit() else self._argument()
            base, is_number = _power(base, sign * exponent), False
        return base, is_number

    def _mixed(self) -> Number:
        """A number, or a mixed one such as `1\\frac{2}{3}`."""
        whole = _read_number(self._take())
        if self._next() != "\\frac" or whole.denominator != 1:
            return whole
        start = self._place
        part = self._atom()
        plain = all(token in ("\\frac", "{", "}") or token.isdigit() for token in self._tokens[start : self._place])
        if plain and isinstance(part, Fraction) and 0 < part < 1:
            return whole + part
        return _apply(operator.mul, whole, part)

    def _argument(self) -> Number:
        """Return what a command or a power applies to: a group in braces, one digit, or one sign."""
        if self._next() == "{":
            return self._atom()
        token = self._next()
        if len(token) > 1 and token.isdigit():
            self._tokens[self._place : self._place + 1] = [token[0], token[1:]]
        return _read_number(self._take()) if self._next()[:1].isdigit() else self._atom()

    def _atom(self) -> Number:
        token = self._take()
        closing = {"(": ")", "{": "}", "[": "]"}.get(token)
        if closing:
            value = self._sum()
            if self._next() == "\\choose" and self._take():
                value = _binomial(value, self._sum())
            self._expect(closing)
            return value
        if token == "\\frac":
            return _apply(operator.truediv, self._argument(), self._argument())
        if token == "\\binom":
            return _binomial(self._argument(), self._argument())
        if token == "\\sqrt":
            return self._root()
        if token in CONSTANTS:
            return CONSTANTS[token]
        if token in FUNCTIONS:
            return self._function(token)
        if token in GREEK or (len(token) == 1 and token.isascii() and token.isalpha()):
            return self._variable(token)
        raise NoExpression

    def _root(self) -> Number:
        degree: Number = Fraction(2)
        if self._next() == "[":
            degree = self._atom()
        return _power(self._argument(), _apply(operator.truediv, Fraction(1), degree))

    def _function(self, name: str) -> Number:
        power: Number = Fraction(1)
        base: Number | None = None
        while self._next() in ("^", "_"):
            if self._take() == "^":
                power = self._argument()
            else:
                base = self._argument()
        if power == -1 or (base is not None and name != "\\log"):
            raise NoExpression
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise NoExpression
        argument = complex(self._operand())
        self._depth -= 1
        value = FUNCTIONS[name](argument) if base is None else cmath.log(argument) / cmath.log(complex(base))
        return _power(value, power)

    def _operand(self) -> Number:
        """`2x` in `\\sin 2x`: factors up to the next sign, bracket or function."""
        if self._next() in ("(", "{", "["):
            return self._power()[0]
        total = self._power()[0]
        while self._next() not in ENDS and self._next() not in FUNCTIONS and self._next() not in ("(", "[", "{"):
            total = _bounded(_apply(operator.mul, total, self._power()[0]))
        return total

    def _variable(self, name: str) -> Number:
        # Positive, without a simple relation between any two, and never 1.
        seed = sum((place + 1) * ord(letter) for place, letter in enumerate(name)) + 131 * self._point
        return Fraction(17 + (seed * 7919) % 211, 101 + (seed * 104729) % 89)


def _letters(token: str) -> list[str]:
    return list(token) if len(token) <= 4 and token.isascii() and token.isalpha() else [token]


def _read_number(token: str) -> Fraction:
    if not token or len(token) > MAX_DIGITS or not token.replace(".", "", 1).isdigit() or not token.isascii():
        raise NoExpression
    return Fraction(token)


def _apply(operation: Callable[[Any, Any], Any], first: Number, second: Number) -> Number:
    """Return the value of a function, exact where argument and value are."""
    both_exact = isinstance(first, Fraction) and isinstance(second, Fraction)
    found: Number = operation(first, second) if both_exact else operation(complex(first), complex(second))
    return found


def _bounded(value: Number) -> Number:
    if isinstance(value, Fraction):
        if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
            raise NoExpression
    elif not cmath.isfinite(value):
        raise NoExpression
    return value


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, Fraction) and isinstance(exponent, Fraction):
        size = max(base.numerator.bit_length(), base.denominator.bit_length())
        if exponent.denominator == 1:
            if abs(exponent) * size > MAX_BITS:
                raise NoExpression
            return Fraction(base**exponent.numerator)
        root = _exact_root(base, exponent)
        if root is not None:
            return root
    if isinstance(exponent, Fraction) and exponent.denominator % 2 and exponent.denominator > 1 and complex(base).imag == 0:
        # The real root: the cube root of -8 is -2.
        real = complex(base).real
        sign = -1.0 if real < 0 and exponent.numerator % 2 else 1.0
        return complex(sign * abs(real) ** float(exponent))
    return _bounded(complex(base) ** complex(exponent))


def _exact_root(base: Fraction, exponent: Fraction) -> Fraction | None:
    """Square roots of squares, which keep sums of them exact."""
    if exponent != Fraction(1, 2) or base < 0:
        return None
    root = Fraction(math.isqrt(base.numerator), math.isqrt(base.denominator))
    return root if root * root == base else None


def _factorial(value: Number) -> Number:
    if not isinstance(value, Fraction) or value.denominator != 1 or not 0 <= value <= MAX_FACTORIAL:
        raise NoExpression
    return Fraction(math.factorial(value.numerator))


def _binomial(top: Number, bottom: Number) -> Number:
    """`top (top - 1) ... (top - bottom + 1) / bottom!`, for a whole `bottom` and any exact `top`."""
    if not (isinstance(top, Fraction) and isinstance(bottom, Fraction)) or bottom.denominator != 1:
        raise NoExpression
    if top.denominator == 1 and 0 <= bottom <= top:
        bottom = min(bottom, top - bottom)
    if not 0 <= bottom <= MAX_CHOSEN:
        raise NoExpression
    value: Number = Fraction(1)
    for k in range(int(bottom)):
        value = _bounded(value * (top - k) / (k + 1))
    return value


def values(tokens: tuple[str, ...]) -> tuple[Number, ...]:
    """The values at all points; one value where there is no variable. Raises NoExpression."""
    first = Expression(tokens).value()
    if not any(piece.isalpha() or piece in GREEK for token in tokens for piece in _letters(token)):
        return (first,)
    return (first, *(Expression(tokens, point).value() for point in range(1, POINTS)))


def close(first: Number, second: Number, tolerance: float = 1e-9) -> bool:
    """Return whether two values are the same: exactly for fractions, else up to a relative `tolerance`."""
    if isinstance(first, Fraction) and isinstance(second, Fraction) and tolerance <= 1e-9:
        return first == second
    try:
        one, other = complex(first), complex(second)
    except OverflowError:
        return False
    return abs(one - other) <= tolerance * max(abs(one), abs(other)) or max(abs(one), abs(other)) < 1e-12
