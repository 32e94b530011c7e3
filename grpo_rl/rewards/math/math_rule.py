"""Rule-based reward of mathematics: the answer in the last box, equal to the ground truth as text, as value, or by algebra."""

from __future__ import annotations

import re
import zlib
from typing import Any

from grpo_rl.rewards.math.algebra import equivalent, refusal
from grpo_rl.rewards.math.compare import compare, number, operations
from grpo_rl.rewards.math.math_tokens import MAX_TEXT, spelling, tokens
from grpo_rl.rewards.rules.answers import after_thought, final_answer, last_boxed

LARGEST = 1e15
"""Integers up to here are exact as the floats that parts of a reward are."""

LONGEST_QUESTION = 200
EXPRESSION = re.compile(
    r"(?:[0-9+\-*/^()., \t\n{}\u00d7\u00f7\u00b7\u2212]|\\(?:times|cdot|div|d?frac|left|right)(?![a-zA-Z]))+"
)


def math(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    boxed_only: bool = False,
    algebra: bool = True,
    skip_thought: bool = True,
    evaluated: bool | None = None,
) -> dict[str, float]:
    """`score` 1 when the final answer is equal to the ground truth, 0 otherwise.

    The answer is what the last `\\boxed{...}` holds; where there is no box, unless `boxed_only`, what the last `<answer>` tags
    hold or what follows the last `answer is`. What stands inside `<think>` is no answer, unless `skip_thought` is off. Most are settled as text, number, fraction, tuple, set, matrix or equation; the
    rest by math-verify, unless `algebra` is off. `refused` is 1 where an answer was too large or too strange for that, and
    worth 0. An answer with more operations than the ground truth, `17*23` for 391, is worth 0 with `evaluated`; without a
    value for it, where the question in `extra_info` is such an expression. `answer`, for majority votes, is the number where the answer is one, else a number made of its text.
    A ground truth that is a list is several, each of them right. Raises nothing for whatever a response holds.
    """
    text = after_thought(solution_str) if skip_thought else solution_str
    answer = last_boxed(text) if boxed_only else final_answer(text)
    if answer is None:
        return {"score": 0.0, "acc": 0.0, "refused": 0.0}
    golds = ground_truth if isinstance(ground_truth, list | tuple) else [ground_truth]
    question = (extra_info or {}).get("question") if evaluated is None else None
    verdicts = []
    for gold in map(_bare, map(str, golds)):
        right, is_refused = _graded(gold, answer.strip(), algebra)
        if right and (evaluated or (isinstance(question, str) and _asks_for_value(question, gold))):
            right = operations(answer) <= operations(gold)
        verdicts.append((right, is_refused))
    score = float(any(right for right, _ in verdicts))
    refused = float(not score and any(is_refused for _, is_refused in verdicts))
    return {"score": score, "acc": score, "refused": refused, "answer": _vote(answer)}


def _bare(gold: str) -> str:
    """Return a ground truth without its box or solution, in either of which it may be given."""
    boxed = last_boxed(gold) if "\\boxed" in gold else None
    return gold.strip() if boxed is None else boxed.strip()


def _graded(gold: str, answer: str, algebra: bool) -> tuple[bool, bool]:
    """Return whether the answer is right, and whether it was refused."""
    settled = compare(gold, answer)
    if settled is not None:
        return settled, False
    if refusal(answer) is not None:
        return False, True
    # A ground truth that the gate refuses is no fault of the answer.
    return algebra and refusal(gold) is None and equivalent(gold, answer), False


def _asks_for_value(question: str, gold: str) -> bool:
    """Return whether a short question has an expression in it whose value is the ground truth, as in `What is 17*23?`."""
    found = EXPRESSION.findall(question) if len(question) <= LONGEST_QUESTION else []
    return any(operations(text) > operations(gold) and compare(gold, text) is True for text in map(_stripped, found))


def _stripped(text: str) -> str:
    return text.strip(" \t\n.,=")


def _vote(answer: str) -> float:
    value = number(answer)
    if value is not None and abs(value) < LARGEST:
        return value
    text = spelling(tokens(answer)) if len(answer) <= MAX_TEXT else answer
    # Beyond all numbers above, so that no number has the vote of a text.
    return 2 * LARGEST + zlib.crc32(text.encode(errors="surrogatepass"))
