"""Rewards of a response's form, to be added to one of its content: tags, length, repetition, language."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import Any

from grpo_rl.config.schema.kinds import Count, CountOrZero, Factor

OPEN_THINK, CLOSE_THINK, OPEN_ANSWER, CLOSE_ANSWER = TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def think_answer(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None) -> float:
    """1 when the response is one thought and then one answer, each in its tags, with only space around them; else 0.

    Every tag must be there exactly once; thought and answer have a letter, a digit or a mathematical sign each. Takes time linear in the length.
    """
    text = solution_str.strip()
    if any(text.count(tag) != 1 for tag in TAGS) or not (text.startswith(OPEN_THINK) and text.endswith(CLOSE_ANSWER)):
        return 0.0
    thought_end, answer_start = text.index(CLOSE_THINK), text.index(OPEN_ANSWER)
    if answer_start < thought_end:
        return 0.0
    thought, between = text[len(OPEN_THINK) : thought_end], text[thought_end + len(CLOSE_THINK) : answer_start]
    answer = text[answer_start + len(OPEN_ANSWER) : -len(CLOSE_ANSWER)]
    return float(not between.strip() and _says_something(thought) and _says_something(answer))


def _says_something(text: str) -> bool:
    return any(character.isalnum() or unicodedata.category(character) == "Sm" for character in text)


def tags(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    names: Sequence[str] = ("think", "answer"),
) -> dict[str, float]:
    """The share of the opening and closing tags of `names` that are there exactly once; 0 where these are out of order.

    `once` is that share whatever the order, `ordered` 1 where those that are there once stand in order. A softer
    `think_answer`, for models that have not learnt the form yet. Takes time linear in the length. Raises ValueError
    without names.
    """
    wanted = [tag for name in names for tag in (f"<{name}>", f"</{name}>")]
    if not wanted:
        raise ValueError("names is empty; give at least one tag, e.g. [think, answer]")
    places = [solution_str.find(tag) for tag in wanted if solution_str.count(tag) == 1]
    once = len(places) / len(wanted)
    ordered = float(bool(places) and places == sorted(places))
    return {"score": once * ordered, "once": once, "ordered": ordered}


MAX_WORDS = 100_000
"""The last words of a response that are looked at, or characters where they are counted."""

COMMAND = re.compile(r"\\[a-zA-Z]+|<[^<>]{1,20}>")
"""LaTeX commands and tags are written in Latin letters in every language."""
SCRIPTS = {
    "latin": "A-Za-z\u00aa\u00ba\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f\u1e00-\u1eff",
    "han": "\u3007\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U000323af",
    "japanese": "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uff66-\uff9d",
    "hangul": "\u1100-\u11ff\u3130-\u318f\uac00-\ud7a3",
    "cyrillic": "\u0400-\u052f",
    "greek": "\u0370-\u03ff\u1f00-\u1fff",
    "arabic": "\u0620-\u06ff\u0750-\u077f\ufb50-\ufdff\ufe70-\ufeff",
    "hebrew": "\u05d0-\u05ea",
    "devanagari": "\u0900-\u097f",
    "thai": "\u0e00-\u0e7f",
}
UNITS = ("characters", "words")


def length(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    minimum: CountOrZero = 0,
    maximum: CountOrZero = 4_000,
    target: CountOrZero | None = None,
    slack: CountOrZero = 1_000,
    unit: str = "characters",
) -> dict[str, float]:
    """0 for a length from `minimum` to `maximum` (or of `target`, instead of both), falling to -1 at `slack` more or less, and -1 beyond.

    In `unit`, `characters` or `words` between white space; lengths in tokens are what `reward.overlong_buffer`
    shapes. The form is DAPO's soft punishment (arXiv 2503.14476, equation 13), on both sides; a `target` is as in
    L1 (arXiv 2503.04697). `length` is the length. Raises ValueError for an unknown unit, a `slack` below 1, and limits
    that contradict each other.
    """
    if unit not in UNITS:
        raise ValueError(f"unit is {unit!r}; it is one of {', '.join(UNITS)}")
    if slack < 1:
        raise ValueError(f"slack is {slack}; it must be at least 1")
    low, high = (minimum, maximum) if target is None else (target, target)
    if not 0 <= low <= high:
        raise ValueError(f"the limits are {low} and {high}; 0 <= minimum <= maximum must hold")
    size = len(solution_str) if unit == "characters" else len(solution_str.split())
    beyond = max(low - size, size - high, 0)
    return {"score": -min(1.0, beyond / slack) if beyond else 0.0, "length": float(size)}


def repetition(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    ngram: Count = 3,
    max_penalty: Factor = -1.0,
    unit: str = "words",
) -> dict[str, float]:
    """`max_penalty` times the share of n-grams that repeat an earlier one: `1 - different n-grams / all n-grams`.

    0 for a response with fewer words than `ngram`. `unit` is `words` between white space, or `characters`, for languages
    without. Only the last 100,000 are looked at. The penalty of arXiv 2502.03373, in the smooth form of
    Hugging Face's open-r1. `repeated` is the share. Raises ValueError for an `ngram` below 1 and a positive `max_penalty`.
    """
    if ngram < 1 or max_penalty > 0 or unit not in UNITS:
        raise ValueError(
            f"ngram={ngram}, max_penalty={max_penalty}, unit={unit!r}: ngram is at least 1, max_penalty at most 0, "
            f"and unit one of {', '.join(UNITS)}"
        )
    words = solution_str.split()[-MAX_WORDS:] if unit == "words" else solution_str[-MAX_WORDS:]
    total = len(words) - ngram + 1
    if total < 1:
        return {"score": 0.0, "repeated": 0.0}
    different = len(set(zip(*(words[start:] for start in range(ngram)), strict=False)))
    repeated = 1 - different / total
    return {"score": max_penalty * repeated if repeated else 0.0, "repeated": repeated}


def language_consistency(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    script: str = "latin",
) -> dict[str, float]:
    """The share of letters that belong to the wanted `script`; 0 for a response without letters.

    DeepSeek-R1's language consistency (arXiv 2501.12948, section 2.3.2) is the share of words in the target language; letters
    need no dictionary, and count the same for languages without spaces. LaTeX commands and tags do not count, nor what stands
    before the last 100,000 characters. `letters` is how many there are. Raises ValueError for an unknown script.
    """
    if script not in SCRIPTS:
        raise ValueError(f"script is {script!r}; it is one of {', '.join(SCRIPTS)}")
    text = COMMAND.sub("", solution_str[-MAX_WORDS:])
    letters = sum(map(str.isalpha, text))
    wanted = sum(map(str.isalpha, "".join(re.findall(f"[{SCRIPTS[script]}]+", text))))
    return {"score": wanted / letters if letters else 0.0, "letters": float(letters)}
