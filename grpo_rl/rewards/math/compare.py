"""Comparison of two mathematical answers without an algebra system: most are settled here, either way.

Elements of tuples, intervals, lists, sets, unions and matrices are compared by their value; two equations, unless both define one name, are left to algebra.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from grpo_rl.rewards.math.math_tokens import MAX_TEXT, differ, readings, spelling, squeezed, tokens
from grpo_rl.rewards.math.math_values import NoExpression, Number, TwoNumbers, close, values

MAX_ELEMENTS = 60
"""Elements of a set that may stand in any order; a larger one must be written alike."""
MAX_NESTING = 6
SIGNIFICANT = 6
"""Digits that a decimal must have to stand for a number that is no decimal, such as 1/3 or a root."""
MATRICES = ("matrix", "smallmatrix", "pmatrix", "bmatrix", "Bmatrix", "vmatrix", "Vmatrix")
DETERMINANTS = ("vmatrix", "Vmatrix")
OPENING, CLOSING = ("(", "[", "{", "\\{"), (")", "]", "}", "\\}")
OPERATIONS = frozenset(("+", "-", "*", "/", "^", "!", "(", "\\frac", "\\sqrt", "\\binom", "\\choose"))
"""A bracket behind a factor, too, is a product."""

Tokens = tuple[str, ...]
Kind = Literal["number", "approximation", "word", "tuple", "set", "union", "matrix", "equation", "unreadable"]
"""`word` is whatever is equal to its own spelling only; `approximation` is `\\frac13 \\approx 0.333`."""


@dataclass(frozen=True, slots=True)
class MathAnswer:
    """An answer that was read: what it is, and its value or its parts."""

    kind: Kind
    spelling: str
    value: tuple[Number, ...] = ()
    parts: tuple[MathAnswer, ...] = ()
    marks: str = ""
    """The brackets of a tuple, `%` of a percentage, the shape of a matrix."""
    decimals: int = -1
    """Significant digits of a number written as a decimal or an integer; -1 of any other."""


def compare(gold: str, answer: str) -> bool | None:
    """Return whether `answer` is `gold`; None where only algebra can decide. `nan` is equal to nothing.

    `1,200` as the gold is 1200, which the list `1, 200` is not; as an answer it is either.
    """
    one, other = squeezed(gold), squeezed(answer)
    if "nan" in (one.casefold(), other.casefold()):
        return False
    if one == other:
        return True
    if len(gold) > MAX_TEXT or len(answer) > MAX_TEXT:
        return None
    wanted = readings(gold)[0]
    right = _read(wanted.tokens)
    found = [not differ(wanted, given) and _same(right, _read(given.tokens)) for given in readings(answer)]
    return _any_same(found)


def number(text: str) -> float | None:
    """The value of an answer that is one number; None for anything else."""
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
    """The operations of an answer, behind its last `=`: 1 of `17*23` and `\\frac12`, 0 of 391 and -8."""
    if len(text) > MAX_TEXT:
        return 0
    found = _split(tokens(text), "=")[-1]
    return sum(
        token in OPERATIONS and not (token in "+-(" and (place == 0 or before in OPERATIONS or before in OPENING))
        for place, (before, token) in enumerate(zip(("", *found), found, strict=False))
    )


def _read(found: Tokens, nesting: int = 0) -> MathAnswer:
    text = spelling(found)
    if nesting > MAX_NESTING or not found:
        return MathAnswer("unreadable", text)
    inner = _between(found)
    if found[0] == "\\approx":
        return _read(found[1:], nesting + 1)
    if len(groups := _split(found, ";")) > 1 and any(len(_split(group, ",")) > 1 for group in groups):
        return MathAnswer("set", text, parts=tuple(_group(group, nesting + 1) for group in groups if group))
    lists = groups if len(groups) > 1 else _split(found, ",")
    if len(lists) > 1:
        return MathAnswer("set", text, parts=_by_solution(_all(_flat(lists), nesting)))
    if found == ("\\{", "\\}"):
        return MathAnswer("word", "\\emptyset")
    if inner is not None and found[0] == "\\{":
        return MathAnswer("set", text, parts=_all(_flat(_split(inner, ",")), nesting))
    unions = _split(found, "\\cup")
    if len(unions) > 1:
        return MathAnswer("union", text, parts=_all(unions, nesting))
    if inner is not None and len(elements := _split(inner, ",")) > 1 and found[0] != "{":
        return MathAnswer("tuple", text, parts=_all(elements, nesting), marks=found[0] + found[-1])
    if inner is not None and found[0] == "(" and len(inner) == 1 and inner[0].isalpha():
        return MathAnswer("word", inner[0])
    if found[:2] == ("\\begin", "{") and found[-4:-2] == ("\\end", "{"):
        return _matrix(found, text, nesting)
    if inner is not None and found[0] in "([" and inner[:4] == ("\\begin", "{", "array", "}"):
        return _matrix(inner, text, nesting, bracketed=True)
    if len(sides := _split(found, "\\approx")) > 1:
        return _approximation(sides, text, nesting)
    sides = _split(found, "=")
    if len(sides) > 1:
        return MathAnswer("equation", text, parts=_all([sides[0], sides[-1]], nesting))
    if len(ratio := _split(found, ":")) > 1:
        return MathAnswer("tuple", text, parts=_all(ratio, nesting), marks=":")
    if "\\pm" in found:
        return MathAnswer("set", text, parts=_all(_flat([found]), nesting))
    return _expression(found, text)


def _expression(found: Tokens, text: str) -> MathAnswer:
    if all(token.startswith('"') or (token.isalpha() and len(token) > 4) for token in found):
        return MathAnswer("word", text)
    percent = found[-1] == "%"
    if found == ("\\emptyset",):
        return MathAnswer("word", text)
    if found in (("\\infty",), ("+", "\\infty"), ("-", "\\infty")):
        return MathAnswer("word", "-\\infty" if found[0] == "-" else "\\infty")
    try:
        value = values(found[:-1] if percent else found)
    except TwoNumbers:
        return MathAnswer("word", text)
    except NoExpression:
        return MathAnswer("unreadable", text)
    digits = -1
    if all(token in "+-" for token in found[: -1 - percent]) and found[-1 - percent].replace(".", "", 1).isdigit():
        digits = len(found[-1 - percent].replace(".", "").lstrip("0"))
    return MathAnswer("number", text, value, marks="%" if percent else "", decimals=digits)


def _all(pieces: Sequence[Tokens], nesting: int) -> tuple[MathAnswer, ...]:
    return tuple(_read(piece, nesting + 1) for piece in pieces if piece)


def _matrix(found: Tokens, text: str, nesting: int, bracketed: bool = False) -> MathAnswer:
    """A matrix in brackets; `bracketed` is an `array`, which gets its brackets from outside and names its columns first."""
    if found.count("\\begin") != 1 or found[2] != found[-2] or not (bracketed or found[2] in MATRICES):
        return MathAnswer("unreadable", text)
    start = found.index("}", 5) + 1 if bracketed and found[4] == "{" and "}" in found[5:-4] else 4
    rows = [_split(row, "&") for row in _split(found[start:-4], "\\\\") if row]
    cells = _all([cell for row in rows for cell in row], nesting)
    bars = "|" if found[2] in DETERMINANTS else ""
    return MathAnswer("matrix", text, parts=cells, marks=bars + ",".join(str(len(row)) for row in rows))


def _group(found: Tokens, nesting: int) -> MathAnswer:
    """One of the solutions of `p=5, q=2; p=7, q=2`, or one of the tuples of `5, 2; 7, 2`."""
    parts = _all(_split(found, ","), nesting)
    if len(parts) == 1:
        return parts[0]
    return MathAnswer(
        "set" if _assigned(parts) else "tuple", spelling(found), parts=parts, marks="" if _assigned(parts) else "()"
    )


def _by_solution(parts: tuple[MathAnswer, ...]) -> tuple[MathAnswer, ...]:
    """The elements of a list; of `p=5, q=2, p=7, q=2` the two solutions, each with all its variables."""
    names = [part.parts[0].spelling if _is_assignment(part) else "" for part in parts]
    size = len(set(names))
    if not 1 < size < len(names) or "" in names or len(names) % size or names != names[:size] * (len(names) // size):
        return parts
    pieces = [parts[start : start + size] for start in range(0, len(parts), size)]
    return tuple(MathAnswer("set", "\0,\0".join(part.spelling for part in piece), parts=piece) for piece in pieces)


def _approximation(sides: list[Tokens], text: str, nesting: int) -> MathAnswer:
    """`\\frac13 \\approx 0.333`, and `x \\approx 0.333`; a word where the sides do not agree, so that no answer has two tries."""
    parts = _all(sides, nesting)
    if parts and parts[0].kind == "equation" and _is_assignment(parts[0]):
        parts = (parts[0].parts[1], *parts[1:])
    elif len(parts) == 2 and _is_name(parts[0]) and len(parts[0].value) > 1:
        return MathAnswer("equation", text, parts=parts)
    if len(parts) > 1 and all(_rounds_to(parts[0], part) for part in parts[1:]):
        # A decimal beside an exact value is one more way to write it: where it has places, either may be asked for.
        exact = parts[0].decimals < 0
        rounded = tuple(part for part in parts[1:] if exact and "." in part.spelling)
        return MathAnswer("approximation", text, parts=(parts[0], *rounded))
    return MathAnswer("word", text)


def _rounds_to(exact: MathAnswer, rounded: MathAnswer) -> bool:
    """Return whether a number, rounded or cut off, is the other: both plain numbers, without variables."""
    if not exact.kind == rounded.kind == "number" or len(exact.value) != 1 or len(rounded.value) != 1:
        return False
    if rounded.decimals < 0 or exact.marks or rounded.marks:
        return _same_numbers(exact, rounded)
    places = len(rounded.spelling.split("\0")[-1].partition(".")[2])
    try:
        return abs(complex(exact.value[0]) - complex(rounded.value[0])) < (10.0**-places if places else 0.5 + 1e-9)
    except OverflowError:
        return False


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
    """Return what the outermost brackets hold, where they hold everything."""
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


def _same(gold: MathAnswer, answer: MathAnswer) -> bool | None:
    if gold.spelling == answer.spelling and (gold.kind == answer.kind or not (gold.parts or answer.parts)):
        return True
    if "approximation" in (gold.kind, answer.kind):
        return _same_approximations(gold, answer)
    if _solution(gold) and _solution(answer):
        return _same_solutions(gold, answer)
    if "tuple" in (gold.kind, answer.kind) and (_solution(gold) or _solution(answer)):
        return _same_tuple_and_solution(gold, answer)
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
    return _all_same(found)


def _all_same(found: list[bool | None]) -> bool | None:
    return False if False in found else None if None in found else True


def _any_same(found: list[bool | None]) -> bool | None:
    return True if True in found else None if None in found else False


def _same_numbers(gold: MathAnswer, answer: MathAnswer) -> bool:
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


def _same_sets(gold: tuple[MathAnswer, ...], answer: tuple[MathAnswer, ...]) -> bool | None:
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


def _same_approximations(gold: MathAnswer, answer: MathAnswer) -> bool | None:
    golds = gold.parts if gold.kind == "approximation" else (gold,)
    answers = answer.parts if answer.kind == "approximation" else (answer,)
    found = [_same(one, other) for one in golds for other in answers]
    return _any_same(found)


def _same_solutions(gold: MathAnswer, answer: MathAnswer) -> bool | None:
    """`(p, q) = (3, 2)` is `q = 2, p = 3`: variable by variable, in any order."""
    one, other = dict(_solution(gold)), dict(_solution(answer))
    if one.keys() != other.keys():
        return False
    found = [_same(value, other[name]) for name, value in one.items()]
    return _all_same(found)


def _same_tuple_and_solution(gold: MathAnswer, answer: MathAnswer) -> bool | None:
    """`(3, 2)` is `(p, q) = (3, 2)`, and `p = 3, q = 2` where the variables stand in the order of the alphabet.

    `q = 2, p = 3` is not `(2, 3)`: the order of the two in the tuple of the question is not given.
    """
    whole, named = (gold, answer) if gold.kind == "tuple" else (answer, gold)
    names = [name for name, _ in _solution(named)]
    ordered = sorted(names, key=lambda name: (name.startswith("\\"), name.casefold()))
    if whole.marks != "()" or len(whole.parts) != len(names) or (named.kind == "set" and names != ordered):
        return False
    pairs = [(part, value) for part, (_, value) in zip(whole.parts, _solution(named), strict=True)]
    found = [_same(*(pair if whole is gold else pair[::-1])) for pair in pairs]
    return _all_same(found)


def _solution(answer: MathAnswer) -> list[tuple[str, MathAnswer]]:
    """The variables and values of `(p, q) = (3, 2)` and of `p = 3, q = 2`; nothing of anything else."""
    if answer.kind == "set" and _assigned(answer.parts):
        return [(part.parts[0].spelling, part.parts[1]) for part in answer.parts]
    if answer.kind != "equation" or len(answer.parts) != 2:
        return []
    names, values = answer.parts
    if not names.kind == values.kind == "tuple" or not names.marks == values.marks == "()":
        return []
    if len(names.parts) != len(values.parts) or not all(_is_name(name) for name in names.parts):
        return []
    spelt = [name.spelling for name in names.parts]
    return list(zip(spelt, values.parts, strict=True)) if len(set(spelt)) == len(spelt) else []


def _assigned(parts: tuple[MathAnswer, ...]) -> bool:
    """Return whether the elements of a list give values to different variables, two or more."""
    names = {part.parts[0].spelling for part in parts if _is_assignment(part)}
    return len(parts) > 1 and len(names) == len(parts)


def _is_assignment(answer: MathAnswer) -> bool:
    return answer.kind == "equation" and len(answer.parts) == 2 and _is_name(answer.parts[0])


def _same_equations(gold: MathAnswer, answer: MathAnswer) -> bool | None:
    """`x = 2` is 2 and `y = x + 1` is x + 1; of two equations only definitions of one name are compared here."""
    if gold.kind != answer.kind:
        equation, other = (gold, answer) if gold.kind == "equation" else (answer, gold)
        if len(equation.parts) != 2 or "unreadable" in (other.kind, equation.parts[1].kind):
            return None
        name, value = equation.parts
        if len(name.value) == 1 and name.kind == "number" and len(value.value) > 1 and _is_name(value):
            name, value = value, name
        # `17 = 18` is not 18.
        says_a_value = _is_name(name) or _rounds_to(name, value)
        return says_a_value and _same(*((value, other) if equation is gold else (other, value)))
    if len(gold.parts) != 2 or len(answer.parts) != 2:
        return False
    (one, first), (two, second) = gold.parts, answer.parts
    if one.spelling == two.spelling and _is_name(one):
        return _same(first, second)
    return None


def _is_name(side: MathAnswer) -> bool:
    """`x`, or `f(x)`: what stands before the `=` of a definition."""
    pieces = side.spelling.split("\0")
    return (pieces[0].isalpha() or pieces[0].startswith("\\")) and (
        len(pieces) == 1 or (len(pieces) == 4 and pieces[1] == "(") or (len(pieces) == 3 and pieces[1] == "_")
    )
