"""Sequence parallelism: several ranks compute one pack of sequences, each a slice of its tokens (Ulysses,
Jacobs et al. 2023).

All layers but attention run on a rank's slice of the flat axis. Around attention, ranks exchange all heads of
their tokens for all tokens of some heads. The LM head runs on the trained tokens whose states the rank has.
The losses need whole responses, so the ranks add up their columns, and every rank has those of all.

Gradients: all ranks of a group compute the same loss, and each sends back what belongs to its own trained
tokens. So a group's gradient is the sum over its ranks, and nothing is divided.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from grpo_rl.errors import ConfigError
from grpo_rl.frozen import frozen


def consecutive_ranks(size: int, what: str) -> Tensor:
    """Return all ranks [groups, size]. Raises ConfigError if they are no multiple of `size`."""
    world_size = dist.get_world_size()
    if world_size % size:
        raise ConfigError(f"{what} {size} ranks: the set has {world_size}, which is no multiple of it")
    return torch.arange(world_size).view(-1, size)


def group_of_rank(ranks: Tensor, timeout_s: float) -> dist.ProcessGroup:
    """Return the process group of the row that has this rank. A collective: each rank makes every group."""
    timeout = datetime.timedelta(seconds=timeout_s)
    groups = [(row, dist.new_group(row, timeout)) for row in ranks.tolist()]
    return next(group for row, group in groups if dist.get_rank() in row)


@frozen
class SequenceGroup:
    group: Any
    rank: int
    size: int

    @staticmethod
    def join(size: int, timeout_s: float) -> SequenceGroup | None:
        """Return this rank's group of `size` consecutive ranks; None if each rank is alone. A collective."""
        if size == 1:
            return None
        ranks = consecutive_ranks(size, "sequence parallelism over")
        return SequenceGroup(group_of_rank(ranks, timeout_s), dist.get_rank() % size, size)


@frozen
class Slice:
    """One rank's slice of a pass. Slices are equally long; the last ones end in tokens that nothing reads."""

    ranks: SequenceGroup
    num_tokens: int
    own_T: Tensor | None = None
    """Indices, among all trained tokens, of those whose states this rank computes."""
    num_trained: int = 0

    @property
    def length(self) -> int:
        return -(-self.num_tokens // self.ranks.size)

    @property
    def begin(self) -> int:
        return self.ranks.rank * self.length

    def of(self, values_S: Tensor) -> Tensor:
        part = values_S[self.begin : self.begin + self.length]
        return F.pad(part, (0, self.length - len(part)))

    def own(self, values_T: Tensor | None) -> Tensor | None:
        return None if values_T is None or self.own_T is None else values_T[self.own_T]

    def whole(self, values_T: Tensor) -> Tensor:
        """Return a column over all trained tokens from each rank's own. A collective."""
        assert self.own_T is not None
        # Each place is 0 on all ranks but one, so that the sum is that one's value to the last bit.
        whole_T = values_T.new_zeros(self.num_trained, *values_T.shape[1:]).index_copy_(0, self.own_T, values_T.detach())
        if self.num_trained:
            dist.all_reduce(whole_T, group=self.ranks.group)
        if not values_T.requires_grad:
            return whole_T
        # The same values again (a sum has no -0), for the gradient: each rank takes that of its own, and nothing is added up.
        return whole_T.index_copy(0, self.own_T, values_T + 0)

    def to_heads(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return [1, heads / size, all tokens, d] for each [1, heads, own tokens, d], in one collective."""
        parts = [self._for_ranks(tensor) for tensor in tensors]
        message = torch.cat([part.flatten(2) for part in parts], dim=2)
        received: Tensor = _Exchange.apply(message, self.ranks.group)
        pieces = received.flatten(0, 1)[: self.num_tokens].split([part[0, 0].numel() for part in parts], dim=1)
        return [piece.unflatten(1, part.shape[2:]).transpose(0, 1)[None] for piece, part in zip(pieces, parts, strict=True)]

    def to_tokens(self, out_SHD: Tensor) -> Tensor:
        """Return [own tokens, heads, d] of outputs [all tokens, heads / size, d]. A collective."""
        size = self.ranks.size
        filled = F.pad(out_SHD, (0, 0, 0, 0, 0, size * self.length - self.num_tokens))
        received: Tensor = _Exchange.apply(filled.unflatten(0, (size, self.length)), self.ranks.group)
        return received.transpose(0, 1).flatten(1, 2)

    def _for_ranks(self, tensor: Tensor) -> Tensor:
        size, x_LHD = self.ranks.size, tensor[0].transpose(0, 1)
        times = repeats(x_LHD.shape[1], size)
        if times > 1:
            x_LHD = x_LHD.repeat_interleave(times, dim=1)
        return x_LHD.unflatten(1, (size, -1)).transpose(0, 1)


def repeats(num_heads: int, size: int) -> int:
    """How often each head is repeated: query heads that share a key head are neighbours, and stay so."""
    return size // math.gcd(num_heads, size)


class _Exchange(torch.autograd.Function):
    """Rank i's part j becomes rank j's part i, and the gradient's likewise."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: Any) -> Tensor:
        ctx.group = group
        sent = parts.contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Exchange.apply(grad, ctx.group), None
