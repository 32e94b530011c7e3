"""Procedural arithmetic: problems such as `47+8=`, graded by the work they cost on paper."""

from __future__ import annotations

import hashlib
import random
from typing import Any, Literal, NamedTuple

from grpo_rl.errors import ConfigError

Row = dict[str, Any]

VALIDATION_SHARE = 5
"""One problem in so many belongs to the validation split."""
SMALLEST_RANGE = 9
"""Fewer problems than one-digit operands give could leave a split empty."""
LARGEST_OPERAND = 9_999_999
"""Products of larger ones would not be exact in double precision, which the parts of a reward have."""
TRIES_FOR_A_NEW_PROBLEM = 64
"""Draws before a validation row may repeat an earlier problem; small splits run out of new ones."""


class Problem(NamedTuple):
    """Two operands and `+`, `-` or `*`."""

    left: int
    operation: str
    right: int

    @property
    def text(self) -> str:
        return f"{self.left}{self.operation}{self.right}="

    @property
    def answer(self) -> int:
        if self.operation == "+":
            return self.left + self.right
        if self.operation == "-":
            return self.left - self.right
        return self.left * self.right


def arithmetic(
    *,
    num_rows: int = 8192,
    min_operand: int = 10,
    max_operand: int = 99,
    operations: str = "+",
    split: Literal["train", "val"] = "train",
    seed: int = 0,
) -> list[Row]:
    """Rows in verl's format, each with one problem; the two splits share no problem.

    Operands are uniform from `min_operand` to `max_operand`; differences are never negative. Row i is drawn from
    (seed, i), so a longer data set begins with the shorter one. Validation rows do not repeat a problem
    as long as new ones turn up. Raises ConfigError for options out of range.
    """
    _check(num_rows, (min_operand, max_operand), operations, split)
    seen: set[Problem] = set()
    rows = []
    for index in range(num_rows):
        problem = _draw_new(random.Random(f"{seed}:{index}"), (min_operand, max_operand), operations, split, seen)
        if split == "val":
            seen.add(problem)
        rows.append(to_row(problem, split, index))
    return rows


def to_row(problem: Problem, split: str, index: int) -> Row:
    """The problem in verl's row format, its level in `extra_info`."""
    return {
        "data_source": "arithmetic",
        "prompt": [{"role": "user", "content": problem.text}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(problem.answer)},
        "extra_info": {"split": split, "index": index, "level": level(problem)},
    }


def level(problem: Problem) -> int:
    """Steps of the written method: columns plus carries (or borrows); for `*` the products of digits.

    3+4 is 1, 7+8 is 2, 47+8 is 3, 47+58 is 4; 12*34 is 4.
    """
    left, operation, right = problem
    if operation == "*":
        return len(str(left)) * len(str(right))
    columns = max(len(str(left)), len(str(right)))
    sign = 1 if operation == "+" else -1
    carries = carry = 0
    for _ in range(columns):
        total = left % 10 + sign * (right % 10 + carry)
        carry = int(not 0 <= total <= 9)
        carries += carry
        left, right = left // 10, right // 10
    return columns + carries


def split_of(problem: Problem) -> Literal["train", "val"]:
    """The split that the problem belongs to, by its hash; 8+47 goes with 47+8."""
    left, operation, right = problem
    if operation in "+*":
        left, right = max(left, right), min(left, right)
    digest = hashlib.sha256(f"{left}{operation}{right}".encode()).digest()
    return "val" if int.from_bytes(digest[:8], "big") % VALIDATION_SHARE == 0 else "train"


def _draw_new(rng: random.Random, operands: tuple[int, int], operations: str, split: str, seen: set[Problem]) -> Problem:
    """A problem of the split, unseen where `TRIES_FOR_A_NEW_PROBLEM` draws of the split find one."""
    tries = 0
    while True:
        problem = _draw(rng, operands, operations)
        if split_of(problem) == split:
            tries += 1
            if problem not in seen or tries >= TRIES_FOR_A_NEW_PROBLEM:
                return problem


def _draw(rng: random.Random, operands: tuple[int, int], operations: str) -> Problem:
    operation = rng.choice(operations)
    left, right = rng.randint(*operands), rng.randint(*operands)
    if operation == "-" and left < right:
        left, right = right, left
    return Problem(left, operation, right)


def _check(num_rows: int, operands: tuple[int, int], operations: str, split: str) -> None:
    low, high = operands
    problems = []
    if num_rows < 1:
        problems.append(f"task arithmetic: num_rows={num_rows} must be at least 1")
    if not 0 <= low <= high - SMALLEST_RANGE or high > LARGEST_OPERAND:
        problems.append(
            f"task arithmetic: min_operand={low} and max_operand={high} must be between 0 and {LARGEST_OPERAND}, "
            f"and at least {SMALLEST_RANGE} apart"
        )
    if not operations or set(operations) - set("+-*"):
        problems.append(f"task arithmetic: operations={operations!r} must be made of +, - and *")
    if split not in ("train", "val"):
        problems.append(f"task arithmetic: split={split!r} must be train or val")
    if problems:
        raise ConfigError(problems)
