from __future__ import annotations

import re
import string
import unicodedata
from typing import Any

from grpo_rl.config.schema.kinds import Count
from grpo_rl.rewards.rules.answers import (
    CLOSE_ANSWER,
    CLOSE_THINK,
    OPEN_ANSWER,
    OPEN_THINK,
    ExtraInfo,
    after_thought,
    final_answer,
    golds_of,
    verdict,
    with_prompt_tail,
)

MAX_ANSWER = 10_000
"""Characters: normalising a longer answer would cost too much."""
ARTICLES = re.compile(r"\b(?:a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


def exact_match(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: ExtraInfo = None,
    ignore_case: bool = True,
    ignore_punctuation: bool = False,
    ignore_articles: bool = False,
) -> dict[str, float]:
    """`score` 1 when the answer is the ground truth (one of them, if it is a list), else 0.

    The answer is the last box, else the last `<answer>` tags, else what follows `answer is`, else the whole response, all
    outside `<think>`. White space counts as one space, none at the ends. `ignore_case`, `ignore_punctuation` and
    `ignore_articles` (a, an, the) normalise further; all three are SQuAD's exact match, arXiv 1606.05250.
    """
    text = after_thought(solution_str, extra_info)
    given_answer = final_answer(text)
    answer = text if given_answer is None else given_answer
    golds = golds_of(ground_truth)

    def normal(text: str) -> str:
        if ignore_case:
            text = text.casefold()
        if ignore_punctuation:
            text = text.translate(PUNCTUATION)
        if ignore_articles:
            text = ARTICLES.sub(" ", text)
        return " ".join(text.split())

    right = len(answer) <= MAX_ANSWER and normal(answer) in set(map(normal, golds))
    return verdict(right)


LETTERS = "ABCDEFGHIJ"
MAX_CHOICE = 1_000
WRAPPING = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\b|[\s$*{}\"'`\\]")
ALONE = re.compile(r"[(\[]?([A-Z])[)\]]?[.:,]?")
HEAD = re.compile(rf"[\s$*]*(?:\(([{LETTERS}])\)|\[([{LETTERS}])\]|([{LETTERS}])[).:])")
"""`B) four` and `(B) four`, but not the `A` of `A dog` or the `I` of `I think`."""


def multiple_choice(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: ExtraInfo = None,
) -> dict[str, float]:
    """`score` 1 when the chosen letter is the ground truth's, else 0. `answer` is the letter's place, 0 for the first.

    The choice is looked for in the last box, in the last `<answer>` tags, then after the last `answer is`: as `B`, `(B)`, `B.`,
    `B) some text` or, if `extra_info` has the list `choices`, as the text of one; a response that is a letter alone counts
    too. Nothing inside `<think>` counts.
    The ground truth is a letter, or the text of one of the `choices`; raises ValueError else.
    """
    choices = [str(choice) for choice in (extra_info or {}).get("choices") or []]
    gold = _letter(golds_of(ground_truth)[0], choices)
    if gold is None:
        raise ValueError(
            f"the ground truth {str(ground_truth)[:100]!r} is none of the letters {LETTERS} and none of the choices"
        )
    text = after_thought(solution_str, extra_info)
    answer = final_answer(text)
    if answer is None and len(text) <= MAX_CHOICE and ALONE.fullmatch(text.strip()):
        answer = text
    chosen = None if answer is None else _letter(answer, choices)
    return verdict(0.0) if chosen is None else verdict(chosen == gold, answer=float(LETTERS.index(chosen)))


def _letter(answer: str, choices: list[str]) -> str | None:
    if len(answer) > MAX_CHOICE:
        return None
    plain = answer.strip()
    for letter, choice in zip(LETTERS, choices, strict=False):
        if plain.casefold() == choice.strip().casefold():
            return letter
    named = ALONE.fullmatch(WRAPPING.sub("", plain)) or HEAD.match(plain)
    letter = named[named.lastindex or 0] if named else ""
    return letter if letter and letter in LETTERS else None


TAGS = (OPEN_THINK, CLOSE_THINK, OPEN_ANSWER, CLOSE_ANSWER)


def think_answer(data_source: str, solution_str: str, ground_truth: Any, extra_info: ExtraInfo = None) -> float:
    """1 when the response is one thought and then one answer, in their tags, with only space around, else 0.

    The chat template may have written the first tag already. Each tag must be there exactly once; thought and
    answer have a letter, a digit or a mathematical sign each.
    """
    text = with_prompt_tail(solution_str, extra_info).strip()
    if any(text.count(tag) != 1 for tag in TAGS):
        return 0.0
    parts = re.fullmatch(rf"{OPEN_THINK}(.*){CLOSE_THINK}\s*{OPEN_ANSWER}(.*){CLOSE_ANSWER}", text, re.DOTALL)
    return float(parts is not None and all(map(_says_something, parts.groups())))


def _says_something(text: str) -> bool:
    return any(character.isalnum() or unicodedata.category(character) == "Sm" for character in text)


def repetition(data_source: str, solution_str: str, ground_truth: Any, extra_info: ExtraInfo = None, n: Count = 4) -> float:
    """The share of different ones among the response's runs of n words: 1 without a repetition, near 0 for a loop.

    1 - seq-rep-n of Welleck et al. (arXiv 1908.04319, section 6.1); a response of fewer than n words has 1. Raises ValueError for n < 1.
    """
    if n < 1:
        raise ValueError(f"n={n}: a run has at least one word")
    words = solution_str.split()
    runs = list(zip(*(words[start:] for start in range(n)), strict=False))
    return len(set(runs)) / len(runs) if runs else 1.0
