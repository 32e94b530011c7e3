"""Rule-based reward of questions with a short text as answer: the same text, after a chosen normalisation."""

from __future__ import annotations

import re
import string
import unicodedata
from typing import Any

from grpo_rl.rewards.rules.answers import after_thought, final_answer

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
