"""`async`: sampling and training go on all the time, and weights are updated under unfinished responses.

The ways of AReaL (arXiv 2505.24298, section 5) and of PipelineRL (arXiv 2509.19128, section 4), with a hard bound: no trained
token is more than `trainer.asynchronous.max_staleness` versions older than the weights that it trains. Every prompt is trained
exactly once, however long its responses take; with max_staleness=0 the weights are those of `sync`, bit for bit.

Every group has a *deadline*: the last version of the weights at which it may be trained. A version trains one batch. So, of the
groups with a deadline up to d, this batch must hold all that the later batches up to d cannot; the trainer waits for them, however
long they are. The other places go to the groups that ended first. No group is trained too late if it was asked for within the
bound (`room`): the deadlines can be met when they are given, and every batch keeps that so (earliest deadline first is optimal
for one machine, Liu and Layland, JACM 20, 1973, section 7).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from grpo_rl.registry import samples_ahead

if TYPE_CHECKING:
    from grpo_rl.trainer.in_flight import Group
    from grpo_rl.trainer.session import Session


@samples_ahead()
def train(s: Session) -> None:
    batch_size, settings = s.config.data.train_batch_size, s.config.trainer.asynchronous
    bound, has_sent = settings.max_staleness, False

    def in_time(ready: Sequence[Group], requested: Sequence[Group], size: int) -> list[Group] | None:
        deadlines = [group.asked_at + bound for group in ready]
        places = choose(deadlines, (group.asked_at + bound for group in requested), s.version, size)
        return None if places is None else [ready[place] for place in places]

    for step in s.steps():
        if not has_sent or s.version - s.engine_version >= settings.sync_every:
            s.sync_weights()
            has_sent = True
        # While the engines have version v, at most (v + bound + 1) batches are ever asked for.
        room = max(0, bound + 1 - (s.version - s.engine_version)) * batch_size
        s.submit(room, in_order=bound == 0)
        rollouts = s.completed(in_time if bound else None)
        trained = s.select(s.score(rollouts))
        step.log(s.train_beside_sampling(trained))


def choose(ready: Sequence[int], waiting: Iterable[int], version: int, batch_size: int) -> list[int] | None:
    """Return the places, ascending, in `ready` of the groups to train in the batch of `version`; None while it is too early.

    `ready` are deadlines, in the order in which groups became ready, `waiting` those of all groups that are not trained yet.
    """
    if len(ready) < batch_size:
        return None
    chosen: set[int] = set()
    num_until = 0
    for deadline, number in sorted(Counter(waiting).items()):
        num_until += number
        # If a deadline has passed, the next batch is the best that there is.
        batches_to_come = max(0, deadline - version)
        needed = min(batch_size, num_until - batches_to_come * batch_size)
        eligible = [place for place, latest in enumerate(ready) if latest <= deadline and place not in chosen]
        if len(chosen) + len(eligible) < needed:
            return None
        chosen.update(eligible[: max(0, needed - len(chosen))])
    rest = [place for place in range(len(ready)) if place not in chosen]
    return sorted([*chosen, *rest[: batch_size - len(chosen)]])
