"""The search for the answer in a response, in time linear in the text."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

ExtraInfo = dict[str, Any] | None
"""What a row has beside its ground truth, as a reward function gets it."""
BOXES = ("\\boxed", "\\fbox")
OPEN_ANSWER, CLOSE_ANSWER = "<answer>", "</answer>"
OPEN_THINK, CLOSE_THINK = "<think>", "</think>"
PHRASES = ("final answer is", "answer is", "answer:")
TAIL = 1_000
"""Characters in which an answer without a box or tags is looked for."""
FORMULA = r"\$\$((?:[^\\$]|\\.)*)\$\$|\$((?:[^\\$\n]|\\[^\n])+)\$|\\\(((?:[^\\]|\\[^)])*)\\\)|\\\[((?:[^\\]|\\[^]])*)\\\]"
"""`\\$` inside is a dollar sign. No place inside can be a formula's end."""
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def last_boxed(text: str, bare_end: str = " \t\r\n$") -> str | None:
    """Content of the last `\\boxed{...}` (or `\\fbox`), braces balanced; None if it never closes.

    `\\boxed 7` holds what follows up to one of the characters in `bare_end`.
    """
    start, command = max((text.rfind(command), command) for command in BOXES)
    if start < 0:
        return None
    begin = start + len(command)
    rest = text[begin:]
    body = rest.lstrip()
    if not body.startswith("{"):
        end = re.search(f"[{re.escape(bare_end)}]", body)
        bare = body[: end.start()].strip() if end else body.strip()
        return bare if body is not rest and bare else None
    depth = 0
    for match in BRACE.finditer(body):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0 and match.group() == "}":
            return body[1 : match.start()]
    return None


def last_tagged(text: str) -> str | None:
    end = text.rfind(CLOSE_ANSWER)
    start = text.rfind(OPEN_ANSWER, 0, max(0, end))
    return text[start + len(OPEN_ANSWER) : end] if 0 <= start < end else None


PROMPT_TAIL = "prompt_tail"
"""The beginning of the response in the prompt, `<think>` or a message that is gone on with."""


def with_prompt_tail(text: str, extra_info: Mapping[str, Any] | None) -> str:
    return str((extra_info or {}).get(PROMPT_TAIL, "")) + text


def after_thought(text: str, extra_info: Mapping[str, Any] | None = None) -> str:
    """Nothing if a thought never ended, all of a text without thoughts."""
    text = with_prompt_tail(text, extra_info)
    end = text.rfind(CLOSE_THINK)
    if end >= 0:
        return text[end + len(CLOSE_THINK) :]
    return "" if OPEN_THINK in text else text


def last_pair(text: str) -> str | None:
    """The last match of `<answer>(.*?)</answer>`."""
    text, tag, _ = text.rpartition(CLOSE_ANSWER)
    # Every opening tag is closed now: the search never goes through the text in vain.
    pairs = re.findall(f"{OPEN_ANSWER}(.*?){CLOSE_ANSWER}", text + tag, re.DOTALL)
    return pairs[-1] if pairs else None


def after_phrase(text: str) -> str | None:
    """What follows the last `answer is` or `answer:`, up to the end of the sentence.

    A formula is returned without its `$`, `$$`, `\\(` or `\\[`; one in the last three may have several lines.
    """
    tail = text[-TAIL:]
    small = tail.lower() if tail.isascii() else "".join(c.lower() if c.isascii() else c for c in tail)
    end = max(small.rfind(phrase) + len(phrase) if phrase in small else -1 for phrase in PHRASES)
    if end < 0:
        return None
    # The answer may stand on a line after the phrase: `Answer:`, an empty line, then `$$`, the number, and `$$`.
    rest = tail[end:].lstrip(" \t\r\n:*")
    marked = re.match(FORMULA, rest, re.DOTALL)
    inside = marked[marked.lastindex or 0] if marked else None
    if inside is not None and not (rest[1] != "$" and ". " in inside and inside[:1].isdigit()):
        return inside
    if rest.startswith(("$$", "\\(", "\\[")):
        return None
    # A single `$` that is never closed is a dollar sign; so are the two in `is $36. That is $5 more`.
    line = rest.split("\n", 1)[0].removeprefix("$")
    return line.split(". ", 1)[0].strip().strip("*").rstrip(". ") or None


def final_answer(text: str) -> str | None:
    """The last box; without one the last `<answer>` tags; else what follows `answer is`."""
    if any(command in text for command in BOXES):
        return last_boxed(text)
    tagged = last_tagged(text)
    return tagged if tagged is not None else after_phrase(text)


def verdict(score: float, **further: Any) -> dict[str, Any]:
    """The result of a rule whose score is also its accuracy."""
    return {"score": float(score), "acc": float(score), **further}


SOLUTION_MARK = "####"


def golds_of(ground_truth: Any) -> list[str]:
    """The texts each of which is right: several for a list, also one of texts that is JSON text.

    A solution is its last box, or what follows its last `####`. Raises ValueError for what is missing (null,
    NaN, no text) or an object: a rule that compared with it would pay for the word `None`.
    """
    if isinstance(ground_truth, list | tuple):
        golds = [text for gold in ground_truth for text in golds_of(gold)]
    elif isinstance(ground_truth, float) and math.isfinite(ground_truth):
        exact = format(Decimal(repr(ground_truth)), "f").removesuffix(".0")
        golds = list(dict.fromkeys([exact, repr(ground_truth)]))
    elif isinstance(ground_truth, int):
        golds = [str(ground_truth)]
    elif isinstance(ground_truth, str):
        golds = _golds_of_text(ground_truth)
    else:
        golds = []
    if not golds:
        raise ValueError(
            f"the ground truth is {ground_truth!r:.100}; expected a text, a number or a list of these (data.ground_truth_key names the column)"
        )
    return golds


def _golds_of_text(text: str) -> list[str]:
    bare = text.strip()
    if bare.startswith('["') and bare.endswith('"]'):
        try:
            listed = json.loads(bare)
        except ValueError:  # an interval of texts, or a list with LaTeX commands that JSON does not take
            return [bare]
        return golds_of(listed)
    boxed = last_boxed(bare) if any(command in bare for command in BOXES) else None
    answer = bare.rpartition(SOLUTION_MARK)[2] if boxed is None else boxed
    return [answer.strip()] if answer.strip() else []
