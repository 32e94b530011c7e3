"""A check of data files that takes a second: made before a model is loaded or a process started.

Each file is opened, its kind and its footer are checked, and rows are read: as many of the first ones as fit into a
share of the time, then some that are spread over the rest, and the last one, which is the one that a cut file breaks.
"""

from __future__ import annotations

import gzip
import io
import itertools
import json
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from grpo_rl.config.schema.tree import DataConfig
from grpo_rl.data.rows import example
from grpo_rl.data.sources.jsonl import check_head, first_line, is_array, open_json, parse_row
from grpo_rl.data.sources.locate import HUB_PREFIX, TABLE_SUFFIXES, TASK_PREFIXES, data_files, open_source
from grpo_rl.data.sources.source import LARGEST_ROW, BadRow
from grpo_rl.errors import ConfigError, DataError

BUDGET_S = 0.5
"""Time for the first rows of all files together. What is read beside them is bounded for each file."""
FIRST_ROWS = 8
"""Rows that are read of each file, however many files there are."""
SPREAD_ROWS = 24
"""Rows that are read in the rest of a file which the time did not suffice for."""
LISTED = 10
"""Bad rows that are named, of all files together."""
UNPACKED = 16 * 2**20
"""Bytes of a .gz that are unpacked."""
LARGEST_ARRAY = 16 * 2**20
"""Bytes of a JSON array that is read; of a larger one the two ends are looked at."""
COUNTED = 2**30
"""Bytes in which line ends are counted, to name the line of a bad row that was found in the middle of a file."""

Found = tuple[str, dict[str, Any] | BadRow]
"""A row's place, and the row, or what is wrong with it."""
Read = Callable[[dict[str, Any], str, DataConfig], Any]
"""Checks the columns of a row at a place. Raises BadRow."""


def check_data_files(config: DataConfig, read: Read = example) -> list[str]:
    """Return the problems of the files in `data.train_files` and `data.val_files`, each with the file and its line or row.

    `read` checks one row, and raises BadRow.

    A file that cannot be used is always one. Rows that cannot be used are ten lines at most, and none under
    `data.on_bad_row=skip`. Of a task the first row is looked at; hub data sets and what a class of the user's own reads are not.
    """
    if config.custom_cls.path is not None:
        return []
    problems, bad_rows = [], []
    names = dict.fromkeys((*config.train_files, *config.val_files))
    files: dict[str, Path] = {}
    for name in names:
        if name.startswith(TASK_PREFIXES):
            bad_rows += _bad_first_row(name, config, read)
        elif not name.startswith(HUB_PREFIX):
            try:
                files |= data_files(name)
            except (DataError, ConfigError, OSError) as error:
                problems.append(str(error))
    for label, path in files.items():
        try:
            bad_rows += _bad_rows(label, path, config, BUDGET_S / len(files), read)
        except DataError as error:
            problems.append(str(error))
        except OSError as error:
            problems.append(f"{label}: cannot be read: {first_line(error)}")
    if config.on_bad_row == "skip":
        return problems
    more = len(bad_rows) - LISTED
    return [*problems, *bad_rows[:LISTED], *([f"and {more} more bad rows among those that were read"] if more > 0 else [])]


def _bad_first_row(name: str, config: DataConfig, read: Read) -> list[str]:
    """Return what is wrong with the first row of a task, whose rows are all alike; nothing where the task itself is refused."""
    try:
        source = open_source(name)
        row = source.row(0)
    except (ConfigError, DataError, LookupError):
        return []  # reported where its rows are counted
    try:
        read(row, source.where(0), config)
    except BadRow as error:
        return [str(error)]
    return []


def _bad_rows(name: str, path: Path, config: DataConfig, budget_s: float, read: Read) -> list[str]:
    """Return what is wrong with single rows of a file. Raises DataError for the file as a whole."""
    found: dict[str, tuple[str, int]] = {}
    num_rows = 0
    with path.open("rb") as file:
        rows = (
            _table_rows(name, path, budget_s) if path.name.endswith(TABLE_SUFFIXES) else _json_rows(name, path, file, budget_s)
        )
        for where, row in rows:
            num_rows += 1
            try:
                if isinstance(row, BadRow):
                    raise row
                read(row, where, config)
            except BadRow as error:
                # Rows that lack the same are one line, with the first of them.
                first, number = found.get(str(error).removeprefix(where), (str(error), 0))
                found[str(error).removeprefix(where)] = (first, number + 1)
    if num_rows == 0:
        raise DataError(f"{name}: the file has no rows")
    return [first + (f" (and {number - 1} rows more)" if number > 1 else "") for first, number in found.values()]


def _json_rows(name: str, path: Path, file: IO[bytes], budget_s: float) -> Iterator[Found]:
    size = path.stat().st_size
    whole = True
    if path.name.endswith(".gz"):
        content, whole = _unpacked(name, path)
        file, size = io.BytesIO(content), len(content)
    head = file.read(4096)
    check_head(name, head)
    file.seek(0)
    if not is_array(path, head):
        yield from _lines(name, file, size, budget_s)
    elif size > LARGEST_ARRAY or not whole:
        yield _first_element(f"{name}, row 0", file.read(LARGEST_ROW).decode("utf-8", "replace"))
        file.seek(max(0, size - 4096))
        if whole and not file.read().rstrip().endswith(b"]"):
            raise DataError(f"{name}: the JSON array has no end: the file is cut short, or something follows the array")
    else:
        source = open_json(name, path, None)
        for index in range(len(source)):
            try:
                yield source.where(index), source.row(index)
            except BadRow as error:
                yield source.where(index), error


def _first_element(where: str, head: str) -> Found:
    try:
        row, _ = json.JSONDecoder().raw_decode(head.lstrip()[1:].lstrip())
    except (ValueError, RecursionError) as error:
        return where, BadRow(f"{where}: broken JSON: {first_line(error)}")
    found = f"{where}: expected an object with the row's columns, found {type(row).__name__}"
    return where, row if isinstance(row, dict) else BadRow(found)


def _unpacked(name: str, path: Path) -> tuple[bytes, bool]:
    """The first 16 MiB of a .gz up to the last whole line, and whether that is all. Raises DataError for a broken one."""
    try:
        with gzip.open(path, "rb") as packed:
            content = packed.read(UNPACKED + 1)
    except EOFError as error:
        raise DataError(f"{name}: the file is cut short: the end of the gzip data is missing") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{name}: not readable gzip data: {first_line(error)}") from error
    if len(content) <= UNPACKED:
        return content, True
    return content[: content.rfind(b"\n") + 1] or content, False


def _lines(name: str, file: IO[bytes], size: int, budget_s: float) -> Iterator[Found]:
    """Lines of a file: the first ones, then some that are spread over the rest, and the last."""
    deadline = time.monotonic() + budget_s
    for number in itertools.count(1):
        if number > FIRST_ROWS and time.monotonic() > deadline:
            break
        start = file.tell()
        line = file.readline(LARGEST_ROW + 1)
        if not line:
            return
        yield from _line(f"{name}, line {number}", line, start)
        if len(line) > LARGEST_ROW:
            break
    done = file.tell()
    last = _last_line(file, done, size)
    starts = {_next_line(file, place) for place in np.linspace(done, size, SPREAD_ROWS, dtype=np.int64).tolist()}
    for start in sorted(start for start in {*starts, last} if done <= start < size):
        file.seek(start)
        line = file.readline(LARGEST_ROW + 1)
        found = list(_line(f"{name}, byte {start}", line, start))
        if any(isinstance(row, BadRow) for _, row in found) and start < COUNTED:
            file.seek(0)
            found = list(_line(f"{name}, line {file.read(start).count(10) + 1}", line, start))
        yield from found


def _line(where: str, line: bytes, start: int) -> Iterator[Found]:
    if len(line) > LARGEST_ROW:
        yield where, BadRow(f"{where}: the line has more than {LARGEST_ROW} bytes, which is the most that a row may have")
    elif line.strip():
        try:
            yield where, parse_row(line.rstrip(b"\n"), where, start)
        except BadRow as error:
            yield where, error


def _next_line(file: IO[bytes], place: int) -> int:
    """The start of the first line after `place`."""
    file.seek(place)
    file.readline(LARGEST_ROW)
    return file.tell()


def _last_line(file: IO[bytes], done: int, size: int) -> int:
    """The start of the last line that is not blank; `size` where it is longer than a row may be."""
    start = max(done, size - LARGEST_ROW - 1)
    file.seek(max(0, start - 1))
    tail = file.read().rstrip()
    before = tail.rfind(b"\n")
    return max(0, start - 1) + before + 1 if before >= 0 else size


def _table_rows(name: str, path: Path, budget_s: float) -> Iterator[Found]:
    """Rows of a parquet or Arrow file: the first ones, then the first of some row groups or batches in the rest."""
    import pyarrow

    from grpo_rl.data.sources.tables import row_of

    deadline = time.monotonic() + budget_s
    try:
        for start, batch in _parquet_batches(path, deadline) if path.suffix == ".parquet" else _arrow_batches(path, deadline):
            for place in range(batch.num_rows):
                if place >= FIRST_ROWS and time.monotonic() > deadline:
                    break
                where = f"{name}, row {start + place}"
                try:
                    yield where, row_of(batch, place, where)
                except BadRow as error:
                    yield where, error
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        kind = "parquet" if path.suffix == ".parquet" else "Arrow"
        raise DataError(f"{name}: not a readable {kind} file: {first_line(error)}") from error


def _parquet_batches(path: Path, deadline: float) -> Iterator[tuple[int, Any]]:
    """Small batches of rows with the number of their first row, from the first row groups and some of the others."""
    import pyarrow.parquet

    # Without a buffer of its own a column of a row group, which may be gigabytes, would be read whole for its first rows.
    with pyarrow.parquet.ParquetFile(path, buffer_size=2**20, pre_buffer=False) as file:
        sizes = [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
        starts = [0, *itertools.accumulate(sizes)]
        for group in range(len(sizes)):
            start = starts[group]
            for batch in file.iter_batches(64, row_groups=[group]):
                yield start, batch
                start += batch.num_rows
                if time.monotonic() > deadline:
                    break
            if time.monotonic() > deadline:
                break
        else:
            return
        for other in (
            np.unique(np.linspace(group + 1, len(sizes) - 1, 4, dtype=np.int64)).tolist() if group + 1 < len(sizes) else ()
        ):
            batch = next(iter(file.iter_batches(FIRST_ROWS, row_groups=[other])), None)
            if batch is not None:
                yield starts[other], batch


def _arrow_batches(path: Path, deadline: float) -> Iterator[tuple[int, Any]]:
    import pyarrow

    with pyarrow.memory_map(str(path)) as source:
        try:
            reader = pyarrow.ipc.open_file(source)
            batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
        except pyarrow.ArrowInvalid:
            # `datasets` writes the other of Arrow's two layouts, the stream.
            source.seek(0)
            batches = iter(pyarrow.ipc.open_stream(source))
        start = 0
        for batch in batches:
            yield start, batch
            start += batch.num_rows
            if time.monotonic() > deadline:
                return
