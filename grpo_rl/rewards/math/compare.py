"""Whether two mathematical answers are the same, without an algebra system: most are settled here, either way.

Elements of tuples, intervals, lists, sets, unions and matrices are compared by their value; equations up to a factor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from grpo_rl.rewards.math.math_tokens import MAX_TEXT, joined_thousands, spelling, squeezed, tokens
from grpo_rl.rewards.math.math_values import Number, Unreadable, close, values

MAX_ELEMENTS = 60
"""Of a set whose elements may stand in any order; a larger one must be written alike."""
MAX_NESTING = 6
SIGNIFICANT = 6
"""Digits that a decimal must have to stand for a number that no decimal is, such as 1/3 or a root."""
OPENING, CLOSING = ("(", "[", "{", "\\{"), (")", "]", "}", "\\}")

Tokens = tuple[str, ...]
Kind = Literal["number", "word", "tuple", "set", "union", "matrix", "equation", "unreadable"]


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer that was read: what it is, and its value or its parts."""

    kind: Kind
    spelling: str
    value: tuple[Number, ...] = ()
    parts: tuple[Answer, ...] = ()
    marks: str = ""
    """The brackets of a tuple, `%` of a percentage, the shape of a matrix."""
    decimals: int = -1
    """Significant digits of a number written as a decimal or an integer; -1 of any other."""


def compare(gold: str, answer: str) -> bool | None:
    """Whether `answer` is `gold`; None where it takes algebra to tell. `nan` is equal to nothing."""
    one, other = squeezed(gold), squeezed(answer)
    if "nan" in (one.casefold(), other.casefold()):
        return False
    if one == other:
        return True
    if len(gold) > MAX_TEXT or len(answer) > MAX_TEXT:
        return None
    found = [_same(a, b) for a in _readings(gold) for b in _readings(answer)]
    return True if True in found else None if None in found else False


def number(text: str) -> float | None:
    """The value of an answer that is one number; None for anything else."""
    if len(text) > MAX_TEXT:
        return None
    read = _readings(text)[0]
    if read.kind != "number" or len(read.value) != 1:
        return None
    try:
        value = complex(read.value[0])
    except OverflowError:
        return None
    return value.real if value.imag == 0 else None


def _readings(text: str) -> list[Answer]:
    """What the text can mean: `10,000` is a number and a list of two."""
    found = tokens(text)
    joined = joined_thousands(found)
    return [_read(reading) for reading in ([found] if joined is None else [joined, found])]


def _read(found: Tokens, nesting: int = 0) -> Answer:
    text = spelling(found)
    if nesting > MAX_NESTING or not found:
        return Answer("unreadable", text)
    inner = _between(found)
    if found[0] == "\\approx":
        return _read(found[1:], nesting + 1)
    lists = _split(found, ",")
    lists = lists if len(lists) > 1 else _split(found, ";")
    if len(lists) > 1:
        return Answer("set", text, parts=_all(_flat(lists), nesting))
    if inner is not None and found[0] == "\\{":
        return Answer("set", text, parts=_all(_flat(_split(inner, ",")), nesting))
    unions = _split(found, "\\cup")
    if len(unions) > 1:
        return Answer("union", text, parts=_all(unions, nesting))
    if inner is not None and len(elements := _split(inner, ",")) > 1 and found[0] != "{":
        return Answer("tuple", text, parts=_all(elements, nesting), marks=found[0] + found[-1])
    if inner is not None and found[0] == "(" and len(inner) == 1 and inner[0].isalpha():
        return Answer("word", inner[0])
    if found[:2] == ("\\begin", "{") and found[-4:-2] == ("\\end", "{"):
        return _matrix(found, text, nesting)
    sides = _split(found, "=")
    if len(sides) > 1:
        return Answer("equation", text, parts=_all([sides[0], sides[-1]], nesting))
    if len(ratio := _split(found, ":")) > 1:
        return Answer("tuple", text, parts=_all(ratio, nesting), marks=":")
    if "\\pm" in found:
        return Answer("set", text, parts=_all(_flat([found]), nesting))
    return _expression(found, text)


def _expression(found: Tokens, text: str) -> Answer:
    if all(token.startswith('"') or (token.isalpha() and len(token) > 4) for token in found):
        return Answer("word", text)
    percent = found[-1] == "%"
    if found in (("\\infty",), ("+", "\\infty"), ("-", "\\infty")):
        return Answer("word", "-\\infty" if found[0] == "-" else "\\infty")
    try:
        value = values(found[:-1] if percent else found)
    except Unreadable:
        return Answer("unreadable", text)
    digits = -1
    if all(token in "+-" for token in found[: -1 - percent]) and found[-1 - percent].replace(".", "", 1).isdigit():
        digits = len(found[-1 - percent].replace(".", "").lstrip("0"))
    return Answer("number", text, value, marks="%" if percent else "", decimals=digits)


def _all(pieces: Sequence[Tokens], nesting: int) -> tuple[Answer, ...]:
    return tuple(_read(piece, nesting + 1) for piece in pieces if piece)


def _matrix(found: Tokens, text: str, nesting: int) -> Answer:
    if found.count("\\begin") != 1 or found[2] != found[-2] or found[2] in ("cases", "array"):
        return Answer("unreadable", text)
    rows = [_split(row, "&") for row in _split(found[4:-4], "\\\\") if row]
    cells = _all([cell for row in rows for cell in row], nesting)
    return Answer("matrix", text, parts=cells, marks=",".join(str(len(row)) for row in rows))


def _split(found: Tokens, separator: str) -> list[Tokens]:
    """The pieces between separators that stand in no brackets."""
    pieces: list[Tokens] = []
    depth = start = 0
    for place, token in enumerate(found):
        if token in OPENING or token == "\\begin":
            depth += 1
        elif token in CLOSING or token == "\\end":
            depth -= 1
        elif token == separator and depth == 0:
            pieces.append(found[start:place])
            start = place + 1
    return [*pieces, found[start:]]


def _between(found: Tokens) -> Tokens | None:
    """What the outermost brackets hold, where they hold everything."""
    if len(found) < 3 or found[0] not in OPENING or found[-1] not in CLOSING:
        return None
    depth = 0
    for place, token in enumerate(found):
        depth += (token in OPENING) - (token in CLOSING)
        if depth == 0:
            return found[1:-1] if place == len(found) - 1 else None
    return None


def _flat(pieces: list[Tokens]) -> list[Tokens]:
    """The elements of a list; one with a `\\pm` is two."""
    flat: list[Tokens] = []
    for piece in pieces:
        if piece.count("\\pm") == 1:
            place = piece.index("\\pm")
            flat += [(*piece[:place], sign, *piece[place + 1 :]) for sign in "+-"]
        else:
            flat.append(piece)
    return flat


def _same(gold: Answer, answer: Answer) -> bool | None:
    if gold.spelling == answer.spelling and (gold.kind == answer.kind or not (gold.parts or answer.parts)):
        return True
    if gold.kind == "equation" or answer.kind == "equation":
        return _same_equations(gold, answer)
    if "unreadable" in (gold.kind, answer.kind):
        return False if "_" in gold.spelling + answer.spelling else None
    if gold.kind != answer.kind:
        return False
    if gold.kind == "number":
        return _same_numbers(gold, answer)
    if gold.marks != answer.marks or len(gold.parts) != len(answer.parts) or gold.kind == "word":
        return False
    if gold.kind in ("set", "union"):
        return _same_sets(gold.parts, answer.parts)
    found = [_same(a, b) for a, b in zip(gold.parts, answer.parts, strict=True)]
    return False if False in found else None if None in found else True


def _same_numbers(gold: Answer, answer: Answer) -> bool:
    rounded = max(gold.decimals, answer.decimals) >= SIGNIFICANT and min(gold.decimals, answer.decimals) < 0
    tolerance = 1e-6 if rounded else 1e-9
    if _agree(gold.value, answer.value, tolerance):
        return True
    if gold.marks == answer.marks:
        return False
    # One of them is a percentage: 50% is 0.5, and 50 where percent was asked for.
    hundredth = Fraction(1, 100)
    one, other = (answer.value, gold.value) if gold.marks else (gold.value, answer.value)
    return _agree(one, tuple(value * hundredth if isinstance(value, Fraction) else value / 100 for value in other), tolerance)


def _agree(first: tuple[Number, ...], second: tuple[Number, ...], tolerance: float) -> bool:
    size = max(len(first), len(second))
    return all(close(first[k % len(first)], second[k % len(second)], tolerance) for k in range(size))


def _same_sets(gold: tuple[Answer, ...], answer: tuple[Answer, ...]) -> bool | None:
    """Each element has its partner, in any order."""
    if len(gold) > MAX_ELEMENTS:
        return None
    left, unsure = list(answer), False
    for element in gold:
        found = [_same(element, other) for other in left]
        unsure |= None in found
        if True in found:
            del left[found.index(True)]
        elif None not in found:
            return False
    return None if left and unsure else not left


def _same_equations(gold: Answer, answer: Answer) -> bool | None:
    """`x = 2` is 2 and `y = x + 1` is x + 1; two equations are one where their differences are multiples of each other."""
    if gold.kind != answer.kind:
        equation, other = (gold, answer) if gold.kind == "equation" else (answer, gold)
        if len(equation.parts) != 2 or "unreadable" in (other.kind, equation.parts[1].kind):
            return None
        name, value = equation.parts
        says_a_value = _is_name(name) or (name.kind == value.kind == "number" and len(name.value) == len(value.value) == 1)
        return says_a_value and _same(*((value, other) if equation is gold else (other, value)))
    if len(gold.parts) != 2 or len(answer.parts) != 2:
        return False
    (one, first), (two, second) = gold.parts, answer.parts
    if one.spelling == two.spelling and _is_name(one):
        return _same(first, second)
    if any(part.kind != "number" for part in (one, first, two, second)):
        return None
    return _proportional(_difference(one, first), _difference(two, second))


def _is_name(side: Answer) -> bool:
    """`x`, or `f(x)`: what stands before the `=` of a definition."""
    pieces = side.spelling.split("\0")
    return (pieces[0].isalpha() or pieces[0].startswith("\\")) and (
        len(pieces) == 1 or (len(pieces) == 4 and pieces[1] == "(") or (len(pieces) == 3 and pieces[1] == "_")
    )


def _difference(one: Answer, other: Answer) -> list[Number]:
    size = max(len(one.value), len(other.value))
    pairs = [(one.value[k % len(one.value)], other.value[k % len(other.value)]) for k in range(size)]
    return [a - b if isinstance(a, Fraction) and isinstance(b, Fraction) else complex(a) - complex(b) for a, b in pairs]


def _proportional(first: list[Number], second: list[Number]) -> bool:
    if len(first) != len(second) or len(first) == 1 or not all(map(abs, first)) or not all(map(abs, second)):
        return False
    ratios: list[Number] = [
        a / b if isinstance(a, Fraction) and isinstance(b, Fraction) else complex(a) / complex(b)
        for a, b in zip(first, second, strict=True)
    ]
    return all(close(ratio, ratios[0], 1e-8 if isinstance(ratio, complex) else 0.0) for ratio in ratios[1:])
