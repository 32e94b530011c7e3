"""Assignment of rollouts to ranks and micro-batches: even work, and as many passes on every rank.

Rollouts of a *unit* (the two sides of a pair, a group whose loss compares them) land in one micro-batch. If a
prompt is computed once for all its responses, these are kept together as far as ranks stay even.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

import numpy as np

from grpo_rl.frozen import frozen

# A token costs about 12 * hidden multiplications in the layers and `length` in attention; hidden is 2048, as in verl.
LINEAR_COST = 24_576
# Groups are cut further only while the slowest rank has this much more work than if all were even.
UNEVEN = 1.03
Parts = list[list[int]]
"""Indices of sequences: for each rank, of each unit, or of each micro-batch."""


@frozen
class Prompts:
    """Given if a pass computes the prompt of a group once."""

    group_N: Sequence[int]
    """Sequences of equal numbers have the same prompt."""
    lengths_N: Sequence[int]

    @staticmethod
    def unshared(num_sequences: int) -> Prompts:
        return Prompts(range(num_sequences), [0] * num_sequences)


def split_over_ranks(
    lengths: Sequence[int],
    num_ranks: int,
    *,
    units: Sequence[int] | None = None,
    mini_batches: Sequence[Sequence[int]] = (),
    prompts: Prompts | None = None,
) -> Parts:
    """The indices of the sequences for each rank, by the greedy longest-processing-time rule.

    Each of `mini_batches`, lists of indices, is even over the ranks by itself: the optimizer waits for the
    slowest rank after every one. A sequence may be in several (one per epoch), or in none. With `prompts`,
    whole groups are assigned; they are cut in halves, quarters and so on while that gives the slowest rank
    less work, prompts that are computed twice included.
    """
    chosen: Parts = [[] for _ in lengths]
    for number, indices in enumerate(mini_batches or [range(len(lengths))]):
        for index in indices:
            chosen[index].append(number)
    prompts = prompts or Prompts.unshared(len(lengths))
    groups = _longest_first(lengths, units or prompts.group_N, range(len(lengths)))
    best, parts = _assigned(groups, lengths, num_ranks, chosen, prompts), 1
    while units is None and best[1] > UNEVEN * best[2] and parts < max(map(len, groups)):
        parts *= 2
        cut = [_by_length(group, lengths)[part::parts] for group in groups for part in range(min(parts, len(group)))]
        trial = _assigned(_sorted(cut, lengths), lengths, num_ranks, chosen, prompts)
        if trial[1] >= best[1]:
            break
        best = trial
    return best[0]


def _assigned(
    units: Sequence[Sequence[int]],
    lengths: Sequence[int],
    num_ranks: int,
    chosen: Sequence[Sequence[int]],
    prompts: Prompts,
) -> tuple[Parts, int, float]:
    """Each rank's indices; work of the slowest rank, summed over the mini-batches, and of an even split."""
    shards: Parts = [[] for _ in range(num_ranks)]
    if all(numbers == chosen[0] for numbers in chosen):
        # All work is one lot: the rank that gets a unit is the only one whose place in the queue changes.
        queue = [(0, 0, rank) for rank in range(num_ranks)]
        for unit in units:
            total, size, rank = queue[0]
            heapq.heapreplace(queue, (total + sum(_costs(unit, lengths, prompts)), size + len(unit), rank))
            shards[rank] += unit
        times = len(chosen[0]) if chosen else 1
        work = [total for total, _, _ in queue]
        return shards, times * max(work), times * sum(work) / num_ranks
    num_mini_batches = 1 + max(number for numbers in chosen for number in numbers)
    loads = np.zeros((num_mini_batches, num_ranks), dtype=np.int64)
    totals, sizes = np.zeros((2, num_ranks), dtype=np.int64)
    for unit in units:
        costs = _costs(unit, lengths, prompts)
        load = loads[sorted({number for index in unit for number in chosen[index]})].sum(0)
        rank = int(np.lexsort((sizes, totals, load))[0])
        for index, cost in zip(unit, costs, strict=True):
            loads[chosen[index], rank] += cost
        totals[rank] += sum(costs)
        sizes[rank] += len(unit)
        shards[rank] += unit
    return shards, int(loads.max(1).sum()), float(loads.sum() / num_ranks)


def _costs(unit: Sequence[int], lengths: Sequence[int], prompts: Prompts) -> list[int]:
    """The unit's prompt is computed with the first sequence."""
    spared = [0, *(_cost(prompts.lengths_N[index]) for index in unit[1:])]
    return [_cost(lengths[index]) - cost for index, cost in zip(unit, spared, strict=True)]


def _cost(length: int) -> int:
    return LINEAR_COST * length + length**2


def cut_shards(
    shards: Sequence[Sequence[int]],
    lengths: Sequence[int],
    *,
    max_tokens: int | None = None,
    max_rollouts: int | None = None,
    units: Sequence[int] | None = None,
    prompts: Prompts | None = None,
) -> list[Parts]:
    """Each rank's micro-batches of at most `max_tokens` tokens or `max_rollouts` rollouts; some may be empty.

    Units of similar length come together, so that attention pads little. With `prompts`, groups come together
    instead, and a prompt's tokens count once in each micro-batch; a group that meets the end of one goes on
    in the next. Raises ValueError if a unit alone is over the limit.
    """
    if (max_tokens is None) == (max_rollouts is None):
        raise ValueError("give either max_tokens or max_rollouts")
    if max_tokens is not None and max(lengths, default=0) > max_tokens:
        raise ValueError(f"a sequence of {max(lengths)} tokens does not fit into a micro-batch of {max_tokens}")
    limit = max_tokens if max_rollouts is None else max_rollouts
    assert limit is not None
    prompts = prompts or Prompts.unshared(len(lengths))
    cut = []
    for shard in shards:
        in_order = _longest_first(lengths, units or prompts.group_N, sorted(shard))
        if units is None:
            in_order = [[index] for group in in_order for index in _by_length(group, lengths)]
        sizes = [len(unit) for unit in in_order]
        following_sizes = sizes  # of units that follow one with the same prompt in their micro-batch
        if max_rollouts is None:
            following_sizes = [sum(lengths[i] - prompts.lengths_N[i] for i in unit) for unit in in_order]
            sizes = [size + prompts.lengths_N[unit[0]] for size, unit in zip(following_sizes, in_order, strict=True)]
            previous_group = None
            for position, unit in enumerate(in_order):
                if prompts.group_N[unit[0]] != previous_group:
                    following_sizes[position] = sizes[position]
                previous_group = prompts.group_N[unit[0]]
        if max(sizes, default=0) > limit:
            what = "tokens" if max_rollouts is None else "rollouts"
            raise ValueError(f"{max(sizes)} {what} that stay together do not fit into a micro-batch of {limit}")
        runs = _greedy_cut(sizes, following_sizes, limit)
        if max_rollouts is None and len(runs) > 1:
            share = -(-sum(following_sizes) // len(runs)) + max(sizes) // 2
            even = _greedy_cut(sizes, following_sizes, max(max(sizes), min(limit, share)))
            runs = even if len(even) == len(runs) else runs
        cut.append([[index for position in run for index in in_order[position]] for run in runs])
    passes = max(1, *map(len, cut))
    return [micro_batches + [[] for _ in range(passes - len(micro_batches))] for micro_batches in cut]


def _longest_first(lengths: Sequence[int], units: Sequence[int], shard: Iterable[int]) -> Parts:
    """The sequences of a shard, ascending, by unit."""
    members: dict[int, list[int]] = {}
    for index in shard:
        members.setdefault(units[index], []).append(index)
    return _sorted(members.values(), lengths)


def _sorted(units: Iterable[list[int]], lengths: Sequence[int]) -> Parts:
    # The longest sequence before the sum: neighbours are padded to it.
    return sorted(units, key=lambda unit: (-max(lengths[i] for i in unit), -sum(lengths[i] for i in unit), unit[0]))


def _by_length(unit: Sequence[int], lengths: Sequence[int]) -> list[int]:
    return sorted(unit, key=lambda index: -lengths[index])


def _greedy_cut(sizes: Sequence[int], following_sizes: Sequence[int], limit: int) -> Parts:
    """Runs of positions. The first of a run has its size of `sizes`, others that of `following_sizes`."""
    runs: Parts = []
    filled = limit + 1
    for position, (size, added) in enumerate(zip(sizes, following_sizes, strict=True)):
        if filled + added > limit:
            runs.append([])
            filled, added = 0, size
        runs[-1].append(position)
        filled += added
    return runs
