"""Shares of a batch as the controller sends them to ranks: numbers per rollout, prompts, and the places of the responses.

A response's ids and log-probs cross processes once: from the object store of the rollout process's machine into the rank
that trains on them. Ray moves values below its limit of 100 KiB in its messages, so blocks smaller than that pass through
the controller's process as bytes, unread.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import ray
import torch
from torch import Tensor

from grpo_rl.cluster.processes.worker_host import FETCH_S, InPieces
from grpo_rl.data.collate import with_tokens
from grpo_rl.tokens import Array, Column, Held, Source, Stretch, TokenBlock
from grpo_rl.types import Batch
from grpo_rl.workers.specs import Update


class StoredBlock:
    """A block of tokens in Ray's object store. It is freed with the last stretch of it, on whichever process that is."""

    def __init__(self, ref: ray.ObjectRef) -> None:
        self.ref = ref
        self._block: TokenBlock | None = None

    def read(self) -> TokenBlock:
        """Return the block, whose arrays are views of shared memory. It stays mapped as long as this object is there."""
        if self._block is None:
            self._block = ray.get(self.ref, timeout=FETCH_S)
        return self._block

    def __reduce__(self) -> tuple[Callable[..., StoredBlock], tuple[ray.ObjectRef]]:
        """Pickle the reference alone, even where the block has been read."""
        return StoredBlock, (self.ref,)


@dataclasses.dataclass(frozen=True, slots=True)
class _Places:
    """Stretches of one column: which block, where it begins, how long it is."""

    column: Column
    source_N: np.ndarray
    start_N: np.ndarray
    length_N: np.ndarray

    @staticmethod
    def of(column: Column, arrays: tuple[Array, ...], number_of: dict[int, int], sources: list[Source]) -> _Places:
        """Return the arrays' places; a source that is not in `sources` yet is added to them."""
        places = np.empty((3, len(arrays)), dtype=np.int64)
        for number, array in enumerate(arrays):
            stretch = array if isinstance(array, Stretch) else _own_block(column, array)
            source = number_of.setdefault(id(stretch.source), len(sources))
            if source == len(sources):
                sources.append(stretch.source)
            places[:, number] = source, stretch.start, stretch.length
        return _Places(column, *places)

    def stretches(self, sources: list[Source]) -> tuple[Array, ...]:
        places = zip(self.source_N.tolist(), self.start_N.tolist(), self.length_N.tolist(), strict=True)
        return tuple(Stretch(sources[source], self.column, start, length) for source, start, length in places)


@dataclasses.dataclass(frozen=True, slots=True)
class Share(InPieces):
    """One rank's rollouts of a batch that has no tokens of its own."""

    columns: Batch
    """The columns that have values; those of tokens are without."""
    prompt_ids: np.ndarray
    """int32: the ids of the share's prompts back to back, those of a group once."""
    prompt_start_N: np.ndarray
    sources: list[Source]
    """The blocks that hold the responses."""
    places: tuple[_Places, ...]
    """Ids and log-probs, then the supports where there are some."""

    @staticmethod
    def of(batch: Batch) -> Share:
        """Return what is sent of this batch, a rank's part of a whole one."""
        held = batch.held
        assert held is not None
        start_of: dict[int, int] = {}
        prompts: list[np.ndarray] = []
        end = 0
        for prompt in held.prompt_ids:
            if id(prompt) not in start_of:
                start_of[id(prompt)] = end
                prompts.append(prompt)
                end += len(prompt)
        number_of: dict[int, int] = {}
        sources: list[Source] = []
        columns: dict[Column, tuple[Array, ...] | None] = {
            "token_ids": held.response_ids,
            "logprobs": held.logprobs,
            "support_counts": held.support_counts,
            "support_ids": held.support_ids,
        }
        return Share(
            batch.replace(held=None),
            np.concatenate(prompts) if prompts else np.empty(0, dtype=np.int32),
            np.array([start_of[id(prompt)] for prompt in held.prompt_ids], dtype=np.int64),
            sources,
            tuple(_Places.of(name, arrays, number_of, sources) for name, arrays in columns.items() if arrays is not None),
        )

    def whole(self, fetch: Callable[[Any], Any]) -> Batch:
        """Return the share with all its tokens, in memory of this process; the blocks are let go of."""
        stored = [source for source in self.sources if isinstance(source, StoredBlock)]
        fetched = dict(zip(map(id, stored), fetch([source.ref for source in stored]) if stored else [], strict=True))
        sources: list[Source] = [fetched.get(id(source), source) for source in self.sources]
        starts, lengths = self.prompt_start_N.tolist(), self.columns.prompt_lengths_N.tolist()
        held = Held(
            tuple(self.prompt_ids[start : start + length] for start, length in zip(starts, lengths, strict=True)),
            *(places.stretches(sources) for places in self.places),
        )
        batch = with_tokens(self.columns.replace(held=held))
        return batch.replace(token_ids_S=batch.token_ids_S.int())


@dataclasses.dataclass(frozen=True, slots=True)
class LeftColumn:
    """A column over trained tokens that ranks worked out and left in the object store."""

    key: str
    """The column's name in what the ranks returned."""
    refs: tuple[ray.ObjectRef, ...]
    """The ranks' results: each is a dict of arrays by such names."""
    source_N: np.ndarray
    """The rank whose result has a rollout's values; -1 for rollouts without a trained token."""
    start_N: np.ndarray
    """The place of the first of them."""

    @staticmethod
    def places(orders: Sequence[Sequence[int]], lengths_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return `source_N` and `start_N` of results that hold the rollouts `orders` back to back, rank by rank."""
        source_N, start_N = np.full(len(lengths_N), -1, dtype=np.int64), np.zeros(len(lengths_N), dtype=np.int64)
        for source, order in enumerate(orders):
            index = np.asarray(order, dtype=np.int64)
            source_N[index] = source
            start_N[index] = lengths_N[index].cumsum() - lengths_N[index]
        return source_N, start_N

    def select(self, index: np.ndarray) -> LeftColumn:
        """Return the places of some rollouts, with those results only that have values of them."""
        used, source_N = np.unique(self.source_N[index], return_inverse=True)
        missing = int(len(used) > 0 and used[0] < 0)
        refs = tuple(self.refs[source] for source in used[missing:].tolist())
        return LeftColumn(self.key, refs, source_N.astype(np.int64) - missing, self.start_N[index])


@dataclasses.dataclass(frozen=True, slots=True)
class UpdateOfLeft(InPieces):
    """A rank's part of an update that reads columns which were left in the store: the rank fetches them, no other process does."""

    update: Update
    lengths_N: np.ndarray
    """The trained tokens of the share's rollouts."""
    columns: dict[str, LeftColumn]

    def whole(self, fetch: Callable[[Any], Any]) -> Update:
        """Return the update with these columns."""
        refs = list({id(ref): ref for column in self.columns.values() for ref in column.refs}.values())
        results = dict(zip(map(id, refs), fetch(refs) if refs else [], strict=True))
        found = {name: self._values(column, results) for name, column in self.columns.items()}
        return dataclasses.replace(self.update, columns=self.update.columns | found)

    def _values(self, column: LeftColumn, results: dict[int, dict[str, Any]]) -> Tensor:
        arrays = [results[id(ref)][column.key] for ref in column.refs]
        places = zip(column.source_N.tolist(), column.start_N.tolist(), self.lengths_N.tolist(), strict=True)
        pieces = [arrays[source][start : start + length] for source, start, length in places if source >= 0]
        if not pieces:
            return torch.empty(0)
        return torch.cat(pieces) if isinstance(pieces[0], Tensor) else torch.from_numpy(np.concatenate(pieces))


def _own_block(column: Column, values: np.ndarray) -> Stretch:
    """Return an array that is here as a stretch of a block of its own."""
    nothing = TokenBlock(*[np.empty(0, dtype=dtype) for dtype in (np.int32, np.float32, np.int32, np.int32)])
    return Stretch(dataclasses.replace(nothing, **{column: values}), column, 0, len(values))
