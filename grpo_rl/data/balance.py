"""Assignment of rollouts to ranks and micro-batches: even work, and the same number of passes on every rank.

Rollouts that have to be trained together (the two sides of a pair, a group whose loss compares them) form a *unit*: all
of its rollouts land in one micro-batch on one rank. Where no units are given, every rollout is one by itself.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

# A token costs about 12 * hidden multiplications in the layers and `length` in attention. As verl does,
# hidden is taken as 2048, which is near enough for balancing.
LINEAR_COST = 24_576


def split_over_ranks(
    lengths: Sequence[int],
    num_ranks: int,
    *,
    units: Sequence[int] | None = None,
    mini_batches: Sequence[Sequence[int]] = (),
) -> list[list[int]]:
    """Return the indices of the sequences for each rank, by the greedy longest-processing-time rule.

    `mini_batches` are lists of indices, each of which is to be even over the ranks by itself: the optimizer waits for
    the slowest rank after every one of them. A sequence may be in several (one per epoch), or in none. The longest
    unit comes first, and goes where its mini-batches have the least work so far; a tie between ranks is broken by all
    their work, then by their number of sequences, then by rank.
    """
    chosen: list[list[int]] = [[] for _ in lengths]
    for number, indices in enumerate(mini_batches or [range(len(lengths))]):
        for index in indices:
            chosen[index].append(number)
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    in_order = _longest_first(lengths, units)
    if all(mine == chosen[0] for mine in chosen):
        # All work is one lot: the rank that gets a unit is the only one whose place in the queue changes.
        queue = [(0, 0, rank) for rank in range(num_ranks)]
        for unit in in_order:
            total, size, rank = queue[0]
            heapq.heapreplace(queue, (total + sum(_cost(lengths[index]) for index in unit), size + len(unit), rank))
            shares[rank] += unit
        return shares
    loads = np.zeros((max(1, len(mini_batches)), num_ranks), dtype=np.int64)
    totals, sizes = np.zeros(num_ranks, dtype=np.int64), np.zeros(num_ranks, dtype=np.int64)
    for unit in in_order:
        costs = [_cost(lengths[index]) for index in unit]
        touched = chosen[unit[0]] if len(unit) == 1 else sorted({number for index in unit for number in chosen[index]})
        load = loads[touched[0]] if len(touched) == 1 else loads[touched].sum(0)
        least = np.flatnonzero(load == load.min())
        rank = int(least[np.lexsort((sizes[least], totals[least]))[0]] if len(least) > 1 else least[0])
        for index, cost in zip(unit, costs, strict=True):
            loads[chosen[index], rank] += cost
        totals[rank] += sum(costs)
        sizes[rank] += len(unit)
        shares[rank] += unit
    return shares


def _cost(length: int) -> int:
    return LINEAR_COST * length + length**2


def plan_micro_batches(
    lengths: Sequence[int],
    num_ranks: int,
    *,
    max_tokens: int | None = None,
    max_rollouts: int | None = None,
    units: Sequence[int] | None = None,
) -> list[list[list[int]]]:
    """Return indices per rank and micro-batch: `split_over_ranks`, and each share cut by `cut_shares`."""
    shares = split_over_ranks(lengths, num_ranks, units=units)
    return cut_shares(shares, lengths, max_tokens=max_tokens, max_rollouts=max_rollouts, units=units)


def cut_shares(
    shares: Sequence[Sequence[int]],
    lengths: Sequence[int],
    *,
    max_tokens: int | None = None,
    max_rollouts: int | None = None,
    units: Sequence[int] | None = None,
) -> list[list[list[int]]]:
    """Return each rank's share cut into micro-batches; every rank gets the same number of them, some maybe empty.

    Each micro-batch holds at most `max_tokens` tokens or `max_rollouts` rollouts, whichever is given. Units of similar
    length come together, so that attention pads little.

    Raises ValueError when one unit alone is over the limit.
    """
    if (max_tokens is None) == (max_rollouts is None):
        raise ValueError("give either max_tokens or max_rollouts")
    if max_tokens is not None and max(lengths, default=0) > max_tokens:
        raise ValueError(f"a sequence of {max(lengths)} tokens does not fit into a micro-batch of {max_tokens}")
    limit = max_tokens if max_rollouts is None else max_rollouts
    assert limit is not None
    cut = []
    for share in shares:
        in_order = _longest_first(lengths, units, share)
        sizes = [sum(lengths[index] for index in unit) if max_rollouts is None else len(unit) for unit in in_order]
        if max(sizes, default=0) > limit:
            what = "tokens" if max_rollouts is None else "rollouts"
            raise ValueError(f"{max(sizes)} {what} that stay together do not fit into a micro-batch of {limit}")
        runs = _greedy_cut(sizes, limit) if max_rollouts is not None else _even_cut(sizes, limit)
        cut.append([[index for number in run for index in in_order[number]] for run in runs])
    passes = max(1, max(len(micro_batches) for micro_batches in cut))
    return [micro_batches + [[] for _ in range(passes - len(micro_batches))] for micro_batches in cut]


def _longest_first(lengths: Sequence[int], units: Sequence[int] | None, share: Sequence[int] | None = None) -> list[list[int]]:
    """Return the units among the sequences of `share` (None: all), the one with the longest sequences first."""
    indices = range(len(lengths)) if share is None else share
    if units is None:
        return [[index] for index in sorted(sorted(indices), key=lambda index: -lengths[index])]
    members: dict[int, list[int]] = {}
    for index in sorted(indices):
        members.setdefault(index if units is None else units[index], []).append(index)
    # The longest sequence before the sum: neighbours are padded to it.
    return sorted(members.values(), key=lambda unit: (-max(lengths[i] for i in unit), -sum(lengths[i] for i in unit), unit[0]))


def _even_cut(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Return consecutive runs of at most `limit` tokens, as few as a greedy cut gives, then evened out."""
    fewest = _greedy_cut(sizes, limit)
    if len(fewest) < 2:
        return fewest
    even = _greedy_cut(sizes, min(limit, -(-sum(sizes) // len(fewest)) + max(sizes) // 2))
    return even if len(even) == len(fewest) else fewest


def _greedy_cut(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Return positions in `sizes` as consecutive runs, each filled until the next size is too much."""
    runs: list[list[int]] = []
    filled = limit + 1
    for position, size in enumerate(sizes):
        if filled + size > limit:
            runs.append([])
            filled = 0
        runs[-1].append(position)
        filled += size
    return runs
