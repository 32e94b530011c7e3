"""Equivalence through math-verify (sympy), behind a gate on the text.

An algebra system writes out what a text stands for: ten characters can cost it minutes or all memory. What may pass is
therefore listed, not what may not: characters, commands, and how large, wide and deep the expression is.
"""

from __future__ import annotations

import functools
import logging
import re
from typing import Any

MAX_LENGTH = 200
MAX_DIGITS = 80
MAX_NUMBER = 12
MAX_NESTING = 6
MAX_POWERS = 8
MAX_EXPONENT = 99
MAX_GROUP_EXPONENT = 4
"""The largest power of brackets: an algebra system multiplies it out."""
MAX_FUNCTIONS = 4
MAX_SEPARATORS = 12
MAX_CELLS = 9
MAX_RELATIONS = 3

CHARACTERS = re.compile(r"[0-9A-Za-z+\-*/^=<>()\[\]{}|.,:;&\\%!$ \n]*")
COMMAND = re.compile(r"\\([A-Za-z]+|.)", re.DOTALL)
ALLOWED = frozenset(
    [
        "frac",
        "dfrac",
        "tfrac",
        "sqrt",
        "pi",
        "left",
        "right",
        "cdot",
        "times",
        "div",
        "le",
        "leq",
        "ge",
        "geq",
        "lt",
        "gt",
        "ne",
        "neq",
        "infty",
        "cup",
        "cap",
        "text",
        "mathrm",
        "mbox",
        "in",
        "mathbb",
        "alpha",
        "beta",
        "gamma",
        "theta",
        "lambda",
        "phi",
        "circ",
        "pm",
        "begin",
        "end",
        "sin",
        "cos",
        "tan",
        "cot",
        "sec",
        "csc",
        "ln",
        "log",
        "arcsin",
        "arccos",
        "arctan",
        "{",
        "}",
        ",",
        "!",
        ";",
        ":",
        "%",
    ]
) | {" ", "\\", "$"}
FUNCTIONS = frozenset(["sqrt", "sin", "cos", "tan", "cot", "sec", "csc", "ln", "log", "arcsin", "arccos", "arctan"])
EXPONENT = re.compile(
    r"\^ *(?:\{ *(-? *[0-9]+|[a-z]|\\circ|-? *[0-9] */ *[0-9]|-?\\[dt]?frac *\{[0-9]\} *\{[0-9]\}) *\}|([0-9])|([a-z])|\\circ)"
)
ENVIRONMENT = re.compile(r"\\(?:begin|end) *\{[pbBvV]?matrix\}")
WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{5}")
RELATION = re.compile(r"[=<>]|\\(?:le|leq|ge|geq|lt|gt|ne|neq|in)\b")


def refusal(text: str) -> str | None:
    """Return why a text must not reach the algebra system; None when it may. Takes time linear in the text."""
    if len(text) > MAX_LENGTH:
        return f"it has more than {MAX_LENGTH} characters"
    if not CHARACTERS.fullmatch(text):
        return "it has a character that no formula needs"
    commands = COMMAND.findall(text)
    unknown = [command for command in commands if command not in ALLOWED]
    if unknown:
        return "it has a command that is not on the list"
    numbers = re.findall(r"[0-9]+", text)
    if sum(map(len, numbers)) > MAX_DIGITS or max(map(len, numbers), default=0) > MAX_NUMBER:
        return "its numbers are too long"
    if re.search(r"(?<!\\)!", text):
        return "it has a factorial"
    if "**" in text or "//" in text or WORD.search(ENVIRONMENT.sub("", text)):
        return "it is no formula"
    if sum(command in FUNCTIONS for command in commands) > MAX_FUNCTIONS:
        return "it has too many functions"
    if text.count("&") + text.count("\\\\") >= MAX_CELLS or commands.count("begin") > 2:
        return "its matrix is too large"
    if text.count(",") + text.count(";") > MAX_SEPARATORS or len(RELATION.findall(text)) > MAX_RELATIONS:
        return "it has too many parts"
    return _nesting(text) or _powers(text)


def _nesting(text: str) -> str | None:
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return "its brackets are nested too deeply" if deepest > MAX_NESTING else None


def _powers(text: str) -> str | None:
    carets = text.count("^")
    powers = list(EXPONENT.finditer(text))
    if carets > MAX_POWERS or carets != len(powers):
        return "its powers are too many or not plain"
    for power in powers:
        if text[power.end() :].lstrip(" }")[:1] == "^":
            return "it is a tower of powers"
        exponent = (power.group(1) or power.group(2) or "").replace(" ", "").lstrip("-")
        of_group = text[: power.start()].rstrip()[-1:] in tuple(")]}|")
        if exponent.isdigit() and int(exponent) > (MAX_GROUP_EXPONENT if of_group else MAX_EXPONENT):
            return "a power is too large"
    return None


def equivalent(gold: str, answer: str) -> bool:
    """Return whether math-verify finds the two equal. Both must have passed `refusal`.

    Its own timeouts are off: they use signals, which work in main threads only; the deadline of the reward does that.
    A text that it cannot read is equal to nothing.
    """
    from math_verify import verify

    parsed = _parsed(gold), _parsed(answer)
    if not all(parsed):
        return False
    return bool(verify(parsed[0], parsed[1], timeout_seconds=None, raise_on_error=False))


@functools.lru_cache(maxsize=512)
def _parsed(text: str) -> list[Any]:
    from math_verify import LatexExtractionConfig, parse

    # It warns, once for a process, that its timeouts are off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    config = [LatexExtractionConfig(boxed_match_priority=0)]
    found = parse(rf"\boxed{{{text}}}", extraction_config=config, fallback_mode="no_fallback", parsing_timeout=None)
    return list(found)
