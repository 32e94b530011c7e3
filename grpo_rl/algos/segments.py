"""Sums, means and broadcasts over responses that lie back to back on one flat axis."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor


class Segments:
    """Response n owns `lengths_N[n]` consecutive tokens, possibly none. All methods are differentiable."""

    def __init__(self, lengths_N: Tensor, num_tokens: int | None = None) -> None:
        """`num_tokens`: their sum; if it is known, nothing waits for a GPU."""
        assert lengths_N.ndim == 1 and not lengths_N.is_floating_point(), "lengths_N is a vector of integers"
        self.lengths_N = lengths_N.long()
        self._num_tokens = num_tokens

    @property
    def num_sequences(self) -> int:
        return len(self.lengths_N)

    @cached_property
    def num_tokens(self) -> int:
        return int(self.lengths_N.sum()) if self._num_tokens is None else self._num_tokens

    @cached_property
    def nonempty_N(self) -> Tensor:
        return self.lengths_N > 0

    @cached_property
    def index_T(self) -> Tensor:
        return torch.repeat_interleave(self.lengths_N, output_size=self.num_tokens)

    def sum(self, x_T: Tensor) -> Tensor:
        assert x_T.shape == (self.num_tokens,), f"{tuple(x_T.shape)} values for {self.num_tokens} tokens"
        # segment_reduce adds in a fixed order on every device; `unsafe` skips the check of lengths, done above.
        return torch.segment_reduce(x_T, "sum", lengths=self.lengths_N, unsafe=True, initial=0)

    def mean(self, x_T: Tensor) -> Tensor:
        return self.sum(x_T) / self.lengths_N.clamp(min=1)

    def broadcast(self, x_N: Tensor) -> Tensor:
        assert x_N.shape == (self.num_sequences,), f"{tuple(x_N.shape)} values for {self.num_sequences} responses"
        return x_N.index_select(0, self.index_T)
