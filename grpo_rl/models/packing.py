"""The flat axis of a forward pass: which tokens are computed, where their blocks lie, which states are read.

A *block* is a whole sequence, the prompt that several sequences share, or what one of these has after the
prompt: that block *continues* the prompt's, and attends to it and to itself.

A state depends only on the tokens before it, so a prompt's are the same in every response, and their gradient
is the sum of what the responses send back: a prompt is computed once. What comes after the last state that is
read is left out.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from grpo_rl.frozen import frozen
from grpo_rl.gpu_allocator import to_device
from grpo_rl.models.sequence_parallel import SequenceGroup, Slice

# A sequence joins a padded group while this share of the group's length is its own.
MIN_FILL = 0.8
# Rollouts of a group share their prompt if that saves this part of their tokens. Attention in two parts costs
# as much as it saves at 5 % with 11.8 M parameters and at 14 % with 1.1 M.
LEAST_SAVING = 0.08


@frozen
class Sequences:
    token_ids_S: Tensor
    packing: Packing
    predict_T: Tensor
    """Flat position of the token before each trained token, whose state predicts the trained one."""
    target_T: Tensor
    support: tuple[Tensor, Tensor] | None = None
    """The number of tokens each trained one was sampled from, on the CPU, and their ids; None: from all."""
    experts_SLK: Tensor | None = None
    """The experts that each computed token takes, if they are those of an earlier pass."""
    place_S: Tensor | None = None
    """The flat position at which each of the sequences' tokens is computed, -1 if left out; on the CPU."""
    slice: Slice | None = None
    """This rank's slice, if several ranks compute a pass; all but `packing` are this slice's then."""

    @staticmethod
    def of(
        token_ids_S: Tensor,
        lengths_N: Tensor,
        positions_T: Tensor,
        trained_lengths_N: Tensor,
        device: torch.device,
        support_counts_T: Tensor | None = None,
        support_ids_M: Tensor | None = None,
        group_N: Tensor | None = None,
        experts_S: Tensor | None = None,
    ) -> Sequences:
        """Return the input for sequences of `lengths_N` tokens, trained at the flat `positions_T`.

        Those with the same `group_N` share their common beginning; None shares nothing. `experts_S` [S,
        layers, top_k] are given experts. The only shift: the hidden state at position t predicts token t + 1,
        so that of a trained token at p is the one at p - 1. Raises ValueError for a trained token that is its
        sequence's first.
        """
        starts_T = torch.repeat_interleave(lengths_N.cumsum(0) - lengths_N, trained_lengths_N)
        within_T = positions_T - starts_T
        if bool(((within_T < 1) | (within_T >= torch.repeat_interleave(lengths_N, trained_lengths_N))).any()):
            raise ValueError("a trained token has no token of its own sequence before it that could predict it")
        source_S, place_S, laid_out = _laid_out(token_ids_S, lengths_N, within_T - 1, trained_lengths_N, group_N, device)
        return Sequences(
            *laid_out,
            target_T=to_device(token_ids_S[positions_T], device, torch.long),
            support=None
            if support_counts_T is None or support_ids_M is None
            else (support_counts_T, to_device(support_ids_M, device)),
            experts_SLK=None if experts_S is None else to_device(experts_S[source_S], device),
            place_S=place_S,
        )

    @staticmethod
    def scored(
        token_ids_S: Tensor, lengths_N: Tensor, positions_P: Tensor, device: torch.device, group_N: Tensor | None = None
    ) -> Sequences:
        """Return the input for sequences whose states at the ascending `positions_P` are read: no shift."""
        ends_N = lengths_N.cumsum(0)
        row_P = torch.bucketize(positions_P, ends_N, right=True)
        num_scores_N = torch.bincount(row_P, minlength=len(lengths_N))
        within_P = positions_P - (ends_N - lengths_N)[row_P]
        _, _, laid_out = _laid_out(token_ids_S, lengths_N, within_P, num_scores_N, group_N, device)
        return Sequences(*laid_out, torch.empty(0, dtype=torch.long, device=device))

    def sliced(self, group: SequenceGroup) -> Sequences:
        """A state lies at the token before the trained one, so a response may go on in the next slice."""
        rank_slice = Slice(group, len(self.token_ids_S))
        # The choice is made in host memory: it decides shapes.
        predict_T = self.predict_T.cpu()
        own_T = (predict_T // rank_slice.length == group.rank).nonzero()[:, 0]
        device, support = self.token_ids_S.device, self.support
        own_on_device_T = own_T.to(device)
        if support is not None:
            counts_T, ids_M = support
            chosen_T = torch.zeros(len(counts_T), dtype=torch.bool).index_fill_(0, own_T, True)
            support = counts_T[own_T], ids_M[chosen_T.repeat_interleave(counts_T).to(device)]
        return replace(
            self,
            token_ids_S=rank_slice.of(self.token_ids_S),
            predict_T=(predict_T[own_T] - rank_slice.begin).to(device),
            target_T=self.target_T[own_on_device_T] if len(self.target_T) else self.target_T,
            support=support,
            slice=replace(rank_slice, own_T=own_on_device_T, num_trained=len(predict_T)),
        )


def _laid_out(
    token_ids_S: Tensor, lengths_N: Tensor, within_T: Tensor, num_read_N: Tensor, group_N: Tensor | None, device: torch.device
) -> tuple[Tensor, Tensor, tuple[Tensor, Packing, Tensor]]:
    """Return each computed token's place among the sequences' tokens, `Sequences.place_S`, and its first fields.

    `within_T` are the states that are read, from each sequence's first token, `num_read_N` for each.
    Sequences with the same `group_N` share what they have in common up to the first of these.
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
        states_T = to_device(_flat(starts_N, within_T, num_read_N), device)
        return all_S, all_S, (to_device(token_ids_S, device, torch.long), Packing.of(lengths_N, device), states_T)
    # Begin among the sequences' tokens, length, and the block that it continues.
    blocks: list[tuple[int, int, int]] = []
    shared_N, prompt_N, own_N = (torch.zeros_like(needed_N) for _ in range(3))
    starts, needed = starts_N.tolist(), needed_N.tolist()
    grouped = {row for rows, _ in families for row in rows}
    for rows, shared in [*families, *(([row], 0) for row in range(len(needed)) if row not in grouped)]:
        prompt = len(blocks) if shared else -1
        if shared:
            prompt_N[rows], shared_N[rows] = prompt, shared
            blocks.append((starts[rows[0]], shared, -1))
        for row in rows:
            if needed[row] > shared:
                own_N[row] = len(blocks)
                blocks.append((starts[row] + shared, needed[row] - shared, prompt))
    begins_B, lengths_B, continues_B = torch.tensor(blocks).unbind(1)
    at_B = lengths_B.cumsum(0) - lengths_B
    source_S = torch.arange(int(lengths_B.sum())) + (begins_B - at_B).repeat_interleave(lengths_B)

    def place(within: Tensor, num_N: Tensor) -> Tensor:
        # What is in the shared part lies in the prompt's block, anything else that much further on in its own.
        own_positions = within - shared_N.repeat_interleave(num_N)
        return torch.where(own_positions < 0, _flat(at_B[prompt_N], within, num_N), _flat(at_B[own_N], own_positions, num_N))

    within_S = torch.arange(int(lengths_N.sum())) - starts_N.repeat_interleave(lengths_N)
    left_out_S = within_S >= needed_N.repeat_interleave(lengths_N)
    place_S = place(within_S, lengths_N).masked_fill(left_out_S, -1)
    packing = Packing.of(lengths_B, device, continues_B)
    token_ids = to_device(token_ids_S[source_S], device, torch.long)
    return source_S, place_S, (token_ids, packing, to_device(place(within_T, num_read_N), device))


def _families(
    token_ids_S: Tensor, starts_N: Tensor, common_N: Tensor, needed_N: Tensor, group_N: Tensor
) -> list[tuple[list[int], int]]:
    """Return the sequences that share enough of their beginnings, and how many tokens."""
    members: dict[int, list[int]] = {}
    for number, group in enumerate(group_N.tolist()):
        members.setdefault(group, []).append(number)
    families = []
    for rows in members.values():
        if len(rows) < 2:
            continue
        num_common = int(common_N[rows].min())
        begins_RP = token_ids_S[starts_N[rows][:, None] + torch.arange(num_common)]
        differs_P = (begins_RP != begins_RP[0]).any(0).nonzero()
        shared = int(differs_P[0]) if len(differs_P) else num_common
        if (len(rows) - 1) * shared >= LEAST_SAVING * int(needed_N[rows].sum()) and shared:
            families.append((rows, shared))
    return families


def _flat(starts_N: Tensor, within_T: Tensor, num_read_N: Tensor) -> Tensor:
    return starts_N.repeat_interleave(num_read_N) + within_T


@frozen
class Rectangles:
    """Blocks as padded rectangles, for kernels that take no variable lengths."""

    groups: tuple[Tensor, ...]
    """The flat position [B, L] of each cell; padding repeats the row's last token."""
    restore_S: Tensor
    """The row of each flat position in the groups' outputs laid end to end."""

    @staticmethod
    def of(lengths_N: Tensor, device: torch.device | str) -> Rectangles:
        lengths, starts_N = lengths_N.tolist(), lengths_N.cumsum(0) - lengths_N
        rows = torch.argsort(lengths_N, descending=True, stable=True).tolist()
        groups: list[Tensor] = []
        restore_S = torch.empty(sum(lengths), dtype=torch.long)
        offset = 0
        while rows:
            longest = lengths[rows[0]]
            count = sum(lengths[row] >= MIN_FILL * longest for row in rows)
            rows_B, rows = torch.tensor(rows[:count]), rows[count:]
            column_L = torch.arange(longest)
            lengths_B = lengths_N[rows_B]
            index_BL = starts_N[rows_B, None] + torch.minimum(column_L[None], lengths_B[:, None] - 1)
            real_BL = column_L[None] < lengths_B[:, None]
            cell_BL = offset + torch.arange(index_BL.numel()).view_as(index_BL)
            restore_S[index_BL[real_BL]] = cell_BL[real_BL]
            groups.append(to_device(index_BL, device))
            offset += index_BL.numel()
        return Rectangles(tuple(groups), to_device(restore_S, device))


@dataclass(frozen=True)
class Packing:
    """Where the blocks of a flat axis begin and end, and their layout for attention."""

    position_ids_S: Tensor
    cumulative_lengths: Tensor
    """int32 [num_blocks + 1]."""
    max_length: int
    lengths_N: Tensor
    uniform: bool
    families: tuple[tuple[slice, slice], ...] = ()
    """Slices of each continued prompt, and of all that continues it, which follows directly."""
    keys: GatheredKeys | None = None
    """The keys of each block, if attention runs over copies of them: not on CPUs."""

    @staticmethod
    def of(lengths_N: Tensor, device: torch.device | str = "cpu", continues_N: Tensor | None = None) -> Packing:
        """`continues_N`: the block that each continues, -1 for none; those of one prompt follow it."""
        lengths = lengths_N.tolist()
        if not lengths or min(lengths) < 1:
            raise ValueError(f"every sequence needs at least one token, got lengths {lengths}")
        continues_N = torch.full_like(lengths_N, -1) if continues_N is None else continues_N
        ends_N = lengths_N.cumsum(0)
        starts_N, prefix_N = ends_N - lengths_N, _prefix_lengths(lengths_N, continues_N)
        begins, ends = starts_N.tolist(), ends_N.tolist()
        last = {prompt: end for prompt, end in zip(continues_N.tolist(), ends, strict=True) if prompt >= 0}
        families = tuple((slice(begins[prompt], ends[prompt]), slice(ends[prompt], end)) for prompt, end in last.items())
        position_ids_S = torch.arange(ends[-1]) - torch.repeat_interleave(starts_N - prefix_N, lengths_N)
        gathers_keys = families and torch.device(device).type != "cpu"
        return Packing(
            position_ids_S=to_device(position_ids_S, device),
            cumulative_lengths=to_device(_from_zero(ends_N), device),
            max_length=int((prefix_N + lengths_N).max()),
            lengths_N=lengths_N,
            uniform=min(lengths) == max(lengths),
            families=families,
            keys=GatheredKeys.of(lengths_N, continues_N, device) if gathers_keys else None,
        )

    @functools.cached_property
    def rectangles(self) -> Rectangles:
        return Rectangles.of(self.lengths_N, self.position_ids_S.device)


@frozen
class GatheredKeys:
    """The keys that each block attends to: those of the prompt that it continues, then its own."""

    index_K: Tensor
    cumulative_lengths: Tensor
    lengths_B: Tensor

    @staticmethod
    def of(lengths_N: Tensor, continues_N: Tensor, device: torch.device | str) -> GatheredKeys:
        positions = torch.arange(int(lengths_N.sum())).split(lengths_N.tolist())
        pieces = [positions[part] for block, prompt in enumerate(continues_N.tolist()) for part in (prompt, block) if part >= 0]
        lengths_B = lengths_N + _prefix_lengths(lengths_N, continues_N)
        ends_B = _from_zero(lengths_B.cumsum(0))
        return GatheredKeys(to_device(torch.cat(pieces), device), to_device(ends_B, device), lengths_B)


def _prefix_lengths(lengths_N: Tensor, continues_N: Tensor) -> Tensor:
    return torch.where(continues_N < 0, 0, lengths_N[continues_N])


def _from_zero(ends_N: Tensor) -> Tensor:
    return F.pad(ends_N, (1, 0)).to(torch.int32)
