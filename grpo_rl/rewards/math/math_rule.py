from __future__ import annotations

import functools
import itertools
import logging
import os
import re
import select
import signal
import sys
import zlib
from collections.abc import Callable
from typing import Any

from grpo_rl.rewards.math.compare import compare, number, operations
from grpo_rl.rewards.math.math_tokens import MAX_TEXT, spelling, tokens
from grpo_rl.rewards.rules.answers import (
    ExtraInfo,
    after_thought,
    final_answer,
    golds_of,
    last_boxed,
    verdict,
    with_prompt_tail,
)

LARGEST = 1e15
"""Integers up to here are exact as floats."""

LONGEST_QUESTION = 200
EXPRESSION = re.compile(
    r"(?:[0-9+\-*/^()., \t\n{}\u00d7\u00f7\u00b7\u2212]|\\(?:times|cdot|div|d?frac|left|right)(?![a-zA-Z]))+"
)


def math(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: ExtraInfo = None,
    boxed_only: bool = False,
    algebra: bool = True,
    skip_thought: bool = True,
    evaluated: bool | None = None,
) -> dict[str, float]:
    """`score` 1 when the final answer is equal to the ground truth, 0 otherwise.

    The answer is what the last `\\boxed{...}` holds; if there is no box, unless `boxed_only`, what the last
    `<answer>` tags hold or what follows the last `answer is`. What stands inside `<think>` is no answer,
    unless `skip_thought` is off. Most are settled as text, number, fraction, tuple, set, matrix or equation;
    the rest by math-verify, unless `algebra` is off. `refused` is 1 if an answer was too large or too strange
    for that, and worth 0. An answer with more operations than the ground truth, `17*23` for 391, is worth 0
    with `evaluated`; without a value for it, if the question in `extra_info` is such an expression. `answer`,
    for majority votes, is the number if the answer is one, else a number made of its text. A ground truth
    that is a list is several, each of them right. Raises nothing for whatever a response holds, and
    ValueError for a ground truth that is missing.
    """
    golds = golds_of(ground_truth)
    text = after_thought(solution_str, extra_info) if skip_thought else with_prompt_tail(solution_str, extra_info)
    answer = last_boxed(text) if boxed_only else final_answer(text)
    if answer is None:
        return verdict(0.0, refused=0.0)
    question = (extra_info or {}).get("question") if evaluated is None else None
    verdicts = []
    for gold in golds:
        right, is_refused = _graded(gold, answer.strip(), algebra)
        if right and (evaluated or (isinstance(question, str) and _asks_for_value(question, gold))):
            right = operations(answer) <= operations(gold)
        verdicts.append((right, is_refused))
    is_right = any(right for right, _ in verdicts)
    refused = float(not is_right and any(is_refused for _, is_refused in verdicts))
    return verdict(is_right, refused=refused, answer=_vote(answer))


def _graded(gold: str, answer: str, algebra: bool) -> tuple[bool, bool]:
    """Whether the answer is right, and whether it was refused."""
    settled = compare(gold, answer)
    if settled is not None:
        return settled, False
    if not may_reach_algebra(answer):
        return False, True
    # A ground truth that the gate refuses is no fault of the answer.
    return algebra and may_reach_algebra(gold) and equivalent(gold, answer), False


def _asks_for_value(question: str, gold: str) -> bool:
    """Whether the question has an expression whose value is the ground truth: `What is 17*23?`."""
    expressions = [text.strip(" \t\n.,=") for text in EXPRESSION.findall(question)] if len(question) <= LONGEST_QUESTION else []
    return any(operations(text) > operations(gold) and compare(gold, text) is True for text in expressions)


def _vote(answer: str) -> float:
    value = number(answer)
    if value is not None and abs(value) < LARGEST:
        return value
    text = spelling(tokens(answer)) if len(answer) <= MAX_TEXT else answer
    # No number has the vote of a text.
    return 2 * LARGEST + zlib.crc32(text.encode(errors="surrogatepass"))


MAX_LENGTH = 200
MAX_DIGITS = 80
MAX_NUMBER = 12
MAX_NESTING = 6
MAX_POWERS = 8
MAX_EXPONENT = 99
MAX_GROUP_EXPONENT = 4
"""Of brackets, which an algebra system multiplies out."""
MAX_FUNCTIONS = 4
MAX_SEPARATORS = 12
MAX_CELLS = 9
MAX_RELATIONS = 3

CHARACTERS = re.compile(r"[0-9A-Za-z+\-*/^=<>()\[\]{}|.,:;&\\%!$ \n]*")
COMMAND = re.compile(r"\\([A-Za-z]+|.)", re.DOTALL)
FUNCTIONS = frozenset(re.findall("[a-z]+", "sqrt sin cos tan cot sec csc ln log arcsin arccos arctan"))
SYMBOLS = """
frac dfrac tfrac pi left right cdot times div le leq ge geq lt gt ne neq infty cup cap text mathrm mbox in mathbb alpha beta
gamma theta lambda phi circ pm begin end
"""
ALLOWED = FUNCTIONS | frozenset(re.findall("[a-z]+", SYMBOLS)) | frozenset("{},!;:%$\\ ")
EXPONENT = re.compile(
    r"\^ *(?:\{ *(-? *[0-9]+|[a-z]|\\circ|-? *[0-9] */ *[0-9]|-?\\[dt]?frac *\{[0-9]\} *\{[0-9]\}) *\}|([0-9])|([a-z])|\\circ)"
)
ENVIRONMENT = re.compile(r"\\(?:begin|end) *\{[pbBvV]?matrix\}")
WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{5}")
RELATION = re.compile(r"[=<>]|\\(?:le|leq|ge|geq|lt|gt|ne|neq|in)\b")


def may_reach_algebra(text: str) -> bool:
    """Whether the algebra system's work is bounded. Takes time linear in the text."""
    if len(text) > MAX_LENGTH or not CHARACTERS.fullmatch(text):
        return False
    commands = COMMAND.findall(text)
    numbers = [len(digits) for digits in re.findall(r"[0-9]+", text)]
    depths = itertools.accumulate((character in "([{") - (character in ")]}") for character in text)
    return (
        all(command in ALLOWED for command in commands)
        and sum(numbers) <= MAX_DIGITS
        and max(numbers, default=0) <= MAX_NUMBER
        and not re.search(r"(?<!\\)!", text)  # a factorial
        and not ("**" in text or "//" in text or WORD.search(ENVIRONMENT.sub("", text)))  # no formula
        and sum(command in FUNCTIONS for command in commands) <= MAX_FUNCTIONS
        and text.count("&") + text.count("\\\\") < MAX_CELLS
        and commands.count("begin") <= 2
        and text.count(",") + text.count(";") <= MAX_SEPARATORS
        and len(RELATION.findall(text)) <= MAX_RELATIONS
        and max(depths, default=0) <= MAX_NESTING
        and _has_plain_powers(text)
    )


def _has_plain_powers(text: str) -> bool:
    carets = text.count("^")
    powers = list(EXPONENT.finditer(text))
    if carets > MAX_POWERS or carets != len(powers):
        return False
    for power in powers:
        exponent = (power.group(1) or power.group(2) or "").replace(" ", "").lstrip("-")
        of_group = text[: power.start()].rstrip()[-1:] in tuple(")]}|")
        is_tower = text[power.end() :].lstrip(" }")[:1] == "^"
        if is_tower or (exponent.isdigit() and int(exponent) > (MAX_GROUP_EXPONENT if of_group else MAX_EXPONENT)):
            return False
    return True


MOST_CALLS = 500_000
"""Python calls to read and compare two texts: a third of a second."""
MOST_CPU_S, MOST_WAIT_S = 0.45, 20.0
"""Of the processor, and of the clock, until a comparison that does not count its calls is killed."""
FIRST_TEXTS = (r"x^2+2\sqrt{y} \le -\frac{r}{8}", r"[2,\infty)\cup\{3\}", r"\sin(2x)\cdot|y|=e^{x}", r"x \in (a,b)")
"""Most of the grammar, of which the parser makes its tables."""


@functools.lru_cache(maxsize=512)
def equivalent(gold: str, answer: str) -> bool:
    """Whether math-verify finds the two equal. Both must have passed `may_reach_algebra`.

    What takes too much is equal to nothing: the number of called functions decides, which does not depend on
    the machine's load. Each pair is compared in a fork, so that no verdict depends on earlier ones and one
    that does not end is killed.
    """
    _load()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGVTALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_VIRTUAL, MOST_CPU_S)
            sys.settrace(_call_counter())
            os.write(writer, b"right" if _equal(gold, answer) else b"wrong")
        finally:
            os._exit(0)
    os.close(writer)
    try:
        if not select.select([reader], [], [], MOST_WAIT_S)[0]:
            os.kill(child, signal.SIGKILL)
        return os.read(reader, 5) == b"right"
    finally:
        os.close(reader)
        os.waitpid(child, 0)


@functools.cache
def _load() -> None:
    """Load before calls are counted what the first comparisons load."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns, once for a process, that its timeouts are off
    for gold, answer in (("x<1", "1>x"), ("2 \\le x \\le 3", "[2,3]"), ("x^2=4", "x=\\pm\\sqrt{4}")):
        _equal(gold, answer)
    for text in FIRST_TEXTS:
        _parsed(text)


class _TooMuch(BaseException):
    """No Exception, so that nothing on the way catches it."""


def _call_counter() -> Callable[[Any, str, Any], None]:
    num_calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls > MOST_CALLS:
            raise _TooMuch

    return count


def _equal(gold: str, answer: str) -> bool:
    from math_verify import verify
    from sympy.core import random
    from sympy.core.cache import clear_cache

    clear_cache()
    random.seed(0)
    random._assumptions_rng.seed(0)
    parsed = _parsed(gold), _parsed(answer)
    # Its own timeouts are off: they use signals, which work in main threads only.
    return all(parsed) and bool(verify(*parsed, timeout_seconds=None, raise_on_error=False))


def _parsed(text: str) -> list[Any]:
    from math_verify import LatexExtractionConfig, parse

    config = [LatexExtractionConfig(boxed_match_priority=0)]
    parsed = parse(rf"\boxed{{{text}}}", extraction_config=config, fallback_mode="no_fallback", parsing_timeout=None)
    return list(parsed)
