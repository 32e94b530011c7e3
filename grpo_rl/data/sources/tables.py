"""Parquet, Arrow and CSV files as one table that the system pages in."""

from __future__ import annotations

import csv
import io
import itertools
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.csv
import pyarrow.parquet

from grpo_rl.data.rows import LARGEST_ROW, BadRow, Row, plain
from grpo_rl.data.sources.jsonl import first_line
from grpo_rl.data.sources.source import Rows
from grpo_rl.errors import DataError
from grpo_rl.run_files import write_whole

READ_ROWS = 4096


class Table(Rows):
    """The rows of an Arrow table, which may be larger than memory."""

    def row(self, index: int) -> Row:
        row, where = {}, self.where(index)
        for column, values in zip(self._rows.column_names, self._rows.columns, strict=True):
            try:
                value = values[index].as_py(maps_as_pydicts="strict")
            except (UnicodeDecodeError, ValueError, OverflowError, KeyError) as error:
                raise BadRow(f"{where}: column {column!r} cannot be read: {first_line(error)}") from error
            if isinstance(value, bytes | bytearray) and len(value) > LARGEST_ROW:
                raise BadRow(f"{where}: column {column!r} has {len(value)} bytes; expected at most {LARGEST_ROW}")
            row[column] = _without_fillers(plain(value))
        return row


def open_table(name: str, path: Path, num_rows: int | None = None) -> Table:
    """All rows, or up to `num_rows` of the first ones.

    A row group of parquet, up to a million rows, and a compressed batch of Arrow can only be read whole.
    The file is therefore copied once into an Arrow file without a name in the system's temporary folder.
    """
    copy = None if num_rows is not None else tempfile.TemporaryFile()  # noqa: SIM115
    try:
        schema, batches = _batches(path, num_rows or READ_ROWS)
        if copy is None:
            return Table(name, pyarrow.Table.from_batches(itertools.islice(batches, 1), schema))
        with pyarrow.ipc.new_stream(copy, schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
        copy.flush()
        table = pyarrow.ipc.open_stream(pyarrow.memory_map(f"/proc/self/fd/{copy.fileno()}")).read_all()
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        kind = {".parquet": "parquet", ".csv": "CSV"}.get(path.suffix, "Arrow")
        raise DataError(f"{name}: not a readable {kind} file: {first_line(error)}") from error
    return Table(name, table, path.stat().st_size)


def _without_fillers(value: Any, in_list: bool = False) -> Any:
    """In lists Arrow gives every object the fields of all others."""
    if isinstance(value, list):
        return [_without_fillers(part, in_list=True) for part in value]
    if isinstance(value, dict):
        parts = value.items()
        return {key: _without_fillers(part, in_list) for key, part in parts if part is not None or not in_list}
    return value


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """The file is complete or not there at all."""
    try:
        if path.suffix == ".jsonl":
            content = "".join(json.dumps(row) + "\n" for row in rows).encode()
        else:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), buffer := io.BytesIO())
            content = buffer.getvalue()
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: the rows have no common columns ({first_line(error)}); give a .jsonl") from error
    write_whole(path, content, durable=True)


def _batches(path: Path, num_rows: int) -> tuple[Any, Iterator[Any]]:
    """Batches of parquet have `num_rows` rows."""
    if path.suffix == ".parquet":
        # Without a buffer of its own a column of a row group, maybe gigabytes, would be read whole.
        file = pyarrow.parquet.ParquetFile(path, buffer_size=2**20, pre_buffer=False)
        return file.schema_arrow, file.iter_batches(num_rows)
    if path.suffix == ".csv":
        return _csv_batches(path)
    source = pyarrow.memory_map(str(path))
    try:
        reader = pyarrow.ipc.open_file(source)
        return reader.schema, (reader.get_batch(number) for number in range(reader.num_record_batches))
    except pyarrow.ArrowInvalid:
        # `datasets` writes the other of Arrow's two layouts, the stream.
        source.seek(0)
        stream = pyarrow.ipc.open_stream(source)
        return stream.schema, iter(stream)


def _csv_batches(path: Path) -> tuple[Any, Iterator[Any]]:
    """Every value is text: 007 and 1e3 are what was written."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        names = next(csv.reader(file), [])
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"two columns are called {twice!r}")
    reader = pyarrow.csv.open_csv(
        path,
        read_options=pyarrow.csv.ReadOptions(block_size=2 * LARGEST_ROW),
        parse_options=pyarrow.csv.ParseOptions(newlines_in_values=True),
        convert_options=pyarrow.csv.ConvertOptions(
            column_types=dict.fromkeys(names, pyarrow.string()), strings_can_be_null=False
        ),
    )
    return reader.schema, iter(reader)
