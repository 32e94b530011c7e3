"""One column of numbers from all rows of a source, without making rows: what a curriculum orders by.

A value that is not surely a finite number is NaN here, and the row has to be read by itself for the reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

READ_AT_ONCE = 1_000


def unknown(length: int) -> Iterator[np.ndarray]:
    """Blocks for so many rows of which each has to be read by itself."""
    for start in range(0, length, READ_AT_ONCE):
        yield np.full(min(READ_AT_ONCE, length - start), np.nan)


def number_in(row: Mapping[str, Any], key: str) -> float:
    """The number in the column `key`, or at the dotted path into it; NaN for anything else."""
    value: Any = row.get(key) if key in row else row
    if value is row:
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
    return finite(value)


def finite(value: Any) -> float:
    """The value as a float; NaN for whatever is no finite number."""
    # Not isinstance: true is no number here.
    if type(value) not in (int, float):
        return math.nan
    try:
        number = float(value)
    except OverflowError:
        return math.nan
    return number if math.isfinite(number) else math.nan


def numbers_of_table(table: Any, key: str) -> np.ndarray:
    """Column `key` of an Arrow table or batch, or the field that the dotted path leads to; NaN where it is no finite number."""
    import pyarrow

    column = _column(table, key)
    if column is None or not (pyarrow.types.is_integer(column.type) or pyarrow.types.is_floating(column.type)):
        return np.full(table.num_rows, np.nan)
    # As Python's float() rounds: whole numbers beyond 2**53 are no error.
    values = np.array(column.cast(pyarrow.float64(), safe=False).to_numpy(zero_copy_only=False), dtype=np.float64)
    values[~np.isfinite(values)] = np.nan
    return values


def top_column(names: Sequence[str], key: str) -> str:
    """The column of a table that holds `key`: the one called so, or the first name of the path."""
    return key if key in names else key.partition(".")[0]


def _column(table: Any, key: str) -> Any:
    """The values as one array; None where there is no such field, or two."""
    import pyarrow
    import pyarrow.compute

    top = top_column(table.schema.names, key)
    if table.schema.get_field_index(top) < 0:
        return None
    column = table.column(table.schema.get_field_index(top))
    for part in [] if key == top else key.split(".")[1:]:
        if not pyarrow.types.is_struct(column.type) or column.type.get_field_index(part) < 0:
            return None
        column = pyarrow.compute.struct_field(column, part)
    return column.combine_chunks() if isinstance(column, pyarrow.ChunkedArray) else column
