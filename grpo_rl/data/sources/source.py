"""A source of rows: its length is known at once, a row is read when it is asked for."""

from __future__ import annotations

import difflib
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, Protocol

import numpy as np

from grpo_rl.data.sources.numeric_columns import READ_AT_ONCE, numbers_of_table, top_column, unknown
from grpo_rl.errors import DataError

LARGEST_ROW = 8 * 2**20
"""Bytes of one row, or characters of one text in it. A longer one is a mistake, and would hold up the whole run."""
DEEPEST_ROW = 64
"""Lists and objects within each other in one row."""


class BadRow(DataError):
    """One row that cannot be used, while the rest of its file may: what `data.on_bad_row=skip` leaves out."""


class Source(Protocol):
    """The rows of one file or task."""

    name: str
    num_bytes: int
    """Size of the file as it lies on the disk; 0 for rows that are in no file."""

    def __len__(self) -> int: ...

    def row(self, index: int) -> dict[str, Any]:
        """Return row `index`. Raises BadRow, with its place."""
        ...

    def where(self, index: int) -> str:
        """Return the place of row `index` as a message names it: `train.jsonl, line 3`."""
        ...

    def numbers(self, key: str) -> Iterator[np.ndarray]:
        """Column `key`, or the dotted path into it, of all rows in blocks; NaN where `row` has to be asked."""
        ...


class Rows:
    """Rows that are in memory, or in whatever else has a length and can be indexed: tasks, hub data, a user's class."""

    def __init__(self, name: str, rows: Sequence[Any], num_bytes: int = 0) -> None:
        self.name, self.num_bytes = name, num_bytes
        self._rows: Any = rows

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> dict[str, Any]:
        row = self._rows[index]
        if not isinstance(row, dict):
            raise BadRow(f"{self.where(index)}: expected an object with the row's columns, found {type(row).__name__}")
        return {key: plain(value) for key, value in row.items()}

    def where(self, index: int) -> str:
        return f"{self.name}, row {index}"

    def numbers(self, key: str) -> Iterator[np.ndarray]:
        return unknown(len(self))


class HubRows(Rows):
    """Rows of a `datasets.Dataset`: on the disk, in columns of Arrow."""

    def numbers(self, key: str) -> Iterator[np.ndarray]:
        top = top_column(self._rows.column_names, key)
        if top not in self._rows.column_names:
            yield from unknown(len(self))
            return
        column = self._rows.select_columns([top]).with_format("arrow")
        for start in range(0, len(self), READ_AT_ONCE):
            yield numbers_of_table(column[start : start + READ_AT_ONCE], key)


class Joined:
    """Several sources one after the other."""

    def __init__(self, name: str, parts: Sequence[Source]) -> None:
        self.name = name
        self.parts = list(parts)
        self.num_bytes = sum(part.num_bytes for part in parts)
        self._ends = list(accumulate(map(len, parts)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def row(self, index: int) -> dict[str, Any]:
        part, inside = self._place(index)
        return part.row(inside)

    def where(self, index: int) -> str:
        part, inside = self._place(index)
        return part.where(inside)

    def numbers(self, key: str) -> Iterator[np.ndarray]:
        for part in self.parts:
            yield from part.numbers(key)

    def _place(self, index: int) -> tuple[Source, int]:
        number = bisect_right(self._ends, index)
        return self.parts[number], index - (self._ends[number - 1] if number else 0)


def read_numbers(
    parts: Sequence[Source],
    key: str,
    chosen: np.ndarray,
    one: Callable[[int], float],
    note: Callable[[int], None] | None = None,
) -> np.ndarray:
    """Column `key` of the rows `chosen` (ascending places in all `parts` together), in 8 bytes a row.

    `one(row)`, with the number of a row among the chosen ones, is called where the fast reading gave no result. `note`
    is called with the number of rows that were done since its last call.
    """
    values = np.full(len(chosen), np.nan)
    start = done = 0
    for block in (block for part in parts for block in part.numbers(key)):
        end = int(np.searchsorted(chosen, start + len(block)))
        values[done:end] = block[chosen[done:end] - start]
        for row in (np.flatnonzero(np.isnan(values[done:end])) + done).tolist():
            values[row] = one(row)
        if note is not None:
            note(end - done)
        start, done = start + len(block), end
        if done == len(chosen):
            break
    return values


def plain(value: Any) -> Any:
    """The value without numpy types, and with None for NaN, all the way down."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return None if isinstance(value, float) and math.isnan(value) else value


class NotJson:
    """Stands in a parsed row for something that JSON does not have or that has no single meaning."""

    def __init__(self, found: str, advice: str) -> None:
        self.found, self.advice = found, advice


def check_values(value: Any, where: str, column: str = "", depth: int = 0) -> None:
    """Raise BadRow, with the column, for what no later part could carry: lone surrogates, NUL, infinity, depth, a huge text."""
    if isinstance(value, str):
        _check_text(value, where, column)
    elif isinstance(value, NotJson):
        raise BadRow(f"{where}: broken JSON: {value.found}, in column {column!r}; {value.advice}")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise BadRow(f"{where}: column {column!r} is {value} (float); expected a finite number")
    elif isinstance(value, (dict, list)):
        if depth == DEEPEST_ROW:
            raise BadRow(f"{where}: column {column[:40]!r}... is nested deeper than {DEEPEST_ROW} lists and objects")
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            if isinstance(key, str):
                _check_text(key, where, column or "(its name)")
            inside = f"{column}[{key}]" if isinstance(value, list) else f"{column}.{key}" if column else str(key)
            check_values(item, where, inside, depth + 1)


def _check_text(text: str, where: str, column: str) -> None:
    if len(text) > LARGEST_ROW:
        raise BadRow(f"{where}: column {column!r} has {len(text)} characters; expected at most {LARGEST_ROW}")
    if "\0" in text:
        raise BadRow(f"{where}: column {column!r} has a NUL character at {text.index(chr(0))}; expected text without")
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise BadRow(
                f"{where}: column {column!r} has the lone surrogate \\u{ord(text[error.start]):04x} at {error.start}; "
                "expected whole characters (half of a pair was cut off)"
            ) from error


def wrong(where: str, column: str, found: Any, expected: str) -> BadRow:
    """The error for a column of another type or value."""
    shown = repr(found)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return BadRow(f"{where}: column {column!r} is {shown} ({type(found).__name__}); expected {expected}")


def near(name: str, names: Sequence[str]) -> str:
    """` Did you mean 'prompt'?`, or nothing."""
    close = difflib.get_close_matches(name, names, n=5, cutoff=0.5)
    return f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
