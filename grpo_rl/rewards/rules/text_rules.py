"""Rules for answers that are a short text, or the letter of a choice."""

from __future__ import annotations

import re
import string
import unicodedata
from typing import Any

from grpo_rl.rewards.rules.answers import TAIL, after_thought, final_answer

MAX_ANSWER = 10_000
"""Characters of an answer that may be right: normalising a longer one would cost too much."""
ARTICLES = re.compile(r"\b(?:a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)
SOURCES = ("answer", "response")


def exact_match(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    take: str = "answer",
    ignore_case: bool = True,
    ignore_punctuation: bool = False,
    ignore_articles: bool = False,
    compatible: bool = False,
) -> dict[str, float]:
    """`score` 1 when the answer is the ground truth (one of them, where it is a list), else 0.

    `take`: `answer` is the last box, else the last `<answer>` tags, else what follows `answer is`, else the whole response, all
    outside `<think>`; `response` is the whole response. White space counts as one space, none at the ends. `ignore_case`,
    `ignore_punctuation` and `ignore_articles` (a, an, the; all three are SQuAD's exact match, arXiv 1606.05250) normalise
    further; `compatible` takes characters that only look different, such as full-width digits, as the same (NFKC).
    Raises ValueError for another `take`.
    """
    if take not in SOURCES:
        raise ValueError(f"take is {take!r}; it is one of {', '.join(SOURCES)}")
    answer = solution_str
    if take == "answer":
        text = after_thought(solution_str)
        found = final_answer(text)
        answer = text if found is None else found
    golds = ground_truth if isinstance(ground_truth, list | tuple) else [ground_truth]

    def normal(text: str) -> str:
        if compatible:
            text = unicodedata.normalize("NFKC", text)
        if ignore_case:
            text = text.casefold()
        if ignore_punctuation:
            text = text.translate(PUNCTUATION)
        if ignore_articles:
            text = ARTICLES.sub(" ", text)
        return " ".join(text.split())

    right = len(answer) <= MAX_ANSWER and normal(answer) in {normal(str(gold)) for gold in golds}
    return {"score": float(right), "acc": float(right)}


LETTERS = "ABCDEFGHIJ"
MAX_CHOICE = 1_000
WRAPPING = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\b|[\s$*{}\"'`\\]")
MARKED = re.compile(r"[(\[]([A-Z])[)\]]")
ALONE = re.compile(r"[(\[]?([A-Z])[)\]]?[.:,]?")


def multiple_choice(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    letters: str = LETTERS,
    anywhere: bool = False,
) -> dict[str, float]:
    """`score` 1 when the chosen letter is the ground truth's, else 0. `answer` is the letter's place, 0 for the first.

    The choice is looked for in the last box, in the last `<answer>` tags, then after the last `answer is`: as `B`, `(B)`, `B.`,
    `B) some text` or, where `extra_info` has the list `choices`, as the text of one; a response that is a letter alone counts
    too. `anywhere` also takes the last letter in brackets of the last 1,000 characters. Nothing inside `<think>` counts.
    The ground truth is a letter, or the text of one of the `choices`; raises ValueError for anything else.
    """
    choices = [str(choice) for choice in (extra_info or {}).get("choices") or []]
    gold = _letter(str(ground_truth), letters, choices)
    if gold is None:
        raise ValueError(
            f"the ground truth {str(ground_truth)[:100]!r} is none of the letters {letters} and none of the choices"
        )
    text = after_thought(solution_str)
    answer = final_answer(text)
    if answer is None and len(text) <= MAX_CHOICE and ALONE.fullmatch(text.strip()):
        answer = text
    chosen = None if answer is None else _letter(answer, letters, choices)
    if chosen is None and answer is None and anywhere:
        marked = [letter for letter in MARKED.findall(text[-TAIL:]) if letter in letters]
        chosen = marked[-1] if marked else None
    if chosen is None:
        return {"score": 0.0, "acc": 0.0}
    score = float(chosen == gold)
    return {"score": score, "acc": score, "answer": float(letters.index(chosen))}


def _letter(answer: str, letters: str, choices: list[str]) -> str | None:
    """The letter that an answer names, by itself, before its text, or by its text."""
    if len(answer) > MAX_CHOICE:
        return None
    plain = answer.strip()
    for letter, choice in zip(letters, choices, strict=False):
        if plain.casefold() == choice.strip().casefold():
            return letter
    bare = WRAPPING.sub("", plain)
    if ALONE.fullmatch(bare):
        letter = next(character for character in bare if character.isalpha())
        return letter if letter in letters else None
    # `B) four` and `(B) four`, but not the `A` of `A dog` or the `I` of `I think`.
    head = re.match(r"[\s$*]*(?:\(([A-Z])\)|\[([A-Z])\]|([A-Z])[).:])", plain)
    named = next((group for group in head.groups() if group), None) if head else None
    return named if named is not None and named in letters else None
