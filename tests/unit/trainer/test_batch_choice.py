"""Which groups an asynchronous training takes: the bound on staleness holds, whatever ends first, and nothing waits for ever."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from grpo_rl.trainer.overlap import choose, is_enough, room, urgent


def test_a_batch_takes_first_what_would_be_too_old_in_the_next_one():
    # Batches of 2; three groups have to be trained at version 5 or 6, so at least one of them now.
    needed = urgent({6: 3, 7: 2}, version=5, batch_size=2)
    assert needed == {6: 1, 7: 1}
    # The groups of deadline 7 ended first: one of them waits for a group of deadline 6.
    assert not is_enough({7: 2}, needed, 2) and is_enough({7: 2, 6: 1}, needed, 2)
    assert choose([7, 7, 6], needed, 2) == [0, 2]
    assert choose([7, 6, 6, 7], needed, 2) == [0, 1], "the others are taken as they ended"


@pytest.mark.parametrize("max_staleness", [0, 1, 2, 5])
@pytest.mark.parametrize("seed", range(5))
def test_no_order_of_completion_breaks_the_bound_and_every_group_is_trained_once(max_staleness, seed):
    """Groups are asked for within the bound and end in a random order; the trainer takes batches as soon as it may."""
    rng, size, steps = random.Random(seed), rng_size(seed), 40
    asked: list[int] = []
    waiting: list[int] = []
    ended: list[int] = []
    trained: Counter[int] = Counter()
    ages: list[int] = []
    for version in range(steps):
        while len(waiting) + size <= room(max_staleness, size, lag=0):
            waiting += range(len(asked), len(asked) + size)
            asked += [version] * size
        deadlines = Counter(asked[group] + max_staleness for group in waiting)
        needed = urgent(deadlines, version, size)
        assert all(number <= size for number in needed.values())
        complete: Counter[int] = Counter(asked[group] + max_staleness for group in ended)
        running = [group for group in waiting if group not in ended]
        # A few more end than are needed, and long ones, whose number is odd, hardly ever before they must.
        while not is_enough(complete, needed, size) or (running and rng.random() < 0.5):
            short = [group for group in running if group % 2 == 0]
            group = rng.choice(short if short and rng.random() < 0.95 else running)
            running.remove(group)
            ended.append(group)
            complete[asked[group] + max_staleness] += 1
        places = choose([asked[group] + max_staleness for group in ended], needed, size)
        assert len(places) == size and places == sorted(places)
        batch = [ended[place] for place in places]
        ended = [group for group in ended if group not in batch]
        waiting = [group for group in waiting if group not in batch]
        trained.update(batch)
        ages += [version - asked[group] for group in batch]
    assert max(ages) <= max_staleness and min(ages) >= 0
    assert set(trained.values()) == {1} and len(trained) == steps * size
    assert sorted(waiting) == sorted(set(range(len(asked))) - set(trained)), "nothing is lost"


def rng_size(seed: int) -> int:
    return (1, 2, 3, 8, 5)[seed]
