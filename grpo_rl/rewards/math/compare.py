"""Comparison of two mathematical answers without an algebra system: most are settled here, either way."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from typing import Literal

from grpo_rl.frozen import frozen
from grpo_rl.rewards.math.math_tokens import MAX_TEXT, differ, readings, spelling, squeezed, tokens
from grpo_rl.rewards.math.math_values import Expression, NoExpression, Number, TwoNumbers, close, values

MAX_ELEMENTS = 60
"""Elements of a set in any order; a larger one must be written alike."""
MAX_NESTING = 6
SIGNIFICANT = 6
"""Of a decimal that may stand for 1/3 or a root."""
MATRICES = ("matrix", "smallmatrix", "pmatrix", "bmatrix", "Bmatrix", "vmatrix", "Vmatrix")
DETERMINANTS = ("vmatrix", "Vmatrix")
OPENING, CLOSING = ("(", "[", "{", "\\{"), (")", "]", "}", "\\}")
OPERATIONS = frozenset(("+", "-", "*", "/", "^", "!", "(", "\\frac", "\\sqrt", "\\binom", "\\choose"))
RELATIONS = frozenset(("\\ne", "\\le", "\\ge", "<", ">", "\\lt", "\\gt"))

Tokens = tuple[str, ...]
Kind = Literal["number", "word", "tuple", "set", "solution", "either", "equation", "unreadable"]
"""`word` is equal to its own spelling only, `either` is `\\frac13 \\approx 0.333`, an interval and a matrix
are tuples, a list and a union sets, a `solution` is `x = 2`, `p = 3, q = 2` or `(p, q) = (3, 2)`.
"""


@frozen
class MathAnswer:
    kind: Kind
    spelling: str
    value: tuple[Number, ...] = ()
    """At all points; of an equation those of its left side minus its right one."""
    parts: tuple[MathAnswer, ...] = ()
    marks: str = ""
    """Brackets of a tuple, shape of a matrix, sign of a union, `%`."""
    names: tuple[str, ...] = ()
    """Variables of a solution, whose values are the parts."""
    decimals: int = -1
    """Significant digits of a decimal or an integer; -1 of any other."""


def compare(gold: str, answer: str) -> bool | None:
    """None if only algebra can decide. `nan` is equal to nothing.

    `1,200` as the gold is 1200, which the list `1, 200` is not; as an answer it is either.
    """
    squeezed_gold, squeezed_answer = squeezed(gold), squeezed(answer)
    if "nan" in (squeezed_gold.casefold(), squeezed_answer.casefold()):
        return False
    if squeezed_gold == squeezed_answer:
        return True
    if len(gold) > MAX_TEXT or len(answer) > MAX_TEXT:
        return None
    reading = readings(gold)[0]
    right = _read(reading.tokens)
    return _combined([not differ(reading, parsed) and _same(right, _read(parsed.tokens)) for parsed in readings(answer)])


def _combined(verdicts: Sequence[bool | None]) -> bool | None:
    return True if True in verdicts else None if None in verdicts else False


def number(text: str) -> float | None:
    if len(text) > MAX_TEXT:
        return None
    read = _read(tokens(text))
    if read.kind != "number" or len(read.value) != 1:
        return None
    try:
        value = complex(read.value[0])
    except OverflowError:
        return None
    return value.real if value.imag == 0 else None


def operations(text: str) -> int:
    """Operations behind the last `=`: 1 of `17*23` and `\\frac12`, 0 of 391 and -8."""
    if len(text) > MAX_TEXT:
        return 0
    last_side = _split(tokens(text), "=")[-1]
    with suppress(NoExpression):
        expression = Expression(last_side)
        expression.value()
        return expression.num_operations
    return sum(
        token in OPERATIONS and not (token in "+-(" and (place == 0 or previous in OPERATIONS or previous in OPENING))
        for place, (previous, token) in enumerate(zip(("", *last_side), last_side, strict=False))
    )


def _read(found: Tokens, nesting: int = 0) -> MathAnswer:
    text = spelling(found)

    def made(kind: Kind, pieces: Sequence[Tokens], marks: str = "") -> MathAnswer:
        parts = tuple(_read(piece, nesting + 1) for piece in pieces if piece)
        return MathAnswer(kind, text, parts=parts, marks=marks)

    if nesting > MAX_NESTING or not found:
        return MathAnswer("unreadable", text)
    if found[0] in ("\\approx", "="):
        return _read(found[1:], nesting + 1)
    groups = _split(found, ";")
    if len(groups) > 1 and any(len(_split(group, ",")) > 1 for group in groups):
        rows = made("set", groups)  # of `5, 2; 7, 2` each is a tuple, of `p=5, q=2; p=7, q=2` a solution
        tuples = (replace(row, kind="tuple", marks="()") if row.kind == "set" else row for row in rows.parts)
        return replace(rows, parts=tuple(tuples))
    elements = groups if len(groups) > 1 else _split(found, ",")
    if len(elements) > 1:
        return _solutions(made("set", _flat(elements)))
    if found == ("\\{", "\\}"):
        return MathAnswer("word", "\\emptyset")
    inner = _between(found)
    bracket = found[0] if inner else ""
    if bracket == "\\{":
        return _solutions(made("set", _flat(_split(inner, ","))))
    if len(unions := _split(found, "\\cup")) > 1:
        return made("set", unions, "\\cup")
    if bracket != "{" and len(elements := _split(inner, ",")) > 1:
        return made("tuple", elements, bracket + found[-1])
    if bracket == "(" and len(inner) == 1 and inner[0].isalpha():
        return MathAnswer("word", inner[0])
    # An `array` gets its brackets from outside, and names its columns first.
    array = inner if bracket in ("(", "[") and inner[2:3] == ("array",) else ()
    body = array or found
    if body[:2] == ("\\begin", "{") and body[-4:-2] == ("\\end", "{"):
        if body.count("\\begin") != 1 or body[2] != body[-2] or not (array or body[2] in MATRICES):
            return MathAnswer("unreadable", text)
        start = body.index("}", 5) + 1 if array and body[4] == "{" and "}" in body[5:-4] else 4
        rows_of_cells = [_split(row, "&") for row in _split(body[start:-4], "\\\\") if row]
        shape = ",".join(str(len(row)) for row in rows_of_cells)
        return made("tuple", [cell for row in rows_of_cells for cell in row], "|" * (body[2] in DETERMINANTS) + shape)
    if len(sides := _split(found, "\\approx")) > 1:
        return _approximation(made("either", sides))
    if len(sides := [side for side in _split(found, "=") if side]) > 1:
        return _equation(made("equation", (sides[0], sides[-1])))
    if len(ratio := _split(found, ":")) > 1:
        return made("tuple", ratio, ":")
    if "\\pm" in found:
        return made("set", _flat([found]))
    return _expression(found, text)


def _expression(parts: Tokens, text: str) -> MathAnswer:
    is_text = all(token.startswith('"') or (token.isalpha() and len(token) > 4) for token in parts)
    if is_text or parts == ("\\emptyset",):
        return MathAnswer("word", text)
    percent = parts[-1] == "%"
    if parts in (("\\infty",), ("+", "\\infty"), ("-", "\\infty")):
        return MathAnswer("word", "-\\infty" if parts[0] == "-" else "\\infty")
    try:
        value = values(parts[:-1] if percent else parts)
    except NoExpression as error:
        return MathAnswer("word" if isinstance(error, TwoNumbers) else "unreadable", text)
    digits = -1
    if all(token in "+-" for token in parts[: -1 - percent]) and parts[-1 - percent].replace(".", "", 1).isdigit():
        digits = len(parts[-1 - percent].replace(".", "").lstrip("0"))
    return MathAnswer("number", text, value, marks="%" if percent else "", decimals=digits)


def _equation(sides: MathAnswer) -> MathAnswer:
    """A definition, also `5 = x`, `(p, q) = (3, 2)`; of `17 * 23 = 391` the last number; else an equation."""
    lhs, rhs = sides.parts
    if len(lhs.value) == 1 and len(rhs.value) > 1 and _is_name(rhs.spelling):
        lhs, rhs = rhs, lhs
    pairs = _at_points(lhs.value, rhs.value)
    is_exact = len(pairs) > 1 and all(isinstance(a, Fraction) and isinstance(b, Fraction) for a, b in pairs)
    sides = replace(sides, value=tuple(a - b for a, b in pairs) if is_exact else ())
    if _is_name(lhs.spelling):
        return replace(sides, kind="solution", parts=(rhs,), names=(lhs.spelling,))
    if _rounds_to(lhs, rhs):
        return rhs
    names = tuple(part.spelling for part in lhs.parts)
    are_pairs = lhs.kind == rhs.kind == "tuple" and lhs.marks == rhs.marks == "()"
    if are_pairs and len(set(names)) == len(names) == len(rhs.parts) and all(map(_is_name, names)):
        return replace(sides, kind="solution", parts=rhs.parts, names=names, marks="()")
    return replace(sides, parts=())


def _is_name(text: str) -> bool:
    pieces = text.split("\0")
    return (pieces[0].isalpha() or pieces[0].startswith("\\")) and (
        len(pieces) == 1 or (len(pieces) == 4 and pieces[1] == "(") or (len(pieces) == 3 and pieces[1] == "_")
    )


def _solutions(listed: MathAnswer) -> MathAnswer:
    """`p=5, q=2` is one solution; `p=5, q=2, p=7, q=2` are two, each with all its variables."""
    names = tuple(name for part in listed.parts for name in part.names)
    size = len(set(names))
    if size < 2 or any(len(part.names) != 1 for part in listed.parts) or names != names[:size] * (len(names) // size):
        return listed
    pieces = [listed.parts[start : start + size] for start in range(0, len(names), size)]
    solutions = tuple(
        MathAnswer(
            "solution",
            "\0,\0".join(part.spelling for part in piece),
            parts=tuple(part.parts[0] for part in piece),
            names=names[:size],
        )
        for piece in pieces
    )
    return solutions[0] if len(solutions) == 1 else replace(listed, parts=solutions)


def _approximation(sides: MathAnswer) -> MathAnswer:
    """`\\frac13 \\approx 0.333`, `x \\approx 0.333`; a word if the sides differ: no answer has two tries."""
    first, *other_sides = sides.parts
    if len(first.names) == 1:
        first = first.parts[0]
    elif len(other_sides) == 1 and _is_name(first.spelling) and len(first.value) > 1:
        return replace(sides, kind="solution", parts=tuple(other_sides), names=(first.spelling,))
    if other_sides and all(_rounds_to(first, other) for other in other_sides):
        # A decimal beside an exact value is one more way to write it: if it has places, either may be asked for.
        return replace(sides, parts=(first, *(other for other in other_sides if first.decimals < 0 and "." in other.spelling)))
    return MathAnswer("word", sides.spelling)


def _rounds_to(exact: MathAnswer, rounded: MathAnswer) -> bool:
    """Whether a number, rounded or cut off, is the other."""
    if not exact.kind == rounded.kind == "number" or len(exact.value) != 1 or len(rounded.value) != 1:
        return False
    if rounded.decimals < 0 or exact.marks or rounded.marks:
        return _same_numbers(exact, rounded)
    places = len(rounded.spelling.split("\0")[-1].partition(".")[2])
    try:
        return abs(complex(exact.value[0]) - complex(rounded.value[0])) < (10.0**-places if places else 0.5 + 1e-9)
    except OverflowError:
        return False


def _split(parts: Tokens, separator: str) -> list[Tokens]:
    """Pieces between separators outside of brackets."""
    pieces: list[Tokens] = []
    depth = start = 0
    for place, token in enumerate(parts):
        if token in OPENING or token == "\\begin":
            depth += 1
        elif token in CLOSING or token == "\\end":
            depth -= 1
        elif token == separator and depth == 0:
            pieces.append(parts[start:place])
            start = place + 1
    return [*pieces, parts[start:]]


def _between(parts: Tokens) -> Tokens:
    """What stands between brackets around all; nothing if there are none."""
    if len(parts) < 3 or parts[0] not in OPENING:
        return ()
    *depths, last = itertools.accumulate((token in OPENING) - (token in CLOSING) for token in parts)
    return parts[1:-1] if all(depths) and last == 0 else ()


def _flat(pieces: list[Tokens]) -> list[Tokens]:
    """An element with a `\\pm` is two."""
    flat: list[Tokens] = []
    for piece in pieces:
        if piece.count("\\pm") == 1:
            place = piece.index("\\pm")
            flat += [(*piece[:place], sign, *piece[place + 1 :]) for sign in "+-"]
        else:
            flat.append(piece)
    return flat


def _same(first: MathAnswer, other: MathAnswer) -> bool | None:
    if first.spelling == other.spelling and (first.kind == other.kind or not (first.parts or other.parts)):
        return True
    kinds = {first.kind, other.kind}
    if "either" in kinds:
        tries, other_tries = (it.parts if it.kind == "either" else (it,) for it in (first, other))
        return _combined([_same(a, b) for a in tries for b in other_tries])
    if "equation" in kinds and not kinds <= {"equation", "solution", "unreadable"}:
        return False
    if "equation" in kinds and any(first.value) and first.value in (other.value, tuple(-value for value in other.value)):
        return True  # `x = 5` is `x - 5 = 0` and `5 = x`
    if "solution" in kinds and "equation" not in kinds:
        return _same_solution(first, other) if first.kind == "solution" else _same_solution(other, first)
    if "number" in kinds and "unreadable" in kinds:
        number, text = (first, other) if first.kind == "number" else (other, first)
        if len(number.value) == 1 and RELATIONS & set(text.spelling.split("\0")):
            return False  # 5/2 is not `>= 5/2`
    if kinds & {"equation", "unreadable"}:
        return False if "_" in first.spelling + other.spelling else None
    if len(kinds) > 1:
        return False
    if first.kind == "number":
        return _same_numbers(first, other)
    if first.marks != other.marks or first.kind == "word":
        return False
    return (_same_sets if first.kind == "set" else _same_each)(first.parts, other.parts)


def _same_each(some: Sequence[MathAnswer], others: Sequence[MathAnswer]) -> bool | None:
    verdicts = [_same(*pair) for pair in zip(some, others, strict=False)]
    return False if False in verdicts or len(some) != len(others) else None if None in verdicts else True


def _same_sets(some: Sequence[MathAnswer], others: Sequence[MathAnswer]) -> bool | None:
    unmatched = list(others)
    if len(some) != len(unmatched):
        return False
    if len(some) > MAX_ELEMENTS:
        return None
    for element in some:
        verdicts = [_same(element, other) for other in unmatched]
        if True in verdicts:
            del unmatched[verdicts.index(True)]
        elif None not in verdicts:
            return False
    return None if unmatched else True


def _same_solution(solution: MathAnswer, other: MathAnswer) -> bool | None:
    """`x = 2` is 2, `(p, q) = (3, 2)` is `q = 2, p = 3`, and both of `(p, q) = (3, 2)` and `p = 3, q = 2` are `(3, 2)`.

    `q = 2, p = 3` is not `(2, 3)`: the question does not give their order.
    """
    names = solution.names
    if other.kind == "solution":
        values = dict(zip(other.names, other.parts, strict=True))
        if set(names) == set(values):
            return _same_each(solution.parts, [values[name] for name in names])
        # Two equations may say the same of different names.
        return None if len(names) == len(values) == 1 else False
    if len(names) == 1:
        return _same(solution.parts[0], other)
    if other.kind == "set" and not solution.marks:
        return _same_sets(solution.parts, other.parts)
    ordered = sorted(names, key=lambda name: (name.startswith("\\"), name.casefold()))
    if other.kind == "tuple" and other.marks == "()" and (solution.marks or list(names) == ordered):
        return _same_each(solution.parts, other.parts)
    return False


def _same_numbers(first: MathAnswer, other: MathAnswer) -> bool:
    rounded = max(first.decimals, other.decimals) >= SIGNIFICANT and min(first.decimals, other.decimals) < 0
    tolerance = 1e-6 if rounded else 1e-9
    if _agree(first.value, other.value, tolerance):
        return True
    if first.marks == other.marks:
        return False
    # One of them is a percentage: 50% is 0.5, and 50 if percent was asked for.
    plain, percent = (other, first) if first.marks else (first, other)
    return _agree(plain.value, tuple(value / 100 for value in percent.value), tolerance)


def _agree(first: tuple[Number, ...], second: tuple[Number, ...], tolerance: float) -> bool:
    return all(close(*pair, tolerance) for pair in _at_points(first, second))


def _at_points(first: tuple[Number, ...], second: tuple[Number, ...]) -> list[tuple[Number, Number]]:
    """The pairs of values; a single one is that at all points. Empty if one of the two has no value."""
    size = max(len(first), len(second)) if first and second else 0
    return [(first[k % len(first)], second[k % len(second)]) for k in range(size)]
