"""Which rollouts go to which rank and micro-batch: even work, and the same number of passes on every rank."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

# A token costs about 12 * hidden multiplications in the layers and `length` in attention. As verl does,
# hidden is taken as 2048, which is near enough for balancing.
LINEAR_COST = 24_576


def split_over_ranks(lengths: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Indices of the sequences for each rank, longest first, by the greedy longest-processing-time rule."""
    heap: list[tuple[int, int, int]] = [(0, 0, rank) for rank in range(num_ranks)]
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        cost, size, rank = heapq.heappop(heap)
        shares[rank].append(index)
        length = lengths[index]
        heapq.heappush(heap, (cost + LINEAR_COST * length + length * length, size + 1, rank))
    return shares


def plan_micro_batches(
    lengths: Sequence[int],
    num_ranks: int,
    *,
    max_tokens: int | None = None,
    max_rollouts: int | None = None,
) -> list[list[list[int]]]:
    """Indices per rank and micro-batch; every rank gets the same number of micro-batches, some maybe empty.

    Each micro-batch holds at most `max_tokens` tokens or `max_rollouts` rollouts, whichever is given.
    Sequences of similar length come together, so that attention pads little.

    Raises ValueError when one sequence alone is over `max_tokens`.
    """
    if (max_tokens is None) == (max_rollouts is None):
        raise ValueError("give either max_tokens or max_rollouts")
    if max_tokens is not None and max(lengths, default=0) > max_tokens:
        raise ValueError(f"a sequence of {max(lengths)} tokens does not fit into a micro-batch of {max_tokens}")
    shares = split_over_ranks(lengths, num_ranks)
    if max_rollouts is not None:
        cut = [[share[i : i + max_rollouts] for i in range(0, len(share), max_rollouts)] for share in shares]
    else:
        assert max_tokens is not None
        cut = [_cut_by_tokens(share, lengths, max_tokens) for share in shares]
    passes = max(1, max(len(micro_batches) for micro_batches in cut))
    return [micro_batches + [[] for _ in range(passes - len(micro_batches))] for micro_batches in cut]


def _cut_by_tokens(share: list[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Consecutive runs of `share` (sorted by length) of at most max_tokens, as few as a greedy cut gives, then evened out."""
    fewest = _greedy_cut(share, lengths, max_tokens)
    if len(fewest) < 2:
        return fewest
    total = sum(lengths[i] for i in share)
    longest = max(lengths[i] for i in share)
    even = _greedy_cut(share, lengths, min(max_tokens, -(-total // len(fewest)) + longest // 2))
    return even if len(even) == len(fewest) else fewest


def _greedy_cut(share: list[int], lengths: Sequence[int], limit: int) -> list[list[int]]:
    runs: list[list[int]] = []
    filled = limit + 1
    for index in share:
        if filled + lengths[index] > limit:
            runs.append([])
            filled = 0
        runs[-1].append(index)
        filled += lengths[index]
    return runs
