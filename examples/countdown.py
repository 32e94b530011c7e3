"""Procedural countdown: reach a target from given numbers with + - * /; every problem has a solution."""

from __future__ import annotations

import random
from fractions import Fraction
from typing import Literal, NamedTuple

from grpo_rl.config.schema.kinds import AnySeed, Count, Operand
from grpo_rl.config.schema.kinds import Fraction as Share
from grpo_rl.data.tasks.made_rows import LazyRows, Row, refuse, row_of, split_of_text
from grpo_rl.errors import ConfigError

Template = Literal["tags", "short"]
Number = int | Fraction

TRIES = 10_000
"""Problems that are drawn for one row before the options are reported to leave none."""
FEWEST, MOST = 2, 6
PROMPTS = {
    "tags": (
        "Using the numbers {numbers}, create an equation that equals {target}. You can use basic arithmetic operations "
        "(+, -, *, /) and each number exactly once. Show your work in <think> </think> tags, and return the final "
        "expression in <answer> </answer> tags, for example <answer>(1 + 2) / 3</answer>."
    ),
    "short": "{numbers} -> {target}",
}
"""Wording of the prompt: `tags` for a model that was trained on English, `short` (such as `3 25 7 -> 46`) for a small one."""


class Term(NamedTuple):
    """An expression with its exact value; `binds` is 1 for a sum or difference, 2 for a product or quotient, 3 for a number."""

    text: str
    value: Number
    binds: int


def countdown(
    *,
    num_rows: Count = 8192,
    num_numbers: str = "3,4",
    min_number: Operand = 1,
    max_number: Operand = 99,
    min_target: Operand = 10,
    max_target: Operand = 100,
    operations: str = "+-*/",
    template: Template = "tags",
    split: Literal["train", "val"] = "train",
    slips: Share = 0.0,
    seed: AnySeed = 0,
) -> LazyRows:
    """Rows in verl's format, each with numbers and a target that an expression of all of them, each once, reaches.

    The defaults are TinyZero's: three or four numbers (`num_numbers`, equally likely) from 1 to 99, targets from 10 to 100. A
    problem is drawn as a solution, so it has one: `extra_info.demonstration`. `slips` is the share of demonstrations whose last
    sign is turned round, so that they miss the target; the ground truth is right in every row. The splits share no set of
    numbers. Row i is drawn from (seed, i), so a longer data set begins with the shorter one. Raises ConfigError for options out
    of range, and where they leave no problem.
    """
    counts = [int(part) if part.isdigit() else 0 for part in num_numbers.split(",")]
    refuse(
        "countdown",
        (
            all(FEWEST <= count <= MOST for count in counts),
            f"num_numbers={num_numbers} must be from {FEWEST} to {MOST}, or several such like 3,4",
        ),
        (
            0 <= min_number <= max_number,
            f"min_number={min_number} and max_number={max_number} must be 0 <= min_number <= max_number",
        ),
        (min_target <= max_target, f"min_target={min_target} must not be above max_target={max_target}"),
        (
            operations != "" and not set(operations) - set("+-*/") and len(set(operations)) == len(operations),
            f"operations={operations} must be some of + - * /, each once, like +-*",
        ),
    )

    def make(index: int) -> Row:
        rng = random.Random(f"countdown:{seed}:{index}")
        for _ in range(TRIES):
            numbers = tuple(rng.randint(min_number, max_number) for _ in range(rng.choice(counts)))
            if split_of(numbers) != split:
                continue
            solution = _solution(rng, numbers, operations)
            if solution is not None and min_target <= solution.value <= max_target:
                shown = _slip(solution.text) if rng.random() < slips else solution.text
                return to_row(numbers, int(solution.value), shown, template, split, index)
        raise ConfigError(
            f"task countdown: {TRIES} problems were drawn for row {index}, and none has a target from {min_target} to "
            f"{max_target} in split={split}; widen the targets, or allow more numbers or operations"
        )

    # Options that leave no problem are found here, before anything starts.
    make(0)
    return LazyRows(num_rows, make)


def to_row(numbers: tuple[int, ...], target: int, shown: str, template: Template, split: str, index: int) -> Row:
    """The problem in verl's row format, with the solution `shown`. The ground truth is TinyZero's: target and numbers, no solution."""
    separator = " " if template == "short" else ", "
    content = PROMPTS[template].format(numbers=separator.join(map(str, numbers)), target=target)
    thoughts = "" if template == "short" else "<think></think>\n"
    demonstration = f"{thoughts}<answer>{shown}</answer>"
    extra_info = {"split": split, "index": index, "demonstration": demonstration}
    return row_of("countdown", content, {"target": target, "numbers": list(numbers)}, extra_info)


def split_of(numbers: tuple[int, ...]) -> Literal["train", "val"]:
    """The split that these numbers belong to, in whatever order, by their hash."""
    return split_of_text(" ".join(map(str, sorted(numbers))))


def _solution(rng: random.Random, numbers: tuple[int, ...], operations: str) -> Term | None:
    """An expression of all the numbers with a whole value; None if the draw has none."""
    parts: list[Term] | None = [Term(str(number), number, 3) for number in numbers]
    while parts is not None and len(parts) > 1:
        parts = _join(rng, parts, operations)
    return parts[0] if parts is not None and isinstance(parts[0].value, int) else None


def _slip(text: str) -> str:
    """The expression with its last + a -, or its last - a +; one without either as it is."""
    place = max(text.rfind(" + "), text.rfind(" - "))
    return text if place < 0 else f"{text[:place]} {'-' if text[place + 1] == '+' else '+'} {text[place + 3 :]}"


def _join(rng: random.Random, parts: list[Term], operations: str) -> list[Term] | None:
    """The parts with two of them, drawn at random, joined by an operation; None if the draw has no result."""
    first, second = rng.sample(range(len(parts)), 2)
    left, right = parts[first], parts[second]
    operation = rng.choice(operations)
    value = _value(operation, left.value, right.value)
    if value is None:
        return None
    binds = 1 if operation in "+-" else 2
    # a - (b + c), a / (b * c): the right operand of these needs its parentheses even if it binds as strongly.
    tight = binds + 1 if operation in "-/" else binds
    text = f"{_inside(left, binds)} {operation} {_inside(right, tight)}"
    rest = [part for index, part in enumerate(parts) if index not in (first, second)]
    return [*rest, Term(text, value, binds)]


def _value(operation: str, left: Number, right: Number) -> Number | None:
    """The exact result, an int wherever it is whole; None for a division by zero."""
    if operation == "+":
        result: Number = left + right
    elif operation == "-":
        result = left - right
    elif operation == "*":
        result = left * right
    elif right == 0:
        return None
    else:
        result = Fraction(left) / Fraction(right)
    return result if isinstance(result, int) or result.denominator != 1 else int(result)


def _inside(part: Term, at_least: int) -> str:
    return part.text if part.binds >= at_least else f"({part.text})"


def main() -> None:
    for row in countdown(num_rows=3, template="short"):
        print(row["prompt"][0]["content"], "by", row["extra_info"]["demonstration"])


if __name__ == "__main__":
    main()
