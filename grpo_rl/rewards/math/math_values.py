"""Values of expressions: exact fractions if possible, complex numbers otherwise, all of bounded size.

A variable gets a number: expressions are the same if they agree at several points (for fractions exactly).
"""

from __future__ import annotations

import cmath
import itertools
import math
import re
from collections.abc import Callable
from fractions import Fraction

MAX_DEPTH = 40
MAX_TOKENS = 500
MAX_TYPED = 1_000
MAX_BITS = 8_000
"""Bits of a numerator or denominator: about 2,400 digits."""
MAX_DIGITS = 1_000
MAX_FACTORIAL = 500
MAX_CHOSEN = 100

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
BRACKETS = {"(": ")", "{": "}", "[": "]"}
POINTS = 3
ROUNDING = 1e-13


class NoExpression(Exception): ...


class TwoNumbers(NoExpression):
    """`1 2`, where neither 12 nor a product is meant for sure."""


class Expression:
    """Evaluates tokens at point number `point`, which gives each variable a fixed positive value."""

    def __init__(self, tokens: tuple[str, ...], point: int = 0) -> None:
        if len(tokens) > MAX_TOKENS:
            raise NoExpression
        self._tokens = [piece for token in tokens for piece in _letters(token)]
        self._point, self._place, self._depth = point, 0, 0
        self.num_operations = 0
        """A product needs no sign, and a sign before a number is no operation."""

    def value(self) -> Number:
        """Raises NoExpression, also for infinite or huge values."""
        try:
            number = self._sum()
            if self._next():
                raise NoExpression
            return _bounded(number)
        except (ArithmeticError, ValueError) as error:
            raise NoExpression from error

    def _next(self) -> str:
        return self._tokens[self._place] if self._place < len(self._tokens) else ""

    def _take(self) -> str:
        token = self._next()
        self._place += 1
        return token

    def _sign(self) -> int:
        sign = 1
        while self._next() in ("+", "-"):
            sign = -sign if self._take() == "-" else sign
        return sign

    def _sum(self) -> Number:
        total = self._product()
        while self._next() in ("+", "-"):
            self.num_operations += 1
            term = self._product()
            previous, total = total, _bounded(total + term)
            if isinstance(total, complex) and abs(total) <= ROUNDING * max(abs(complex(previous)), abs(complex(term))):
                total = Fraction(0)  # what is left of two roots that are equal is the error of their digits
        return total

    def _product(self) -> Number:
        total: Number = self._sign() * self._power()[0]
        while self._next() not in ENDS or self._next() in ("*", "/"):
            operation = self._take() if self._next() in ("*", "/") else ""
            sign = self._sign() if operation else 1
            self.num_operations += 1
            factor, is_number = self._power()
            if not operation and is_number:
                raise TwoNumbers
            total = _bounded(sign * (total / factor if operation == "/" else total * factor))
        return total

    def _power(self) -> tuple[Number, bool]:
        """The value, and whether it is a plain number."""
        is_number = self._next()[:1].isdigit() or self._next()[:1] == "."
        base = self._mixed() if is_number else self._atom()
        while self._next() in ("!", "%"):
            self.num_operations += self._next() == "!"
            base = _factorial(base) if self._take() == "!" else base / 100
        if self._next() == "^":
            self.num_operations += 1
            self._take()
            sign = self._sign()
            exponent = _read_number(self._take()) if self._next().isdigit() else self._argument()
            base, is_number = _power(base, sign * exponent), False
        return base, is_number

    def _mixed(self) -> Number:
        """A number, or a mixed one such as `1\\frac{2}{3}`."""
        integer = _read_number(self._take())
        if self._next() != "\\frac" or integer.denominator != 1:
            return integer
        start = self._place
        part = self._atom()
        plain = all(token in ("\\frac", "{", "}") or token.isdigit() for token in self._tokens[start : self._place])
        return integer + part if plain and isinstance(part, Fraction) and 0 < part < 1 else integer * part

    def _argument(self) -> Number:
        """A group in braces, one digit, or one sign."""
        token = self._next()
        if len(token) > 1 and token.isdigit():
            self._tokens[self._place : self._place + 1] = [token[0], token[1:]]
        return _read_number(self._take()) if token[:1].isdigit() else self._atom()

    def _atom(self) -> Number:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise NoExpression
        value = self._value_of(self._take())
        self._depth -= 1
        return value

    def _value_of(self, token: str) -> Number:
        if closing := BRACKETS.get(token):
            value = self._sum()
            if self._next() == "\\choose":
                self.num_operations += 1
                self._take()
                value = _binomial(value, self._sum())
            if self._take() != closing:
                raise NoExpression
            return value
        self.num_operations += token in ("\\frac", "\\binom", "\\sqrt") or token in FUNCTIONS
        if token == "\\frac":
            return self._argument() / self._argument()
        if token == "\\binom":
            return _binomial(self._argument(), self._argument())
        if token == "\\sqrt":
            degree = self._atom() if self._next() == "[" else Fraction(2)
            return _power(self._argument(), 1 / degree)
        if token in CONSTANTS:
            return CONSTANTS[token]
        if token in FUNCTIONS:
            return self._function(token)
        if token in GREEK or (len(token) == 1 and token.isascii() and token.isalpha()):
            # Positive, without a simple relation between any two, and never 1.
            seed = sum((place + 1) * ord(letter) for place, letter in enumerate(token)) + 131 * self._point
            return Fraction(17 + (seed * 7919) % 211, 101 + (seed * 104729) % 89)
        raise NoExpression

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
        # `\\sin 2x`: factors up to the next sign, bracket or function.
        bracketed = self._next() in BRACKETS
        argument = self._power()[0]
        while not bracketed and self._next() not in ENDS and self._next() not in FUNCTIONS and self._next() not in BRACKETS:
            self.num_operations += 1
            argument = _bounded(argument * self._power()[0])
        value = FUNCTIONS[name](complex(argument))
        if abs(value) < ROUNDING < abs(complex(argument)):
            value = 0j  # the sine of pi
        return _power(value if base is None else cmath.log(complex(argument)) / cmath.log(complex(base)), power)


def _letters(token: str) -> list[str]:
    return list(token) if len(token) <= 4 and token.isascii() and token.isalpha() else [token]


def _read_number(token: str) -> Fraction:
    if len(token) > MAX_DIGITS or not token.isascii():
        raise NoExpression
    return Fraction(token)


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
        if exponent == Fraction(1, 2) and base >= 0:
            # Square roots of squares keep sums of them exact.
            root = Fraction(math.isqrt(base.numerator), math.isqrt(base.denominator))
            if root * root == base:
                return root
    if isinstance(exponent, Fraction) and exponent.denominator % 2 and exponent.denominator > 1 and complex(base).imag == 0:
        # The real root: the cube root of -8 is -2.
        real = complex(base).real
        sign = -1.0 if real < 0 and exponent.numerator % 2 else 1.0
        return complex(sign * abs(real) ** float(exponent))
    return _bounded(complex(base) ** complex(exponent))


def _factorial(value: Number) -> Number:
    if not isinstance(value, Fraction) or value.denominator != 1 or not 0 <= value <= MAX_FACTORIAL:
        raise NoExpression
    return Fraction(math.factorial(value.numerator))


def _binomial(top: Number, bottom: Number) -> Number:
    """Of a whole `bottom` and any exact `top`."""
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
    """One value if there is no variable."""
    first = Expression(tokens).value()
    if not any(piece.isalpha() or piece in GREEK for token in tokens for piece in _letters(token)):
        return (first,)
    return (first, *(Expression(tokens, point).value() for point in range(1, POINTS)))


TYPED = re.compile(r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]{1,2})?|\*\*|[-+*/()]")
SIGNS = frozenset(("+", "-", "*", "/", "**"))


def typed_value(text: str) -> tuple[Number, list[str]]:
    """The value of an expression as it is typed (numbers, + - * / **, brackets), and its numbers in order.

    Raises NoExpression, also for divisions by zero, too large numbers, and a power of a power.
    """
    tokens = TYPED.findall(text)
    sides = itertools.pairwise(tokens)
    operands_meet = any(token not in SIGNS | {"("} and next_token not in SIGNS | {")"} for token, next_token in sides)
    if len(text) > MAX_TYPED or operands_meet or "".join(tokens) != "".join(text.split()):
        raise NoExpression
    value = Expression(tuple("^" if token == "**" else token for token in tokens)).value()
    return value, [token for token in tokens if token not in SIGNS | {"(", ")"}]


def close(first: Number, second: Number, tolerance: float = 1e-9) -> bool:
    """Equal up to a relative `tolerance`; fractions exactly."""
    if isinstance(first, Fraction) and isinstance(second, Fraction) and tolerance <= 1e-9:
        return first == second
    try:
        first_value, second_value = complex(first), complex(second)
    except OverflowError:
        return False
    return abs(first_value - second_value) <= tolerance * max(abs(first_value), abs(second_value))
