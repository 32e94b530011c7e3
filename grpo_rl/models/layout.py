"""The tokens of a micro-batch that run through a model's body, and where: a prompt once for all its responses.

The state at a token depends on the tokens before it only. So the state at a prompt's token is the same in every response
to that prompt, and its gradient is the sum of what the responses send back: computing it once changes neither. And what
comes after the last state that is read has no part in the result: where prompts are shared it is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Rollouts of a group share their prompt where that saves this part of their tokens: attention in two parts costs a little.
LEAST_SAVING = 0.04


@dataclass(frozen=True, slots=True)
class Layout:
    """Blocks of tokens on the flat axis of a forward pass; see `models/attention.py`."""

    source_S: Tensor
    """The place of each computed token among the sequences' tokens."""
    lengths_B: Tensor
    continues_B: Tensor | None
    """The block that each one continues, -1 for none; None where no block continues one."""
    states_T: Tensor
    """The flat position of each state that is read."""
    place_S: Tensor
    """The flat position at which each of the sequences' tokens is computed, -1 for one that is left out."""

    @staticmethod
    def of(token_ids_S: Tensor, lengths_N: Tensor, within_T: Tensor, num_read_N: Tensor, group_N: Tensor | None) -> Layout:
        """Return the layout of sequences of `lengths_N` tokens, of which the states at `within_T` are read.

        `within_T` counts from each sequence's first token, `num_read_N` of them for each, ascending. Sequences with the
        same `group_N` share what they have in common up to the first state that one of them reads; None shares nothing.
        """
        ends_N = num_read_N.cumsum(0)
        reads_N = num_read_N > 0
        # A sequence that nothing reads keeps one token: a pass without any token is none.
        needed_N, common_N = torch.ones_like(lengths_N), torch.ones_like(lengths_N)
        needed_N[reads_N] = within_T[ends_N[reads_N] - 1] + 1
        common_N[reads_N] = within_T[(ends_N - num_read_N)[reads_N]] + 1
        starts_N = lengths_N.cumsum(0) - lengths_N
        families = [] if group_N is None else _families(token_ids_S, starts_N, common_N, needed_N, group_N)
        if not families:
            all_S = torch.arange(len(token_ids_S))
            return Layout(all_S, lengths_N, None, _flat(starts_N, within_T, num_read_N), all_S)
        return _blocks(starts_N, lengths_N, needed_N, within_T, num_read_N, families)


def _families(
    token_ids_S: Tensor, starts_N: Tensor, common_N: Tensor, needed_N: Tensor, group_N: Tensor
) -> list[tuple[list[int], int]]:
    """Return the sequences of each group that share enough of their beginnings, and how many tokens they share."""
    members: dict[int, list[int]] = {}
    for number, group in enumerate(group_N.tolist()):
        members.setdefault(group, []).append(number)
    families = []
    for rows in members.values():
        if len(rows) < 2:
            continue
        most = int(common_N[rows].min())
        begins_RP = token_ids_S[starts_N[rows][:, None] + torch.arange(most)]
        differs_P = (begins_RP != begins_RP[0]).any(0).nonzero()
        shared = int(differs_P[0]) if len(differs_P) else most
        if (len(rows) - 1) * shared >= LEAST_SAVING * int(needed_N[rows].sum()) and shared:
            families.append((rows, shared))
    return families


def _blocks(
    starts_N: Tensor,
    lengths_N: Tensor,
    needed_N: Tensor,
    within_T: Tensor,
    num_read_N: Tensor,
    families: list[tuple[list[int], int]],
) -> Layout:
    """Return the blocks: each family's prompt and what its sequences have after it, then the sequences that share nothing."""
    begins, lengths, continues = [], [], []
    shared_N, prompt_N, own_N = (torch.zeros_like(needed_N) for _ in range(3))
    starts, needed = starts_N.tolist(), needed_N.tolist()
    at = 0

    def add(begin: int, length: int, parent: int) -> int:
        nonlocal at
        begins.append(begin)
        lengths.append(length)
        continues.append(parent)
        at += length
        return at - length

    alone = set(range(len(needed)))
    for rows, shared in families:
        alone.difference_update(rows)
        prompt = len(begins)
        prompt_N[rows], shared_N[rows] = add(starts[rows[0]], shared, -1), shared
        for number in rows:
            if needed[number] > shared:
                own_N[number] = add(starts[number] + shared, needed[number] - shared, prompt)
    for number in sorted(alone):
        own_N[number] = add(starts[number], needed[number], -1)
    lengths_B = torch.tensor(lengths)
    moved_B = torch.tensor(begins) - (lengths_B.cumsum(0) - lengths_B)
    source_S = torch.arange(at) + moved_B.repeat_interleave(lengths_B)

    def place(within: Tensor, num_N: Tensor) -> Tensor:
        # What is in the shared part lies in the prompt's block, anything else that much further on in its own.
        after = within - shared_N.repeat_interleave(num_N)
        return torch.where(after < 0, _flat(prompt_N, within, num_N), _flat(own_N, after, num_N))

    within_S = torch.arange(int(lengths_N.sum())) - starts_N.repeat_interleave(lengths_N)
    left_out_S = within_S >= needed_N.repeat_interleave(lengths_N)
    place_S = place(within_S, lengths_N).masked_fill(left_out_S, -1)
    return Layout(source_S, lengths_B, torch.tensor(continues) if families else None, place(within_T, num_read_N), place_S)


def _flat(starts_N: Tensor, within_T: Tensor, num_read_N: Tensor) -> Tensor:
    return starts_N.repeat_interleave(num_read_N) + within_T
