"""Blocks of tokens that rollout processes packed, and the stretches of them that belong to single responses.

What a rollout costs to move is its token ids, its log-probs and its text. They stay where the rollout process left them; what passes
through the controller is their number and their place. The values are read where something computes with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class TokenBlock:
    """The tokens of several responses back to back. It is the source of its own stretches, too."""

    token_ids: np.ndarray
    """int32 [tokens]"""
    logprobs: np.ndarray
    """float32 [tokens]"""
    support_counts: np.ndarray
    """int32: how many tokens each one was sampled from; nothing for responses without a support."""
    support_ids: np.ndarray
    """int32 [support_counts.sum()]"""
    text: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.uint8))
    """uint8: the responses' texts in UTF-8, of which each has a stretch of its own length."""

    def read(self) -> TokenBlock:
        """Return the block, which is here already."""
        return self


class Source(Protocol):
    """A block that may lie in another process's memory."""

    def read(self) -> TokenBlock:
        """Return the block, fetched if need be."""


Column: TypeAlias = Literal["token_ids", "logprobs", "support_counts", "support_ids", "text"]


@dataclass(frozen=True, slots=True, eq=False)
class Stretch:
    """A part of one column of a block: its length is known, its values are read when something asks for them.

    numpy's functions take it for an array (`__array__`).
    """

    source: Source
    column: Column
    start: int
    length: int
    finite: bool = True
    """False where the process that packed the values found one that is not finite."""

    def __len__(self) -> int:
        return self.length

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        values: np.ndarray = getattr(self.source.read(), self.column)[self.start : self.start + self.length]
        return np.array(values, dtype=dtype, copy=copy)

    def __iter__(self) -> Iterator[Any]:
        return iter(np.asarray(self))

    def tolist(self) -> list[Any]:
        """Return the values as Python's numbers."""
        return np.asarray(self).tolist()

    def same_place(self, other: object) -> bool:
        """Return whether both are the same part of the same block."""
        return isinstance(other, Stretch) and self.source is other.source and self._place == other._place

    @property
    def _place(self) -> tuple[str, int, int]:
        return self.column, self.start, self.length


def encode_text(text: str) -> bytes:
    """Return a text as a block contains it. A lone surrogate, which a tokenizer may produce, is kept."""
    return text.encode("utf-8", "surrogatepass")


def decode_text(place: Stretch) -> str:
    """Return the text of a stretch of the column `text`."""
    return np.asarray(place).tobytes().decode("utf-8", "surrogatepass")


Array: TypeAlias = np.ndarray | Stretch
"""One-dimensional values: at hand, or to be read where they lie."""


@dataclass(frozen=True, slots=True)
class Held:
    """The places of a batch's tokens, where its own columns of tokens are without values: one entry per rollout.

    The log-probs and supports are those of whole responses, whichever of their tokens are trained.
    """

    prompt_ids: tuple[np.ndarray, ...]
    response_ids: tuple[Array, ...]
    logprobs: tuple[Array, ...]
    support_counts: tuple[Array, ...] | None = None
    """The supports of the tokens, where something was left out of the sampling; nothing for an empty response."""
    support_ids: tuple[Array, ...] | None = None

    @property
    def finite(self) -> bool:
        """Return whether every log-prob was found finite by the process that packed it."""
        return all(one.finite if isinstance(one, Stretch) else bool(np.isfinite(one).all()) for one in self.logprobs)

    def select(self, index: Sequence[int]) -> Held:
        """Return the entries of some rollouts, in that order."""

        def chosen(column: tuple[Any, ...] | None) -> Any:
            return None if column is None else tuple(column[i] for i in index)

        return Held(
            chosen(self.prompt_ids),
            chosen(self.response_ids),
            chosen(self.logprobs),
            chosen(self.support_counts),
            chosen(self.support_ids),
        )
