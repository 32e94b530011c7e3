"""Which groups an asynchronous training takes: the bound on staleness holds, whatever ends first, and nothing waits for ever."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from grpo_rl.trainer.overlap import choose


def test_a_batch_takes_first_what_would_be_too_old_in_the_next_one():
    # Batches of 2; three groups have to be trained at version 5 or 6, so at least one of them now.
    waiting = [6, 6, 6, 7, 7]
    assert choose([7, 7], waiting, 5, 2) is None, "one of them waits for a group of deadline 6"
    assert choose([7, 7, 6], waiting, 5, 2) == [0, 2]
    assert choose([7, 6, 6, 7], waiting, 5, 2) == [0, 1], "the others are taken as they ended"


@pytest.mark.parametrize("max_staleness", [0, 1, 2, 5])
@pytest.mark.parametrize("seed", range(5))
def test_no_order_of_completion_breaks_the_bound_and_every_group_is_trained_once(max_staleness, seed):
    """Groups are asked for within the bound and end in a random order; the trainer takes batches as soon as it may."""
    rng, size, steps = random.Random(seed), (1, 2, 3, 8, 5)[seed], 40
    asked: list[int] = []
    waiting: list[int] = []
    ended: list[int] = []
    trained: Counter[int] = Counter()
    ages: list[int] = []
    for version in range(steps):
        while len(waiting) + size <= (max_staleness + 1) * size:
            waiting += range(len(asked), len(asked) + size)
            asked += [version] * size
        deadlines = [asked[group] + max_staleness for group in waiting]
        running = [group for group in waiting if group not in ended]
        # A few more end than are needed, and long ones, whose number is odd, hardly ever before they must.
        while (places := choose([asked[group] + max_staleness for group in ended], deadlines, version, size)) is None or (
            running and rng.random() < 0.5
        ):
            short = [group for group in running if group % 2 == 0]
            group = rng.choice(short if short and rng.random() < 0.95 else running)
            running.remove(group)
            ended.append(group)
        assert len(places) == size and places == sorted(places)
        batch = [ended[place] for place in places]
        ended = [group for group in ended if group not in batch]
        waiting = [group for group in waiting if group not in batch]
        trained.update(batch)
        ages += [version - asked[group] for group in batch]
    assert max(ages) <= max_staleness and min(ages) >= 0
    assert set(trained.values()) == {1} and len(trained) == steps * size
    assert sorted(waiting) == sorted(set(range(len(asked))) - set(trained)), "nothing is lost"
