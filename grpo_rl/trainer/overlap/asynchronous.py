"""The asynchronous schedule: responses are sampled all the time, and a step trains on a batch of groups that are complete.

Every group has a *deadline*: the version of the weights at which it must be trained at the latest, so that none of its
tokens is more than `max_staleness` versions old. A version trains one batch. So, of the groups with a deadline up to d, all
but those that the batches of the versions up to d can hold have to be in this batch already; the trainer waits for them,
however long they are. The other places go to the groups that ended first. No group is trained too late this way, as long
as it was asked for within the bound (`room`): the deadlines can be met when they are given, and every batch keeps that so
(earliest deadline first is optimal for one machine, Liu and Layland, JACM 20, 1973, section 7).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from grpo_rl.trainer.overlap.overlapping import Group, OverlappingSchedule
from grpo_rl.trainer.schedule import Context
from grpo_rl.types import Metrics


def room(max_staleness: int, batch_size: int, lag: int) -> int:
    """Return how many groups may be asked for and not trained, while the engines' weights are `lag` versions old.

    While the engines have version v, at most (v + max_staleness + 1) batches are ever asked for.
    """
    return max(0, max_staleness + 1 - lag) * batch_size


def urgent(waiting: Mapping[int, int], version: int, batch_size: int) -> dict[int, int]:
    """Return, for each deadline, how many groups with it or an earlier one have to be in the batch of `version`.

    `waiting` has the number of groups that are not trained yet, by deadline.
    """
    found, so_far = {}, 0
    for deadline in sorted(waiting):
        so_far += waiting[deadline]
        # A deadline that has passed already cannot be kept any more: the next batch is the best that there is.
        batches_to_come = max(0, deadline - version)
        found[deadline] = min(batch_size, max(0, so_far - batches_to_come * batch_size))
    return found


def is_enough(complete: Mapping[int, int], needed: Mapping[int, int], batch_size: int) -> bool:
    """Return whether a batch can be made of the groups that are complete, counted by deadline."""
    so_far = 0
    for deadline in sorted({*complete, *needed}):
        so_far += complete.get(deadline, 0)
        if so_far < needed.get(deadline, 0):
            return False
    return so_far >= batch_size


def choose(deadlines: Sequence[int], needed: Mapping[int, int], batch_size: int) -> list[int]:
    """Return the places, ascending, of the groups to train, of those that are complete.

    `deadlines` are theirs, in the order in which they were completed.
    """
    chosen: set[int] = set()
    for deadline in sorted(needed):
        eligible = [place for place, own in enumerate(deadlines) if own <= deadline]
        missing = needed[deadline] - sum(place in chosen for place in eligible)
        chosen.update([place for place in eligible if place not in chosen][: max(0, missing)])
    rest = [place for place in range(len(deadlines)) if place not in chosen]
    return sorted([*chosen, *rest[: batch_size - len(chosen)]])


class AsyncSchedule(OverlappingSchedule):
    """Sampling and training side by side, with weights that are updated under unfinished responses.

    No trained token is more than `trainer.asynchronous.max_staleness` versions older than the weights that it trains
    (see above). Every prompt is trained exactly once, however long its responses take; with
    max_staleness=0 the weights are those of the synchronous schedule, bit for bit. The ways of AReaL (arXiv 2505.24298,
    section 5) and of PipelineRL (arXiv 2509.19128, section 4), with a hard bound.
    """

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.settings = self.config.trainer.asynchronous
        self._has_sent = False
        """True once the engines have had weights in this start of the run."""

    def step(self) -> Metrics:
        """Send the weights, ask for as much as the bound allows, wait for a batch, and train on it."""
        timer = self.context.progress.timer()
        if not self._has_sent or self.actor.version - self.rollout.version >= self.settings.sync_every:
            with timer("sync_weights"):
                self.rollout.sync_weights(self.actor)
            self._has_sent = True
        self._ask()
        with timer("wait_for_rollouts"):
            batch, num_dropped = self._next_batch()
        metrics = self.train_beside(self.selected(batch, timer), timer)
        return metrics | {"rollouts/dropped_stale": float(num_dropped)}

    def _ask(self) -> None:
        """Draw prompts and ask for their responses, as many as the bound allows."""
        most = room(self.settings.max_staleness, self.batch_size, self.actor.version - self.rollout.version)
        while len(self.groups) + self.batch_size <= most and self.may_draw():
            self.draw()
        self.groups.ask(max(most, self.batch_size))

    def _next_batch(self) -> tuple[list[Group], int]:
        """Return the groups to train on, as they were drawn, and how many rollouts were too old and are asked for again."""
        num_dropped = 0
        while True:
            batch = self._complete_batch()
            oldest = self.actor.version - self.settings.max_staleness
            stale = [group for group in batch if group.oldest_version is not None and group.oldest_version < oldest]
            if not stale:
                return batch, num_dropped
            num_dropped += sum(len(group.rollouts) for group in stale)
            self.groups.retry(stale)

    def _complete_batch(self) -> list[Group]:
        """Wait until a batch can be made of complete groups that keeps the bound for all others, and return it."""
        groups, staleness = self.groups, self.settings.max_staleness
        size = min(self.batch_size, sum(groups.asked.values()))
        needed = urgent(_later(groups.asked, staleness), self.actor.version, size)
        on_end = self.context.progress.counting(self.rewarder.submit, groups.unfinished)
        groups.wait(lambda: is_enough(_later(groups.complete, staleness), needed, size), on_end)
        deadlines = [group.asked_at + staleness for group in groups.finished if group.asked_at is not None]
        chosen = {id(groups.finished[place]) for place in choose(deadlines, needed, size)}
        return [group for group in groups.waiting if id(group) in chosen]


def _later(counts: dict[int, int], staleness: int) -> dict[int, int]:
    """Return counts by deadline, of counts by the version at which groups were asked for."""
    return {version + staleness: number for version, number in counts.items()}
