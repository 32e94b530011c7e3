"""Problems such as `437+8=`, and written sums with a rating of every step."""

from __future__ import annotations

import json
import operator
import random
import re
from collections.abc import Sequence
from typing import NamedTuple

from grpo_rl.config.schema.kinds import AnySeed, Count, Fraction
from grpo_rl.data.tasks.made_rows import LazyRows, Row, Split, refuse, row_of, split_of_text
from grpo_rl.errors import ConfigError

TRIES_FOR_A_NEW_PROBLEM = 64
"""Draws before a validation row may repeat an earlier problem."""
_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


class Problem(NamedTuple):
    left: int
    operation: str
    right: int

    @property
    def text(self) -> str:
        return f"{self.left}{self.operation}{self.right}="

    @property
    def answer(self) -> int:
        return _OPERATIONS[self.operation](self.left, self.right)


class Form(NamedTuple):
    """At most 7 digits, so that products are exact as floats."""

    left_digits: int
    operation: str
    right_digits: int


def arithmetic(
    *,
    num_rows: Count = 8192,
    forms: str = "3+1",
    carrying: Fraction = 0.0,
    forgotten_carries: Fraction = 0.0,
    calculator_calls: Fraction = 0.0,
    split: Split = "train",
    seed: AnySeed = 0,
) -> list[Row]:
    """Rows in verl's format, each with one problem; the two splits share no problem.

    `forms` are the kinds of problem, equally likely, separated by commas: digits of the left operand,
    operation, digits of the right one; `3+1` is 437+8, `2-2,1*1` is a difference or a product. Differences
    are never negative. `carrying` is the share of rows drawn from the problems with a carry (or a borrow)
    alone. `forgotten_carries` is the share of rows whose demonstration, an answer to imitate beside the
    ground truth, forgets to carry; if it is 0 there are none. `completion` is the same, and `label` whether
    it is right. `calculator_calls` is the share of rows whose demonstration calls the tool calculator and
    repeats its result; above 0 all rows have their demonstration as a conversation, `messages`. Row i is
    drawn from (seed, i), so a longer data set begins with the shorter one. Validation rows do not repeat a
    problem as long as new ones turn up. Raises ConfigError for options out of range.
    """
    parsed = [_parse_form(form) for form in forms.split(",")]
    if carrying > 0 and any(form.operation == "*" or (form.operation == "-" and form.left_digits == 1) for form in parsed):
        raise ConfigError(
            f"task arithmetic: carrying={carrying} is for sums, and for differences of two digits and more; not for forms={forms}"
        )
    seen: set[Problem] = set()
    rows = []
    for index in range(num_rows):
        rng = random.Random(f"{seed}:{index}")
        problem = _draw_new(rng, parsed, split, seen, must_carry=carrying > 0 and rng.random() < carrying)
        if split == "val":
            seen.add(problem)
        row = row_of("arithmetic", problem.text, str(problem.answer), {"split": split, "index": index})
        if forgotten_carries > 0:
            forgets = rng.random() < forgotten_carries
            demonstration = str(without_carries(problem) if forgets else problem.answer)
            row["extra_info"]["demonstration"] = demonstration
            row |= {"completion": demonstration, "label": demonstration == str(problem.answer)}
        if calculator_calls > 0:
            row["messages"] = _conversation(row, problem, calls=rng.random() < calculator_calls)
        rows.append(row)
    return rows


def _conversation(row: Row, problem: Problem, *, calls: bool) -> list[dict[str, str]]:
    """A call of the calculator has the form of Qwen's models."""
    if not calls:
        answer = row["extra_info"].get("demonstration", str(problem.answer))
        return [*row["prompt"], {"role": "assistant", "content": answer}]
    call = {"name": "calculator", "arguments": {"expression": problem.text.removesuffix("=")}}
    return [
        *row["prompt"],
        {"role": "assistant", "content": f"<tool_call>\n{json.dumps(call)}\n</tool_call>"},
        {"role": "tool", "content": str(problem.answer)},
        {"role": "assistant", "content": str(problem.answer)},
    ]


def without_carries(problem: Problem) -> int:
    """473+58 is 421, 47+68 is 105. A product is right."""
    first, operation, right = problem
    if operation == "*":
        return problem.answer
    sign = 1 if operation == "+" else -1
    answer, place = 0, 1
    while first >= 10 or right >= 10:
        answer += (first + sign * right) % 10 * place
        first, right, place = first // 10, right // 10, place * 10
    return answer + (first + sign * right) * place


def split_of(problem: Problem) -> Split:
    """8+47 goes with 47+8."""
    first, operation, right = problem
    if operation in "+*":
        first, right = max(first, right), min(first, right)
    return split_of_text(f"{first}{operation}{right}")


def _draw_new(rng: random.Random, forms: list[Form], split: str, seen: set[Problem], *, must_carry: bool) -> Problem:
    tries = 0
    while True:
        form = rng.choice(forms)
        left, right = (
            rng.randint(10 ** (digits - 1) if digits > 1 else 0, 10**digits - 1)
            for digits in (form.left_digits, form.right_digits)
        )
        if form.operation == "-" and left < right:
            left, right = right, left
        problem = Problem(left, form.operation, right)
        if split_of(problem) == split and not (must_carry and without_carries(problem) == problem.answer):
            tries += 1
            if problem not in seen or tries >= TRIES_FOR_A_NEW_PROBLEM:
                return problem


def _parse_form(text: str) -> Form:
    match = re.fullmatch(r"([1-7])([-+*])([1-7])", text)
    if match is None:
        raise ConfigError(
            f"task arithmetic: {text!r} in forms must be two numbers of digits from 1 to 7 around +, - or *, like 3+2 or 2*1"
        )
    return Form(int(match[1]), match[2], int(match[3]))


MOST_DIGITS = 6


def rated_sums(
    *,
    num_rows: Count = 4096,
    digits: Count = 3,
    errors: Fraction = 0.6,
    forgotten_carries: Fraction = 0.0,
    split: Split = "train",
    seed: AnySeed = 0,
) -> LazyRows:
    """Rows of a sum, its `completions` (one column each, from the right, then the result) and their `labels`.

    Two numbers of `digits` digits; `errors` is the share of rows in which the carry of one column is
    forgotten or was not there. The rows end with their first wrong step, as PRM800K's do. The ground truth
    has all right steps, a line each, and `extra_info.demonstration` a careless solution, which forgets each
    carry with the probability `forgotten_carries`. The splits share no sum. Row i is drawn from (seed, i).
    Raises ConfigError for options out of range.
    """
    refuse("rated_sums", (digits <= MOST_DIGITS, f"digits={digits} must be from 1 to {MOST_DIGITS}"))

    def make(index: int) -> Row:
        rng = random.Random(f"rated_sums:{seed}:{index}")
        low, high = 10 ** (digits - 1), 10**digits - 1
        while True:
            first, right = rng.randint(low, high), rng.randint(low, high)
            if split_of_text("+".join(map(str, sorted((first, right))))) == split:
                break
        steps = written_steps(first, right)
        bad = rng.randrange(digits) if rng.random() < errors else None
        if bad is not None:
            steps = [*steps[:bad], spoilt(steps[bad])]
        forgets = [rng.random() < forgotten_carries for _ in range(digits)]
        extra_info = {"index": index, "demonstration": "\n".join(written_steps(first, right, forgets))}
        row = row_of("rated_sums", f"{first}+{right}=", "\n".join(written_steps(first, right)), extra_info)
        return {**row, "completions": steps, "labels": [number != bad for number in range(len(steps))]}

    return LazyRows(num_rows, make)


def written_steps(left: int, right: int, forgets: Sequence[bool] = ()) -> list[str]:
    """Steps of the written method: `47+85=` is `7+5=12`, `4+8+1=13`, `132`.

    `forgets` says of each column whether its carry is forgotten: with [True] that is `4+8=12` and `122`.
    """
    steps, carry, total, place = [], 0, 0, 1
    while left or right:
        column = left % 10 + right % 10 + carry
        steps.append(f"{left % 10}+{right % 10}{'+1' if carry else ''}={column}")
        total += column % 10 * place
        left, right, carry, place = left // 10, right // 10, column // 10, place * 10
        if not (left or right):
            total += carry * place
        elif len(steps) <= len(forgets) and forgets[len(steps) - 1]:
            carry = 0
    return [*steps, str(total)]


def spoilt(step: str) -> str:
    """The carry forgotten, or one that was not there; the column's own sum is right."""
    terms, _, result = step.rpartition("=")
    if terms.count("+") == 2:
        return f"{terms.removesuffix('+1')}={int(result) - 1}"
    return f"{terms}+1={int(result) + 1}"
