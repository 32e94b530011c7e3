"""Rows of parquet, JSON and JSON Lines files as plain Python, each with its place for error messages."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from grpo_rl.errors import DataError

SUFFIXES = (".parquet", ".jsonl", ".json")
BYTE_ORDER_MARKS = (b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True, slots=True)
class Source:
    """The rows of one file or task, and where each one is: `unit` (row or line) and its number."""

    name: str
    rows: Sequence[dict[str, Any]]
    unit: str = "row"
    numbers: list[int] | None = None
    """Line numbers from 1; None for rows numbered from 0."""

    def where(self, index: int) -> str:
        """`train.jsonl, line 3`: the place of row `index` as a message names it."""
        return f"{self.name}, {self.unit} {index if self.numbers is None else self.numbers[index]}"


def read_file(name: str) -> Source:
    """The rows of a .parquet, .json or .jsonl file.

    Raises DataError for a missing, empty or broken file, with the line for text formats.
    """
    path = Path(name).expanduser()
    if path.suffix not in SUFFIXES:
        raise DataError(
            f"{name}: a data file must end in {', '.join(SUFFIXES)}, or be task:NAME; found {path.suffix or 'none'!r}"
        )
    if not path.is_file():
        raise DataError(f"{name}: there is no such file{_neighbours(path)}")
    if path.stat().st_size == 0:
        raise DataError(f"{name}: the file is empty")
    source = _read_parquet(name, path) if path.suffix == ".parquet" else _read_json(name, path)
    if not source.rows:
        raise DataError(f"{name}: the file has no rows")
    return source


def plain(value: Any) -> Any:
    """The value without numpy types, and with None for NaN, all the way down."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return None if isinstance(value, float) and math.isnan(value) else value


def _read_parquet(name: str, path: Path) -> Source:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
        return Source(name, [plain(row) for row in table.to_pylist()])
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{name}: not a readable parquet file: {_first_line(error)}") from error


def _read_json(name: str, path: Path) -> Source:
    content = path.read_bytes()
    if content.startswith(BYTE_ORDER_MARKS):
        raise DataError(f"{name}, line 1: the file starts with a byte-order mark; save it as UTF-8 without one")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(f"{name}, line {line}: byte {content[error.start]:#04x} is not UTF-8") from error
    if path.suffix == ".json" and text.lstrip().startswith("["):
        rows = _parse(text, name)
        for index, row in enumerate(rows):
            _check_object(row, f"{name}, row {index}")
        return Source(name, rows)
    return _read_lines(name, text)


def _read_lines(name: str, text: str) -> Source:
    rows, numbers = [], []
    # str.splitlines would also cut at U+2028 and the like, which JSON strings may hold.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        row = _parse(line, f"{name}, line {number}")
        _check_object(row, f"{name}, line {number}")
        rows.append(row)
        numbers.append(number)
    return Source(name, rows, "line", numbers)


def _parse(text: str, where: str) -> Any:
    def refuse(literal: str) -> NoReturn:
        raise ValueError(f"{literal} is not JSON; write null")

    try:
        return json.loads(text, parse_constant=refuse)
    except json.JSONDecodeError as error:
        place = where if text.count("\n") == 0 else f"{where}, line {error.lineno}"
        raise DataError(
            f"{place}, column {error.colno}: broken JSON: {error.msg}; found {_excerpt(text, error.pos)}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: broken JSON: {_first_line(error)}") from error


def _check_object(row: Any, where: str) -> None:
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected an object with the row's columns, found {type(row).__name__}")


def _excerpt(text: str, position: int) -> str:
    return repr(text[position : position + 30]) if position < len(text) else "the end"


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _neighbours(path: Path) -> str:
    """A hint with the data files that do lie in the folder, or with the missing folder itself."""
    if not path.parent.is_dir():
        return f", nor the folder {path.parent}"
    names = sorted(other.name for other in path.parent.iterdir() if other.suffix in SUFFIXES)
    return f"; the folder has {', '.join(names[:5])}" if names else "; the folder has no data files"
