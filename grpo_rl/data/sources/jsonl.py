"""JSON Lines by the offsets of their lines, and JSON arrays; strict, with the place of whatever is wrong."""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from grpo_rl.data.rows import LARGEST_ROW, BadRow, NotJson, Row
from grpo_rl.data.sources.source import Rows, RowSource, as_row
from grpo_rl.errors import DataError

BLOCK = 8 * 2**20
LARGEST_ARRAY = 512 * 2**20
"""Bytes of a .json file that is one array, which can only be read whole."""
BYTE_ORDER_MARKS = (b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")
_BLANK = b" \t\r\n"


class JsonLines(RowSource):
    """Opening notes where each line starts, 16 bytes of memory a row; a line is parsed when it is drawn.

    Blank lines are no rows. Of a larger file than `most_bytes` only its beginning is there.
    """

    def __init__(self, name: str, file: IO[bytes], num_bytes: int, most_bytes: int | None = None) -> None:
        self.name, self.num_bytes = name, num_bytes
        self._file = file
        self._starts, self._ends, self._numbers = _index(file, num_bytes if most_bytes is None else most_bytes)

    def __len__(self) -> int:
        return len(self._starts)

    def where(self, index: int) -> str:
        return f"{self.name}, line {self._numbers[index] if self._numbers is not None else index + 1}"

    def row(self, index: int) -> Row:
        start, size = self._starts[index], self._ends[index] - self._starts[index]
        where = self.where(index)
        if size > LARGEST_ROW:
            raise BadRow(f"{where}: the line has {size} bytes; expected at most {LARGEST_ROW}")
        return as_row(_parsed(os.pread(self._file.fileno(), size, start), lambda line: where, start), where)


def open_json(name: str, path: Path, most_bytes: int | None = None) -> RowSource:
    file = path.open("rb")
    head = os.pread(file.fileno(), 4096, 0)
    if head.startswith(BYTE_ORDER_MARKS):
        raise DataError(f"{name}, line 1: the file starts with a byte-order mark; save it as UTF-8 without one")
    size = path.stat().st_size
    if path.suffix != ".json" or not head.lstrip().startswith(b"["):
        return JsonLines(name, file, size, most_bytes)
    if size > LARGEST_ARRAY:
        raise DataError(
            f"{name}: a JSON array of {size} bytes can only be read whole; over {LARGEST_ARRAY} bytes write one object a line "
            "(.jsonl), or parquet"
        )
    return Rows(name, _parsed(os.pread(file.fileno(), size, 0), lambda line: f"{name}, line {line}"), size)


def _parsed(data: bytes, where: Callable[[int], str], start: int = 0) -> Any:
    """`where` gives the place of a line, `start` that of the data in the file. Raises BadRow and nothing else."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        place, byte = where(data.count(b"\n", 0, error.start) + 1), data[error.start]
        problem = f"byte {byte:#04x} is not UTF-8 (byte {start + error.start} of the file); expected UTF-8 text"
        raise BadRow(f"{place}: {problem}") from error
    try:
        if "\0" in text:
            raise json.JSONDecodeError("a NUL byte", text, text.index("\0"))
        return _DECODER.decode(text)
    except json.JSONDecodeError as error:
        byte = start + len(text[: error.pos].encode("utf-8"))
        problem = repr(text[error.pos : error.pos + 30]) if error.pos < len(text) else "the end"
        place = f"{where(error.lineno)}, column {error.colno}"
        raise BadRow(f"{place}: broken JSON: {error.msg}; found {problem} (byte {byte} of the file)") from error
    except (ValueError, RecursionError) as error:
        raise BadRow(f"{where(1)}: broken JSON: {first_line(error)}") from error


def _index(file: IO[bytes], most_bytes: int) -> tuple[array[int], array[int], array[int] | None]:
    """Start and end in bytes of each line that is not blank, and its number from 1; None if none is blank."""
    starts, ends, numbers = array("q"), array("q"), array("q")
    start = end = 0
    number, is_blank = 1, True

    def note(line_end: int) -> None:
        if not is_blank:
            starts.append(start)
            ends.append(line_end)
            numbers.append(number)

    file.seek(0)
    while end < most_bytes and (piece := file.readline(BLOCK)):  # of a longer line one piece after another
        end += len(piece)
        is_blank = is_blank and not piece.strip(_BLANK)
        if piece.endswith(b"\n"):
            note(end - 1)
            start, number, is_blank = end, number + 1, True
    if not (starts and file.read(1)):  # else reading has stopped inside of this line
        note(end)
    return starts, ends, numbers if numbers and numbers[-1] > len(numbers) else None


def _pairs(pairs: list[tuple[str, Any]]) -> Row:
    row = dict(pairs)
    if len(row) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                # Reported where the whole row is checked: there the place is known.
                row[key] = NotJson(f"the key {key!r} is there twice", "keep one")
            seen.add(key)
    return row


_DECODER = json.JSONDecoder(
    parse_constant=lambda literal: NotJson(f"{literal} is not JSON", "write null"), object_pairs_hook=_pairs
)


def first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
