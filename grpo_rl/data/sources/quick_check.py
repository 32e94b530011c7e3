"""A check of data files that takes a second: made before a model is loaded or a process started.

Each file is opened, its kind and its footer are checked, and rows are read: as many of the first ones as fit into a
share of the time, and of lines the last one, which is the one that a cut file breaks.
"""

from __future__ import annotations

import gzip
import io
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from grpo_rl.config.schema.tree import DataConfig
from grpo_rl.data.rows import LARGEST_ROW, BadRow, example
from grpo_rl.data.sources.jsonl import check_head, first_line, gzip_errors, is_array, open_json, parse_row
from grpo_rl.data.sources.locate import HUB_PREFIX, TABLE_SUFFIXES, TASK_PREFIXES, data_files, open_source
from grpo_rl.errors import ConfigError, DataError

BUDGET_S = 0.5
"""Time for the first rows of all files together. What is read beside them is bounded for each file."""
FIRST_ROWS = 8
"""Rows that are read of each file, however many files there are."""
LISTED = 10
"""Bad rows that are named, of all files together."""
LARGEST_ARRAY = 16 * 2**20
"""Bytes of a JSON array that is read; of a larger one the end is looked at."""

Found = tuple[str, dict[str, Any] | BadRow]
"""A row's place, and the row, or what is wrong with it."""
Read = Callable[[dict[str, Any], str, DataConfig], Any]
"""Checks the columns of a row at a place. Raises BadRow."""


def check_data_files(config: DataConfig, read: Read = example) -> list[str]:
    """Return the problems of the files in `data.train_files` and `data.val_files`, each with the file and its line or row.

    `read` checks one row, and raises BadRow. A file that cannot be used is always a problem. Rows that cannot be used are ten
    lines at most, and none under `data.on_bad_row=skip`. Of a task the first row is looked at; hub data sets and what a class of
    the user's own reads are not.
    """
    if config.custom_cls.path is not None:
        return []
    problems: list[str] = []
    bad_rows: list[str] = []
    files: dict[str, Path] = {}
    for name in dict.fromkeys((*config.train_files, *config.val_files)):
        if name.startswith(TASK_PREFIXES):
            bad_rows += _bad_rows(_first_row(name), config, read)
        elif not name.startswith(HUB_PREFIX):
            try:
                files |= data_files(name)
            except (DataError, ConfigError, OSError) as error:
                problems.append(str(error))
    for label, path in files.items():
        try:
            with path.open("rb") as file:
                bad_rows += _bad_rows(_rows(label, path, file, BUDGET_S / len(files)), config, read)
        except DataError as error:
            problems.append(str(error))
        except OSError as error:
            problems.append(f"{label}: cannot be read: {first_line(error)}")
    if config.on_bad_row == "skip":
        return problems
    more = len(bad_rows) - LISTED
    return [*problems, *bad_rows[:LISTED], *([f"and {more} more bad rows among those that were read"] if more > 0 else [])]


def _bad_rows(rows: Iterator[Found], config: DataConfig, read: Read) -> list[str]:
    """Return what is wrong with single rows; rows that lack the same are one line, with the first of them."""
    found: dict[str, tuple[str, int]] = {}
    for where, row in rows:
        try:
            if isinstance(row, BadRow):
                raise row
            read(row, where, config)
        except BadRow as error:
            first, number = found.get(str(error).removeprefix(where), (str(error), 0))
            found[str(error).removeprefix(where)] = (first, number + 1)
    return [first + (f" (and {number - 1} rows more)" if number > 1 else "") for first, number in found.values()]


def _first_row(task: str) -> Iterator[Found]:
    """Yield the first row of a task, whose rows are all alike; nothing where the task itself is refused."""
    try:
        source = open_source(task)
        yield source.where(0), source.row(0)
    except (ConfigError, DataError, LookupError):
        return  # reported where its rows are counted


def _rows(name: str, path: Path, file: IO[bytes], budget_s: float) -> Iterator[Found]:
    """Yield the rows that are looked at. Raises DataError for the file as a whole."""
    if path.name.endswith(TABLE_SUFFIXES):
        from grpo_rl.data.sources.tables import first_rows  # which loads pyarrow

        rows = first_rows(name, path)
    else:
        rows = _json_rows(name, path, file)
    deadline, number = time.monotonic() + budget_s, 0
    for number, row in enumerate(rows, start=1):
        yield row
        if number >= FIRST_ROWS and time.monotonic() > deadline:
            break
    else:
        if number == 0 and path.stat().st_size <= LARGEST_ARRAY:
            raise DataError(f"{name}: the file has no rows")
        return
    if not path.name.endswith((*TABLE_SUFFIXES, ".gz", ".json")):
        yield from _last_line(name, file)


def _json_rows(name: str, path: Path, file: IO[bytes]) -> Iterator[Found]:
    packed = path.name.endswith(".gz")
    with gzip_errors(name):
        lines: Any = gzip.open(file) if packed else file  # noqa: SIM115
        head = lines.read(4096)
        lines.seek(0)
    check_head(name, head)
    if not is_array(path, head):
        yield from _lines(name, lines)
    elif path.stat().st_size <= LARGEST_ARRAY:
        source = open_json(name, path, None)
        for index in range(len(source)):
            try:
                yield source.where(index), source.row(index)
            except BadRow as error:
                yield source.where(index), error
    elif not packed:
        file.seek(max(0, path.stat().st_size - 4096))
        if not file.read().rstrip().endswith(b"]"):
            raise DataError(f"{name}: the JSON array has no end: the file is cut short, or something follows the array")


def _lines(name: str, file: IO[bytes]) -> Iterator[Found]:
    start = number = 0
    while True:
        with gzip_errors(name):
            line = file.readline(LARGEST_ROW + 1)
        number += 1
        if line.strip():
            yield _line(f"{name}, line {number}", line, start)
        start += len(line)
        if not line or len(line) > LARGEST_ROW:
            return


def _line(where: str, line: bytes, start: int) -> Found:
    if len(line) > LARGEST_ROW:
        return where, BadRow(f"{where}: the line has more than {LARGEST_ROW} bytes, which is the most that a row may have")
    try:
        return where, parse_row(line.rstrip(b"\n"), where, start)
    except BadRow as error:
        return where, error


def _last_line(name: str, file: IO[bytes]) -> Iterator[Found]:
    """Yield the last line that is not blank, unless it is longer than a row may be."""
    size = file.seek(0, io.SEEK_END)
    start = max(0, size - LARGEST_ROW)
    file.seek(start)
    tail = file.read().rstrip()
    place = tail.rfind(b"\n") + 1
    if place:
        yield _line(f"{name}, the last line", tail[place:], start + place)
