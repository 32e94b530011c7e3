"""Written sums column by column, with a rating of every step: data for a process reward model that needs no download."""

from __future__ import annotations

import random
from typing import Literal

from grpo_rl.config.schema.kinds import AnySeed, Count, Fraction
from grpo_rl.data.tasks.made_rows import LazyRows, Row, split_of_text
from grpo_rl.errors import ConfigError

MOST_DIGITS = 6


def rated_sums(
    *,
    num_rows: Count = 4096,
    digits: Count = 3,
    errors: Fraction = 0.6,
    split: Literal["train", "val"] = "train",
    seed: AnySeed = 0,
) -> LazyRows:
    """Rows of a sum, its `completions` (one column each, from the right, then the result) and their `labels`.

    Two numbers of `digits` digits; `errors` is the share of rows in which one column is wrong: its carry is forgotten, or it
    has one that was not there. The rows end with their first wrong step, as PRM800K's do. The splits share no sum. Row i is
    drawn from (seed, i). Raises ConfigError for options out of range.
    """
    if digits > MOST_DIGITS:
        raise ConfigError(f"task rated_sums: digits={digits} must be from 1 to {MOST_DIGITS}")

    def make(index: int) -> Row:
        rng = random.Random(f"rated_sums:{seed}:{index}")
        low, high = 10 ** (digits - 1), 10**digits - 1
        while True:
            left, right = rng.randint(low, high), rng.randint(low, high)
            if split_of_text("+".join(map(str, sorted((left, right))))) == split:
                break
        steps = written(left, right)
        bad = rng.randrange(digits) if rng.random() < errors else None
        if bad is not None:
            steps = [*steps[:bad], spoilt(steps[bad])]
        return {
            "prompt": [{"role": "user", "content": f"{left}+{right}="}],
            "completions": steps,
            "labels": [number != bad for number in range(len(steps))],
        }

    return LazyRows(num_rows, make)


def written(left: int, right: int) -> list[str]:
    """Return the steps of the written method: `47+85=` is `7+5=12`, `4+8+1=13`, `132`."""
    steps, carry, total = [], 0, left + right
    while left or right:
        column = left % 10 + right % 10 + carry
        steps.append(f"{left % 10}+{right % 10}{'+1' if carry else ''}={column}")
        left, right, carry = left // 10, right // 10, column // 10
    return [*steps, str(total)]


def spoilt(step: str) -> str:
    """Return a column with its carry forgotten, or with one that was not there; its own sum is right."""
    terms, _, result = step.rpartition("=")
    if terms.count("+") == 2:
        return f"{terms.removesuffix('+1')}={int(result) - 1}"
    return f"{terms}+1={int(result) + 1}"
