"""JSON Lines by the offsets of their lines, and JSON arrays; strict, with the place of whatever is wrong."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np

from grpo_rl.data.rows import LARGEST_ROW, BadRow, NotJson
from grpo_rl.data.sources.source import Rows, RowSource
from grpo_rl.errors import DataError

BLOCK = 8 * 2**20
LARGEST_ARRAY = 512 * 2**20
"""Bytes of a .json file that is one array, which can only be read whole."""
BYTE_ORDER_MARKS = (b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")
_BLANK = (0x09, 0x0A, 0x0D, 0x20)


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

    def row(self, index: int) -> dict[str, Any]:
        start, size = int(self._starts[index]), int(self._ends[index] - self._starts[index])
        where = self.where(index)
        if size > LARGEST_ROW:
            raise BadRow(f"{where}: the line has {size} bytes; expected at most {LARGEST_ROW}")
        return parse_row(os.pread(self._file.fileno(), size, start), where, start)


def open_json(name: str, path: Path, most_bytes: int | None = None) -> RowSource:
    file = path.open("rb")
    head = os.pread(file.fileno(), 4096, 0)
    if not head:
        raise DataError(f"{name}: the file is empty")
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


def parse_row(data: bytes, where: str, start: int = 0) -> dict[str, Any]:
    """`start` is the line's place in the file."""
    row = _parsed(data, lambda line: where, start)
    if not isinstance(row, dict):
        raise BadRow(f"{where}: expected an object with the row's columns, found {type(row).__name__}")
    return row


def _parsed(data: bytes, where: Callable[[int], str], start: int = 0) -> Any:
    """`where` gives the place of a line. Raises BadRow and nothing else."""
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


def _index(file: IO[bytes], most_bytes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Start and end in bytes of each line that is not blank, and its number from 1; None if none is blank."""
    starts: list[np.ndarray] = []
    firsts: list[np.ndarray] = []
    base, at_start = 0, True
    file.seek(0)
    while base < most_bytes and (block := file.read(BLOCK)):
        view = np.frombuffer(block, dtype=np.uint8)
        local = np.flatnonzero(view == 0x0A) + 1
        ends_with_newline = len(local) > 0 and int(local[-1]) == len(view)
        local = local[:-1] if ends_with_newline else local
        local = np.concatenate([[0], local]) if at_start else local
        starts.append(local.astype(np.int64) + base)
        firsts.append(view[local])
        base, at_start = base + len(view), ends_with_newline
    all_starts = np.concatenate(starts)
    ends = np.append(all_starts[1:] - 1, base - at_start)
    keep = ~np.isin(np.concatenate(firsts), _BLANK)
    if not at_start and len(ends) > 1 and file.read(1):
        all_starts, ends, keep = all_starts[:-1], ends[:-1], keep[:-1]
    for line in np.flatnonzero(~keep).tolist():
        keep[line] = _has_text(file, int(all_starts[line]), int(ends[line]))
    if keep.all():
        return all_starts, ends, None
    return all_starts[keep], ends[keep], np.flatnonzero(keep) + 1


def _has_text(file: IO[bytes], start: int, end: int) -> bool:
    blocks = (os.pread(file.fileno(), min(BLOCK, end - offset), offset) for offset in range(start, end, BLOCK))
    return any(block.strip() for block in blocks)


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
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
