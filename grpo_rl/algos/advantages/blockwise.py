"""Float64 arithmetic along a long flat axis, in pieces: a float64 copy of a column costs more than it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from grpo_rl.frozen import frozen

PIECE = 1 << 17  # tokens per piece, unless one response is longer: 1 MiB in float64, which stays in the cache

BLOCK = 32


def spread(x_N: Tensor, lengths_N: Tensor) -> Tensor:
    return torch.from_numpy(np.repeat(x_N.float().numpy(), lengths_N.numpy()))


@frozen
class Lot:
    """A few responses of similar length, longest first, and their places on the axis."""

    rollouts: list[int]
    places: list[slice]

    def rows(self, column_T: Tensor) -> Tensor:
        x_RL = torch.zeros(len(self.places), self.places[0].stop - self.places[0].start, dtype=torch.float64)
        for i, place in enumerate(self.places):
            x_RL[i, : place.stop - place.start] = column_T[place]
        return x_RL

    def write(self, x_RL: Tensor, out_T: Tensor) -> None:
        for i, place in enumerate(self.places):
            out_T[place] = x_RL[i, : place.stop - place.start]


def lots(lengths_N: Tensor) -> Iterator[Lot]:
    lengths = lengths_N.tolist()
    ends = lengths_N.cumsum(0).tolist()
    order = sorted((n for n, length in enumerate(lengths) if length > 0), key=lambda n: -lengths[n])
    start = 0
    while start < len(order):
        rollouts = order[start : start + max(1, PIECE // lengths[order[start]])]
        yield Lot(rollouts, [slice(ends[n] - lengths[n], ends[n]) for n in rollouts])
        start += len(rollouts)


def suffix_sums(x_RL: Tensor, decay: float) -> Tensor:
    """y_t = x_t + decay y_(t+1) along each row: within blocks by a matrix product."""
    num_rows, length = x_RL.shape
    base = torch.tensor(decay, dtype=torch.float64)
    position_B = torch.arange(min(length, BLOCK))
    # W[j, i] = decay^(j - i) for j >= i, else 0.
    weight_BB = torch.pow(base, (position_B[:, None] - position_B).clamp(min=0)).tril()
    if length <= BLOCK:
        return x_RL @ weight_BB
    num_blocks = -(-length // BLOCK)
    if length % BLOCK:
        x_RL = torch.nn.functional.pad(x_RL, (0, num_blocks * BLOCK - length))
    y_RMB = (x_RL.view(-1, BLOCK) @ weight_BB).view(num_rows, num_blocks, BLOCK)
    head_RM = suffix_sums(y_RMB[:, :, 0].contiguous(), decay**BLOCK)
    y_RMB[:, :-1].addcmul_(head_RM[:, 1:, None], torch.pow(base, BLOCK - position_B))
    return y_RMB.view(num_rows, -1)[:, :length]


def whiten_(x_T: Tensor) -> Tensor:
    """(x - mean) / sqrt(sample variance + 1e-8), in place, with float64 sums. Equal numbers give 0."""
    lowest, highest = torch.aminmax(x_T) if len(x_T) else (0.0, 0.0)
    if lowest == highest:
        return x_T.zero_()
    pieces = x_T.split(PIECE)
    mean = sum(float(piece.sum(dtype=torch.float64)) for piece in pieces) / len(x_T)
    squares = sum(float((piece.double() - mean).square_().sum()) for piece in pieces)
    scale = (squares / (len(x_T) - 1) + 1e-8) ** -0.5
    for piece in pieces:
        piece.copy_((piece.double() - mean).mul_(scale))
    return x_T
