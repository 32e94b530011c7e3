"""Shares of a batch as the controller sends them to ranks: numbers per rollout, prompts, and the places of the responses.

A response's ids and log-probs cross processes once: from the object store of the rollout process's machine into the rank
that trains on them. Ray moves values below its limit of 100 KiB in its messages, so blocks smaller than that pass through
the controller's process as bytes, unread.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import ray

from grpo_rl.cluster.processes.worker_host import FETCH_S, InPieces
from grpo_rl.data.collate import with_tokens
from grpo_rl.tokens import Array, Column, Held, Source, Stretch, TokenBlock
from grpo_rl.types import Batch


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


def _own_block(column: Column, values: np.ndarray) -> Stretch:
    """Return an array that is here as a stretch of a block of its own."""
    nothing = TokenBlock(*[np.empty(0, dtype=dtype) for dtype in (np.int32, np.float32, np.int32, np.int32)])
    return Stretch(dataclasses.replace(nothing, **{column: values}), column, 0, len(values))
