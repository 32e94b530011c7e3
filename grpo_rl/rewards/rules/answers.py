"""Where the answer stands in a response. Every search is a scan with `find`: time linear in the text, whatever it is."""

from __future__ import annotations

import re

BOXES = ("\\boxed", "\\fbox")
OPEN_ANSWER, CLOSE_ANSWER = "<answer>", "</answer>"
OPEN_THINK, CLOSE_THINK = "<think>", "</think>"
PHRASES = ("final answer is", "answer is", "answer:")
TAIL = 1_000
"""Characters at the end of a response in which an answer without a box or tags is looked for."""
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def last_boxed(text: str) -> str | None:
    """What stands in the last `\\boxed{...}` (or `\\fbox`), braces balanced; None without one, and where it never closes.

    `\\boxed 7` without braces holds what follows up to a space, a `$` or the end of the line.
    """
    start, command = max((text.rfind(command), command) for command in BOXES)
    if start < 0:
        return None
    begin = start + len(command)
    rest = text[begin:]
    body = rest.lstrip()
    if not body.startswith("{"):
        end = re.search(r"[\s$]", body)
        bare = body[: end.start()] if end else body
        return bare if body is not rest and bare else None
    depth = 0
    for match in BRACE.finditer(body):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0 and match.group() == "}":
            return body[1 : match.start()]
    return None


def last_tagged(text: str, opening: str = OPEN_ANSWER, closing: str = CLOSE_ANSWER) -> str | None:
    """What stands between the last closing tag and the opening one before it; None where they are not there."""
    end = text.rfind(closing)
    start = text.rfind(opening, 0, max(0, end))
    return text[start + len(opening) : end] if 0 <= start < end else None


def after_thought(text: str) -> str:
    """What follows the last `</think>`; nothing where a thought was begun and never ended; all of a text without thoughts."""
    end = text.rfind(CLOSE_THINK)
    if end >= 0:
        return text[end + len(CLOSE_THINK) :]
    return "" if OPEN_THINK in text else text


def last_pair(text: str, opening: str = OPEN_ANSWER, closing: str = CLOSE_ANSWER) -> str | None:
    """What the last pair of tags holds, pairs read from the left: what the last match of `opening(.*?)closing` would be."""
    found, place = None, 0
    while True:
        start = text.find(opening, place)
        end = text.find(closing, start + len(opening)) if start >= 0 else -1
        if end < 0:
            return found
        found, place = text[start + len(opening) : end], end + len(closing)


def after_phrase(text: str) -> str | None:
    """What follows the last `answer is` or `answer:` in the last 1,000 characters, up to the end of its line or sentence."""
    tail = text[-TAIL:]
    small = tail.lower() if tail.isascii() else "".join(c.lower() if c.isascii() else c for c in tail)
    end = max(small.rfind(phrase) + len(phrase) if phrase in small else -1 for phrase in PHRASES)
    if end < 0:
        return None
    line = tail[end:].lstrip(" \t:*").split("\n", 1)[0]
    for mark in ("$$", "$"):
        if line.startswith(mark):
            closed = line.find(mark, len(mark))
            return line[len(mark) : closed] if closed > 0 else None
    if line.startswith("\\("):
        closed = line.find("\\)")
        return line[2:closed] if closed > 0 else None
    return line.split(". ", 1)[0].strip().strip("*").rstrip(". ") or None


def final_answer(text: str) -> str | None:
    """The answer that a response gives: the last box; without one the last `<answer>` tags; else what follows `answer is`."""
    if any(command in text for command in BOXES):
        return last_boxed(text)
    tagged = last_tagged(text)
    return tagged if tagged is not None else after_phrase(text)
