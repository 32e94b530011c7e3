"""A mathematical answer as tokens, so that spelling does not matter: spaces, `\\left`, `\\dfrac`, `\\text`, units, `$` and `%`."""

from __future__ import annotations

import re

MAX_TEXT = 2_000
"""A longer answer is compared as text and not read."""

CHARACTERS = str.maketrans(
    {
        "\u2212": "-",
        "\u2013": "-",
        "\u00d7": "\\times ",
        "\u00b7": "\\cdot ",
        "\u00f7": "/",
        "\u03c0": "\\pi ",
        "\u221e": "\\infty ",
        "\u00b0": "\\circ ",
        "\u222a": "\\cup ",
        "\u2229": "\\cap ",
        "\u2264": "\\le ",
        "\u2265": "\\ge ",
        "\u2260": "\\ne ",
        "\u00b1": "\\pm ",
    }
)
TOKEN = re.compile(r"\\[a-zA-Z]+|\\.|[0-9]+(?:\.[0-9]+)?|\.[0-9]+|[a-zA-Z]+|[^\s]", re.DOTALL)
NOTHING = {
    *("\\left", "\\right", "\\bigl", "\\bigr", "\\big", "\\Big", "\\Bigl", "\\Bigr", "\\displaystyle", "\\limits"),
    *("\\!", "\\,", "\\;", "\\:", "\\ ", "\\quad", "\\qquad", "~", "$", "\\$", "\\(", "\\)", "\\[", "\\]", "\\degree"),
}
SAME = {
    **dict.fromkeys(("\\dfrac", "\\tfrac", "\\cfrac"), "\\frac"),
    **dict.fromkeys(("\\cdot", "\\times", "\\ast"), "*"),
    **dict.fromkeys(("\\mathrm", "\\textbf", "\\mathbf", "\\mbox", "\\textnormal", "\\textrm", "\\textit", "\\hbox"), "\\text"),
    **dict.fromkeys(("\\bmatrix", "\\matrix"), "\\pmatrix"),
    "\\div": "/",
    "\\leq": "\\le",
    "\\geq": "\\ge",
    "\\neq": "\\ne",
    "\\%": "%",
    "\\lbrace": "\\{",
    "\\rbrace": "\\}",
    "\\lbrack": "[",
    "\\rbrack": "]",
    "\\colon": ":",
    "\\vert": "|",
    "\\lvert": "|",
    "\\rvert": "|",
}
AND = ("and", "or")
UNITS = frozenset(
    [
        "degree",
        "degrees",
        "dollar",
        "dollars",
        "cent",
        "cents",
        "euro",
        "euros",
        "unit",
        "units",
        "square",
        "sq",
        "cubic",
        "inch",
        "inches",
        "foot",
        "feet",
        "ft",
        "yard",
        "yards",
        "mile",
        "miles",
        "mm",
        "cm",
        "km",
        "meter",
        "meters",
        "metre",
        "metres",
        "kilometer",
        "kilometers",
        "centimeter",
        "centimeters",
        "gram",
        "grams",
        "kg",
        "kilogram",
        "kilograms",
        "pound",
        "pounds",
        "ounce",
        "ounces",
        "liter",
        "liters",
        "second",
        "seconds",
        "sec",
        "minute",
        "minutes",
        "min",
        "hour",
        "hours",
        "day",
        "days",
        "week",
        "weeks",
        "month",
        "months",
        "year",
        "years",
        "mph",
        "percent",
        "people",
        "students",
        "ways",
        "times",
        "points",
        "hr",
        "hrs",
        "miles",
        "per",
        "mi",
        "integers",
        "numbers",
    ]
)


def squeezed(text: str) -> str:
    """The text without white space: all that may differ in an answer too long to be read."""
    return "".join(text.split())


def tokens(text: str) -> tuple[str, ...]:
    """The tokens of an answer of at most `MAX_TEXT` characters, spelt in one way. A word in `\\text` is a token like `"cm`."""
    assert len(text) <= MAX_TEXT
    plain = text.translate(CHARACTERS).replace(",\\!", "").replace("{,}", "")
    raw = TOKEN.findall(plain.strip().rstrip("."))
    found: list[str] = []
    place = 0
    while place < len(raw):
        token = SAME.get(raw[place], raw[place])
        place += 1
        if token in NOTHING:
            continue
        if token in ("\\text", "\\phantom") and place < len(raw) and raw[place] == "{":
            close = _closing(raw, place)
            words = raw[place + 1 : close]
            place = close + 1
            found += _words(words) if token == "\\text" else []
        elif token == "\\circ":  # degrees, with the power sign before it
            if found[-2:] == ["^", "{"] and raw[place : place + 1] == ["}"]:
                del found[-2:]
                place += 1
            elif found[-1:] == ["^"]:
                found.pop()
        else:
            found.append(token)
    return _without_units(found)


def spelling(found: tuple[str, ...]) -> str:
    """One text for all ways to write an answer that differ in letter case of words, in `\\text` around them, or in braces around one token, only."""
    words: list[str] = []
    for token in found:
        words.append(token.removeprefix('"'))
        if token == "}" and words[-3:-2] == ["{"]:
            words[-3:] = words[-2:-1]
    return "\0".join(word.casefold() if len(word) > 2 and word.isalpha() else word for word in words)


def joined_thousands(found: tuple[str, ...]) -> tuple[str, ...] | None:
    """`1,000,000` as one number, where nothing else stands there; None otherwise."""
    whole = "".join(found)
    if not re.fullmatch(r"[-+]?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?%?", whole):
        return None
    return tuple(TOKEN.findall(whole.replace(",", "")))


def _closing(raw: list[str], opening: int) -> int:
    depth = 0
    for place in range(opening, len(raw)):
        depth += {"{": 1, "}": -1}.get(raw[place], 0)
        if depth == 0:
            return place
    return len(raw)


def _words(words: list[str]) -> list[str]:
    """`"word` for each word; what is no word stays as it is."""
    return [_word(word) if word.isalpha() else word for word in words if word not in NOTHING and word not in "{}"]


def _word(word: str) -> str:
    return '"' + (word if len(word) == 1 else word.casefold())


def _without_units(found: list[str]) -> tuple[str, ...]:
    """Units at the end go, with their power; `and` between elements is a comma."""
    kept = ["," if token.strip('"') in AND else token for token in found]
    while len(kept) > 1:
        end = len(kept)
        if end > 2 and kept[-2] == "^" and _is_unit(kept[-3]):
            end -= 2
        if kept[end - 1] == "." or _is_unit(kept[end - 1]):
            del kept[end - 1 :]
        else:
            break
    return tuple(token.removeprefix('"') if len(token) == 2 else token for token in kept)


def _is_unit(token: str) -> bool:
    return token in UNITS or (token.startswith('"') and len(token) > 2) or token == '"m'
