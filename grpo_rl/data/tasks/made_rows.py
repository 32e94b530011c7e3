"""Rows that are made when they are asked for, and the split that each belongs to."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

Row = dict[str, Any]
VALIDATION_SHARE = 5
"""One problem in so many belongs to the validation split."""


class LazyRows(Sequence[Row]):
    """`num_rows` rows; `make(index)` makes one, which must depend on nothing but its index. Nothing is kept."""

    def __init__(self, num_rows: int, make: Callable[[int], Row]) -> None:
        self._num_rows = num_rows
        self._make = make

    def __len__(self) -> int:
        return self._num_rows

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self._make(position) for position in range(*index.indices(self._num_rows))]
        if not -self._num_rows <= index < self._num_rows:
            raise IndexError(index)
        return self._make(index % self._num_rows)


def split_of_text(text: str) -> Literal["train", "val"]:
    """Return the split that a problem belongs to, by the hash of the text that distinguishes it from others."""
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return "val" if int.from_bytes(digest[:8], "big") % VALIDATION_SHARE == 0 else "train"
