"""The keys and values of several requests of different lengths, so that one forward pass can extend all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache


class RowCache:
    """The keys and values of some rows, aligned at their ends.

    The tensors of a layer are [rows, heads, width, head dim]. A row with fewer than `width` tokens has unused columns at
    the front, which the attention mask hides, and its positions count from its own first token. Rows of equal length
    need no mask, and none is passed: a row alone is computed exactly as if there were no batches.
    """

    def __init__(self, cache: DynamicCache, lengths: Sequence[int]) -> None:
        self._cache = cache
        self._lengths = list(lengths)

    @property
    def _layers(self) -> list[Any]:
        """The layers, each with `keys` and `values`: a DynamicCache makes plain ones, whatever the model's attention is."""
        return self._cache.layers

    @classmethod
    def read(cls, model: Any, token_ids: Sequence[Sequence[int]], device: torch.device) -> tuple[RowCache, Tensor]:
        """Read whole sequences of one length; return their cache and the logits of the token after each, [rows, V].

        A sequence that comes several times, as the prompt of a group does, is read once.
        """
        places: dict[tuple[int, ...], int] = {}
        rows = [places.setdefault(tuple(ids), len(places)) for ids in token_ids]
        cache = DynamicCache()
        logits_BV = model(
            input_ids=torch.tensor(list(places), device=device), past_key_values=cache, use_cache=True, logits_to_keep=1
        ).logits[:, -1]
        found = cls(cache, [len(ids) for ids in token_ids])
        if len(places) == len(rows):
            return found, logits_BV
        index = torch.tensor(rows, device=device)
        cache.batch_select_indices(index)
        return found, logits_BV[index]

    def extend(self, model: Any, token_ids: Sequence[int], device: torch.device) -> Tensor:
        """Read one more token of each row and return the logits of the next, [rows, V]."""
        width, mixed = max(self._lengths), {}
        if min(self._lengths) < width:
            lengths = torch.tensor(self._lengths, device=device)[:, None]
            columns = torch.arange(width + 1, device=device)
            mixed = {"attention_mask": (columns >= width - lengths).long(), "position_ids": lengths}
        input_ids = torch.tensor(token_ids, device=device)[:, None]
        logits = model(input_ids=input_ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1, **mixed).logits
        self._lengths = [length + 1 for length in self._lengths]
        return logits[:, -1]

    def keep(self, rows: Sequence[int]) -> None:
        """Forget all rows but these, and the columns that no row uses any more."""
        before = max(self._lengths)
        self._lengths = [self._lengths[row] for row in rows]
        unused = before - max(self._lengths)
        index = torch.tensor(rows)
        for layer in self._layers:
            layer.keys = layer.keys[index.to(layer.keys.device), :, unused:]
            layer.values = layer.values[index.to(layer.values.device), :, unused:]

    def append(self, other: RowCache) -> None:
        """Take over the rows of another cache, behind those of this one."""
        width = max(*self._lengths, *other._lengths)
        for mine, added in zip(self._layers, other._layers, strict=True):
            mine.keys = torch.cat([_widened(mine.keys, width), _widened(added.keys, width)])
            mine.values = torch.cat([_widened(mine.values, width), _widened(added.values, width)])
        self._lengths += other._lengths


def _widened(states: Tensor, width: int) -> Tensor:
    """The keys or values of a layer with unused columns at the front, up to `width`."""
    return pad(states, (0, 0, width - states.shape[-2], 0))
