"""Parquet and Arrow files, unpacked once into small batches of which any one can be read alone."""

from __future__ import annotations

import itertools
import tempfile
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from grpo_rl.data.sources.jsonl import first_line
from grpo_rl.data.sources.numeric_columns import numbers_of_table, top_column, unknown
from grpo_rl.data.sources.source import LARGEST_ROW, BadRow, plain
from grpo_rl.errors import DataError

BATCH_ROWS = 64
READ_ROWS = 4096
KEPT_BATCHES = 16


class Table:
    """The rows of a parquet or Arrow file.

    A row group of parquet holds up to a million rows and can only be read whole; so does a compressed batch of Arrow. The
    file is therefore copied once, a few thousand rows at a time, into a temporary file of batches of 64 rows, and a row
    that is drawn costs reading 64. The copy has no name: it is gone with the process.
    """

    def __init__(self, name: str, path: Path, cache_dir: str | None) -> None:
        self.name, self.num_bytes = name, path.stat().st_size
        self._copy = tempfile.TemporaryFile(dir=cache_dir)  # noqa: SIM115
        try:
            schema, batches = _batches(path)
            self._ends = _repack(schema, batches, self._copy)
            self._reader = pyarrow.ipc.open_file(pyarrow.PythonFile(self._copy, mode="r"))
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            kind = "parquet" if path.suffix == ".parquet" else "Arrow"
            raise DataError(f"{name}: not a readable {kind} file: {first_line(error)}") from error
        self._kept: OrderedDict[int, Any] = OrderedDict()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def where(self, index: int) -> str:
        return f"{self.name}, row {index}"

    def row(self, index: int) -> dict[str, Any]:
        number = bisect_right(self._ends, index)
        start = self._ends[number - 1] if number else 0
        return row_of(self._batch(number), index - start, self.where(index))

    def numbers(self, key: str) -> Iterator[np.ndarray]:
        top = top_column(self._reader.schema.names, key)
        fields = [place for place, name in enumerate(self._reader.schema.names) if name == top]
        if len(fields) != 1:
            yield from unknown(len(self))
            return
        options = pyarrow.ipc.IpcReadOptions(included_fields=fields, use_threads=False)
        # Not through the Python file: Arrow reads single columns in a thread of its own, which would wait for ours at every read.
        reader = pyarrow.ipc.open_file(pyarrow.OSFile(f"/proc/self/fd/{self._copy.fileno()}"), options=options)
        for first in range(0, reader.num_record_batches, READ_ROWS // BATCH_ROWS):
            numbers = range(first, min(first + READ_ROWS // BATCH_ROWS, reader.num_record_batches))
            yield numbers_of_table(pyarrow.Table.from_batches(map(reader.get_batch, numbers)), key)

    def _batch(self, number: int) -> Any:
        if number in self._kept:
            self._kept.move_to_end(number)
        else:
            self._kept[number] = self._reader.get_batch(number)
            if len(self._kept) > KEPT_BATCHES:
                self._kept.popitem(last=False)
        return self._kept[number]


def row_of(batch: Any, place: int, where: str) -> dict[str, Any]:
    """Return row `place` of a record batch. Raises BadRow, with `where` and the column, for a value that cannot be read."""
    row = {}
    for column, values in zip(batch.schema.names, batch.slice(place, 1).columns, strict=True):
        try:
            value = values.to_pylist()[0]
        except (UnicodeDecodeError, ValueError, OverflowError) as error:
            raise BadRow(f"{where}: column {column!r} cannot be read: {first_line(error)}") from error
        if isinstance(value, bytes | bytearray) and len(value) > LARGEST_ROW:
            raise BadRow(f"{where}: column {column!r} has {len(value)} bytes; expected at most {LARGEST_ROW}")
        row[column] = plain(value)
    return row


def _batches(path: Path) -> tuple[Any, Iterator[Any]]:
    """Schema and record batches of the file, read one after the other."""
    if path.suffix == ".parquet":
        file = pyarrow.parquet.ParquetFile(path)
        return file.schema_arrow, file.iter_batches(READ_ROWS)
    source = pyarrow.OSFile(str(path))
    try:
        reader = pyarrow.ipc.open_file(source)
        return reader.schema, (reader.get_batch(number) for number in range(reader.num_record_batches))
    except pyarrow.ArrowInvalid:
        # `datasets` writes the other of Arrow's two layouts, the stream.
        source.seek(0)
        stream = pyarrow.ipc.open_stream(source)
        return stream.schema, iter(stream)


def _repack(schema: Any, batches: Iterator[Any], copy: Any) -> list[int]:
    """Write the rows in small batches; the number of rows up to the end of each."""
    first = next(batches, None)
    first = first if first is None else _decoded(first)
    sizes: list[int] = []
    with pyarrow.ipc.new_file(copy, schema if first is None else first.schema) as writer:
        for batch in itertools.chain([] if first is None else [first], map(_decoded, batches)):
            for start in range(0, batch.num_rows, BATCH_ROWS):
                small = batch.slice(start, BATCH_ROWS)
                writer.write_batch(small)
                sizes.append(small.num_rows)
    copy.flush()
    return list(itertools.accumulate(sizes))


def _decoded(batch: Any) -> Any:
    """The batch without dictionary columns: a file of the layout used here has room for one dictionary only."""
    if not any(pyarrow.types.is_dictionary(field.type) for field in batch.schema):
        return batch
    columns = [column.dictionary_decode() if pyarrow.types.is_dictionary(column.type) else column for column in batch.columns]
    return pyarrow.RecordBatch.from_arrays(columns, names=batch.schema.names)
