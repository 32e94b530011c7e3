"""Values that stay in their process's memory; the controller handles their number and place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

Block: TypeAlias = Mapping[str, Any]
"""Flat arrays by name, several responses back to back. A rollout process's: `token_ids` (int32), `logprobs`
(float32), `support_counts`, `support_ids` (int32, `types.Support`) and `text` (UTF-8 as uint8)."""


class RemoteBlock(Protocol):
    def read(self) -> Block: ...


Fetch: TypeAlias = Callable[[Sequence[Any]], Sequence[Block]]
"""Returns the blocks of some `RemoteBlock`s, all fetched at once."""


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """One response's part of a block's array, read when its values are used; numpy takes it for an array."""

    block: Block | RemoteBlock
    name: str
    start: int
    length: int
    finite: bool = True

    def __len__(self) -> int:
        return self.length

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        block = self.block if isinstance(self.block, Mapping) else self.block.read()
        return np.array(block[self.name][self.start : self.start + self.length], dtype=dtype, copy=copy)

    def __iter__(self) -> Iterator[Any]:
        return iter(np.asarray(self))

    def tolist(self) -> list[Any]:
        return np.asarray(self).tolist()

    def same_place(self, other: object) -> bool:
        if not isinstance(other, View):
            return False
        return self.block is other.block and (self.name, self.start, self.length) == (other.name, other.start, other.length)


@dataclass(frozen=True, slots=True, eq=False)
class TextView(View):
    def __str__(self) -> str:
        return np.asarray(self).tobytes().decode("utf-8", "surrogatepass")

    def __eq__(self, other: object) -> bool:
        return str(self) == str(other)

    __hash__ = None  # type: ignore[assignment]


def encode_text(text: str) -> bytes:
    """A lone surrogate, which a tokenizer may produce, is kept."""
    return text.encode("utf-8", "surrogatepass")


Array: TypeAlias = np.ndarray | View


@dataclass(frozen=True, slots=True, eq=False)
class RemoteColumn:
    """A column whose values lie in blocks of other processes: for each rollout pieces of them, in order."""

    name: str
    blocks: tuple[Block | RemoteBlock, ...]
    pieces_N: np.ndarray
    block_P: np.ndarray
    start_P: np.ndarray
    length_P: np.ndarray
    dtype: torch.dtype = torch.float32
    """The type of a column without values; others have that of their blocks."""
    finite: bool = True

    @staticmethod
    def of_pieces(
        name: str, pieces: Sequence[Array], per_rollout: Sequence[int] | np.ndarray, dtype: torch.dtype = torch.float32
    ) -> RemoteColumn:
        """Return the column of these pieces; an array that comes twice is one block."""
        number_of: dict[int, int] = {}
        blocks: list[Block | RemoteBlock] = []
        numbers, starts, lengths = [], [], []
        for piece in pieces:
            owner = piece.block if isinstance(piece, View) else piece
            number = number_of.setdefault(id(owner), len(blocks))
            if number == len(blocks):
                blocks.append(piece.block if isinstance(piece, View) else {name: piece})
            numbers.append(number)
            starts.append(piece.start if isinstance(piece, View) else 0)
            lengths.append(len(piece))
        return RemoteColumn(
            name,
            tuple(blocks),
            pieces_N=np.asarray(per_rollout, dtype=np.int64),
            block_P=np.array(numbers, dtype=np.int64),
            start_P=np.array(starts, dtype=np.int64),
            length_P=np.array(lengths, dtype=np.int64),
            dtype=dtype,
            finite=all(piece.finite for piece in pieces if isinstance(piece, View)),
        )

    @staticmethod
    def of_results(
        name: str,
        results: Sequence[Block | RemoteBlock],
        orders: Sequence[Sequence[int]],
        lengths_N: Tensor,
        *,
        finite: bool = True,
    ) -> RemoteColumn:
        """Each result has the values of its `orders` back to back; rollouts without values may be in none."""
        lengths = lengths_N.numpy()
        number_N, start_N = np.zeros((2, len(lengths)), dtype=np.int64)
        for number, order in enumerate(orders):
            index = np.asarray(order, dtype=np.int64)
            number_N[index], start_N[index] = number, lengths[index].cumsum() - lengths[index]
        ones_N = np.ones(len(lengths), dtype=np.int64)
        return RemoteColumn(name, tuple(results), ones_N, number_N, start_N, lengths, finite=finite)

    def __len__(self) -> int:
        return int(self.length_P.sum())

    def select(self, index: np.ndarray) -> RemoteColumn:
        """Return the column of these rollouts, in that order."""
        chosen = consecutive((self.pieces_N.cumsum() - self.pieces_N)[index], self.pieces_N[index])
        block_P, length_P = self.block_P[chosen], self.length_P[chosen]
        used = np.unique(block_P[length_P > 0])
        return replace(
            self,
            blocks=tuple(self.blocks[number] for number in used.tolist()),
            pieces_N=self.pieces_N[index],
            block_P=np.searchsorted(used, block_P),
            start_P=self.start_P[chosen],
            length_P=length_P,
        )

    def keep(self, kept_N: np.ndarray) -> RemoteColumn:
        """Return the column in which only the kept rollouts have values."""
        return replace(self, length_P=np.where(np.repeat(kept_N, self.pieces_N), self.length_P, 0))

    def read(self) -> Tensor:
        return read_columns({"": self}, lambda blocks: [block.read() for block in blocks])[""]

    def joined(self, blocks: Sequence[Block]) -> Tensor:
        arrays = [block[self.name] for block in blocks]
        places = zip(self.block_P.tolist(), self.start_P.tolist(), self.length_P.tolist(), strict=True)
        pieces = [arrays[number][start : start + length] for number, start, length in places if length]
        if not pieces:
            return torch.empty(0, dtype=self.dtype)
        return torch.cat(pieces) if isinstance(pieces[0], Tensor) else torch.from_numpy(np.concatenate(pieces))


Column: TypeAlias = Tensor | RemoteColumn


def values(column: Column) -> Tensor:
    return column.read() if isinstance(column, RemoteColumn) else column


def read_columns(columns: Mapping[str, Any], fetch: Fetch) -> dict[str, Tensor]:
    """Return the values of the remote columns; each block is fetched once, all of them together."""
    remote = {name: column for name, column in columns.items() if isinstance(column, RemoteColumn)}
    away = {id(block): block for column in remote.values() for block in column.blocks if not isinstance(block, Mapping)}
    values_of = dict(zip(away, fetch(list(away.values())) if away else (), strict=True))

    def here(block: Block | RemoteBlock) -> Block:
        return block if isinstance(block, Mapping) else values_of[id(block)]

    return {name: column.joined([here(block) for block in column.blocks]) for name, column in remote.items()}


def consecutive(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return start, start + 1, ... of each segment, one segment after the other."""
    return np.repeat(starts - lengths.cumsum() + lengths, lengths) + np.arange(int(lengths.sum()))
