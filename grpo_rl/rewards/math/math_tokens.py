"""A mathematical answer as tokens, so that spelling does not matter."""

from __future__ import annotations

import itertools
import re
from decimal import Decimal
from typing import NamedTuple

MAX_TEXT = 2_000

SIGN_COMMANDS = zip(
    "\u00d7\u00b7\u03c0\u221e\u00b0\u222a\u2229\u2264\u2265\u2260\u00b1\u2248\u2205",
    re.findall("[a-z]+", "times cdot pi infty circ cup cap le ge ne pm approx emptyset"),
    strict=True,
)
CHARACTERS = str.maketrans(
    {"\u2212": "-", "\u2013": "-", "\u00f7": "/", "\u2009": "\\,", "\u202f": "\\,"}
    | {sign: f"\\{name} " for sign, name in SIGN_COMMANDS}
)
SCIENTIFIC = (
    r"(?:[0-9]+\.[0-9]+e[-+][0-9]{2}|[0-9]+(?:\.[0-9]+)?(?:e[0-9]{1,2}|e[-+]0[0-9]|E[-+]?[0-9]{1,2}))"
    r"(?![0-9A-Za-z^]|\.[0-9]|\s*_)"
)
"""Not `2e-3`, which is twice Euler's number minus 3."""
TOKEN = re.compile(rf"\\[a-zA-Z]+|\\.|{SCIENTIFIC}|[0-9]+(?:\.[0-9]+)?|\.[0-9]+|[a-zA-Z]+|[^\s]", re.DOTALL)
RELATIONS = (
    # `5!=120` says what 5! is: after a digit or a bracket the sign is a factorial.
    (r"(?<![0-9)\]}!])!=(?!=)|\\not\s*=", r"\\ne "),
    (r"<=(?!=)", r"\\le "),
    (r">=(?!=)", r"\\ge "),
)
FORMULA_MARK = r"(\\\\)|\\[()\[\]]"
"""Around a formula; and `\\\\`, which ends a row and may stand before a bracket."""

# Patterns are text: `re` compiles one when it is first asked for, so that the start of a process does not pay for it.
# A group is never possessive: `re` before Python 3.11.5 gets such repeats wrong. What a repeat gives back is followed by a
# comma or a digit, which `_END` refuses at once, so time stays linear.
_FIRST, _END = r"(?<![0-9.,])[1-9][0-9]{0,2}", r"(?![0-9]|[.,][0-9]|,\\!|\{,\})"
COMMAS = rf"{_FIRST}(?:,[0-9]{{3}})+(?:\.[0-9]++)?{_END}"
"""`1,000`: thousands, or the elements of a list."""
TIGHT_COMMAS = rf"{_FIRST}(?:(?:,\\!\s*+|\{{,\}})[0-9]{{3}})+(?:\.[0-9]++)?{_END}"
"""`1,\\!000` and `1{,}000`: thousands, as the writer took the space after the comma away."""
SPACES = r"[-+]?[1-9][0-9]{0,2}(?:(?:\\,|~|\s)[0-9]{3})+(?:\.[0-9]++)?"
"""`12\\,345`, if an answer holds nothing else."""
DECIMAL_COMMA = rf"(?<![0-9.,}}])[0-9]++\{{,\}}[0-9]++{_END}"
LIST_COMMA = r",(?:\s|\\[,;: ]|~|\\q?quad)"
NOTHING = {
    *("\\left", "\\right", "\\bigl", "\\bigr", "\\big", "\\Big", "\\Bigl", "\\Bigr", "\\displaystyle", "\\limits"),
    *("\\!", "\\,", "\\;", "\\:", "\\ ", "\\quad", "\\qquad", "~", "$", "\\$", "\\(", "\\)", "\\[", "\\]", "\\degree"),
}


def _first_words(lines: str) -> dict[str, str]:
    """Each word, with the first one of its line."""
    return {word: line.split()[0] for line in lines.strip().splitlines() for word in line.split()}


SAME = _first_words(r"""
\frac \dfrac \tfrac \cfrac
* \cdot \times \ast
\text \mathrm \textbf \mathbf \mbox \textnormal \textrm \textit \hbox
\binom \dbinom \tbinom
\approx \simeq \approxeq \doteq
\emptyset \varnothing
/ \div
\le \leq
\ge \geq
\ne \neq
% \%
\{ \lbrace
\} \rbrace
[ \lbrack
] \rbrack
: \colon
| \vert \lvert \rvert
""")
AND = ("and", "or")
MEASURES = _first_words("""
mm millimeter millimeters millimetre millimetres
cm centimeter centimeters centimetre centimetres
m meter meters metre metres
km kilometer kilometers kilometre kilometres
in inch inches
ft foot feet
yd yard yards
mi mile miles
mi*h mph
g gram grams
kg kilogram kilograms
lb lbs pound pounds
oz ounce ounces
l liter liters litre litres
ml milliliter milliliters millilitre millilitres
gal gallon gallons
s sec secs second seconds
min mins minute minutes
h hr hrs hour hours
day days
week weeks
month months
year years
$ dollar dollars usd
cent cents
euro euros
% percent
deg degree degrees
rad radian radians
am
pm
""")
"""Answers with different units differ; other words, as in `21\\text{ dogs}`, say nothing."""
HALVES = frozenset(("am", "pm"))
HALF = r"(?i)(?<![a-z])([ap])\.?\s?m(?![a-z])\.?"
SIGNS = {"\\circ": "deg", "\\degree": "deg", "\\$": "$", "%": "%"}
POWERS = {"square": "^2", "sq": "^2", "squared": "^2", "cubic": "^3", "cubed": "^3"}
OTHER_UNITS = "mm cm km mi ft kg hr unit units square sq cubic people students ways times points per integers numbers"
UNITS = frozenset(OTHER_UNITS.split()) | {name for name in MEASURES if len(name) > 2}
"""Words that are units without `\\text` around them, too."""


class Reading(NamedTuple):
    tokens: tuple[str, ...]
    units: frozenset[str]


def squeezed(text: str) -> str:
    """White space stays between two digits: `1 2` is not 12."""
    words = text.split()
    spaced = [
        " " + word if previous[-1] in "0123456789.," and word[0] in "0123456789." else word
        for previous, word in itertools.pairwise(words)
    ]
    return "".join([*words[:1], *spaced])


def tokens(text: str) -> tuple[str, ...]:
    return readings(text)[0].tokens


def differ(first: Reading, other: Reading) -> bool:
    """Both have units, and each one that the other lacks."""
    if ":" in first.tokens and ":" in other.tokens and first.units & HALVES != other.units & HALVES:
        return True
    return bool(first.units - other.units and other.units - first.units)


def readings(text: str) -> list[Reading]:
    """What an answer of at most `MAX_TEXT` characters can mean; a word in `\\text` is a token like `"cm`.

    `1,200` has two readings: 1200, then the list 1, 200.
    """
    assert len(text) <= MAX_TEXT
    plain = text.translate(CHARACTERS).strip().rstrip(".")
    if ":" in plain:
        plain = re.sub(HALF, lambda match: f"{match[1].lower()}m", plain)
    if "=" in plain:
        for relation, command in RELATIONS:
            plain = re.sub(relation, command, plain)
    if "\\" in plain:
        plain = re.sub(FORMULA_MARK, r"\1", plain)
    if "," in plain:
        plain = re.sub(TIGHT_COMMAS, lambda match: re.sub(r"[^0-9.]", "", match.group()), plain)
        plain = re.sub(DECIMAL_COMMA, lambda match: match.group().replace("{,}", "."), plain)
        plain = plain.replace(",\\!", ",").replace("{,}", ",")
    if plain[-1:].isdigit() and re.fullmatch(SPACES, plain.strip("$\\ ")):
        plain = re.sub(r"[^-+0-9.]", "", plain)
    return [_tokens(reading) for reading in (_thousands(plain) if "," in plain else [plain])]


def _thousands(plain: str) -> list[str]:
    """`1,200` as a number and, if that is possible too, as it is.

    `1,050` is always a number. In brackets a comma separates elements, unless other commas there have a space
    after them, as in `(1,200, 3,400)`.
    """
    spaced = re.search(LIST_COMMA, plain) is not None
    joined, separated, place, depth = "", "", 0, 0
    for match in re.finditer(COMMAS, plain):
        between = plain[place : match.start()]
        depth += sum(map(between.count, "([")) + between.count("\\{") - sum(map(between.count, ")]")) - between.count("\\}")
        number, place = match.group(), match.end()
        certain = ",0" in number
        joined += between + (number.replace(",", "") if certain or spaced or depth <= 0 else number)
        separated += between + (number.replace(",", "") if certain else number)
    joined, separated = joined + plain[place:], separated + plain[place:]
    return [joined] if joined == separated else [joined, separated]


def _tokens(plain: str) -> Reading:
    raw = TOKEN.findall(plain)
    all_tokens: list[str] = []
    units: set[str] = set()
    place = 0
    while place < len(raw):
        token = SAME.get(raw[place], raw[place])
        place += 1
        if unit := SIGNS.get(token):
            units.add(unit)
        if token in NOTHING:
            continue
        if token in ("\\text", "\\phantom") and place < len(raw) and raw[place] == "{":
            close = _closing(raw, place)
            words = raw[place + 1 : close]
            place = close + 1
            all_tokens += _words(words) if token == "\\text" else []
        elif token == "\\circ":  # degrees, with the power sign before it
            if all_tokens[-2:] == ["^", "{"] and raw[place : place + 1] == ["}"]:
                del all_tokens[-2:]
                place += 1
            elif all_tokens[-1:] == ["^"]:
                all_tokens.pop()
        else:
            all_tokens.append(format(Decimal(token), "f") if token[0].isdigit() and "e" in token.lower() else token)
    bare_tokens, words = _without_units(all_tokens)
    return Reading(bare_tokens, frozenset(units | _measured(words)))


def spelling(parts: tuple[str, ...]) -> str:
    """Ignores letter case of words, `\\text` around them, and braces around one token."""
    words: list[str] = []
    for token in parts:
        words.append(token.removeprefix('"'))
        if token == "}" and words[-3:-2] == ["{"]:
            words[-3:] = words[-2:-1]
    return "\0".join(word.casefold() if len(word) > 2 and word.isalpha() else word for word in words)


def _closing(raw: list[str], opening: int) -> int:
    depths = itertools.accumulate({"{": 1, "}": -1}.get(token, 0) for token in raw[opening:])
    return next((opening + place for place, depth in enumerate(depths) if depth == 0), len(raw))


def _words(words: list[str]) -> list[str]:
    return [_word(word) if word.isalpha() else word for word in words if word not in NOTHING and word not in "{}"]


def _word(word: str) -> str:
    return '"' + (word if len(word) == 1 else word.casefold())


def _without_units(parts: list[str]) -> tuple[tuple[str, ...], list[tuple[str, str]]]:
    """The units at the end, with their powers, come apart; `and` between elements is a comma."""
    rest, units = ["," if token.strip('"') in AND else token for token in parts], list[tuple[str, str]]()
    halves = HALVES if ":" in rest else ()
    while len(rest) > 1:
        power = 2 if len(rest) > 2 and rest[-2] == "^" else 4 if len(rest) > 4 and rest[-4] == "^" and rest[-1] == "}" else 0
        power = power if power and _is_unit(rest[-power - 1]) else 0
        unit = rest[-power - 1]
        if unit != "." and unit not in halves and not _is_unit(unit):
            break
        units.append((unit.strip('"'), "".join(rest[-power:]).strip("^{}") if power else ""))
        del rest[-power - 1 :]
    return tuple(token.removeprefix('"') if len(token) == 2 else token for token in rest), units[::-1]


def _measured(units: list[tuple[str, str]]) -> set[str]:
    """`square feet`, and `feet` with the power 2, are `ft^2`."""
    measures: list[str] = []
    implied = ""
    for word, power in units:
        if word in ("squared", "cubed") and measures:
            measures[-1] += POWERS[word]
        elif word in MEASURES:
            measures += [name + (f"^{power}" if power else implied) for name in MEASURES[word].split("*")]
        implied = POWERS.get(word, "")
    return set(measures)


def _is_unit(token: str) -> bool:
    return token in UNITS or (token.startswith('"') and len(token) > 2) or token == '"m'
