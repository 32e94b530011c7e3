"""A curriculum of one's own: prompts that are solved half of the time come first, for they teach most.

A group's advantages are largest at a pass rate of one half: the variance of a reward of 0 or 1 is p (1 - p).

    python -m grpo_rl.main recipe=arithmetic/grpo data.curriculum=examples/by_pass_rate.py:next_rows
"""

from grpo_rl.data.draw_order import Draw


def next_rows(draw: Draw) -> list[int]:
    """Return half of the batch from rows nearest to one half, and the others at random, so that every row is looked at again."""

    def distance(row: int) -> float:
        return abs(draw.pass_rates.get(row, 0.0) - 0.5)

    order = draw.rng.permutation(draw.num_rows).tolist()
    nearest = sorted(order, key=distance)[: draw.size // 2]
    others = [row for row in order if row not in nearest and draw.usable(row)]
    return [*nearest, *others[: draw.size - len(nearest)]]
