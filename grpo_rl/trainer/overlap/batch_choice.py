"""The groups that an asynchronous training takes next: those that would grow too old, then those that ended first.

Every group has a *deadline*: the version of the weights at which it must be trained at the latest, so that none of its
tokens is more than `max_staleness` versions old. A version trains one batch. So, of the groups with a deadline up to d, all
but those that the batches of the versions up to d can hold have to be in this batch already; the trainer waits for them,
however long they are. The other places go to the groups that ended first. No group is trained too late this way, as long
as it was asked for within the bound (`room`): the deadlines can be met when they are given, and every batch keeps that so
(earliest deadline first is optimal for one machine, Liu and Layland, JACM 20, 1973, section 7).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


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
