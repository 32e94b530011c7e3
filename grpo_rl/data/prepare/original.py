"""Records of original files, each with its place for messages."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grpo_rl.config.checks.data_rules import irregular
from grpo_rl.errors import DataError

SUFFIXES = (".jsonl", ".json", ".parquet")
Placed = tuple[str, dict[str, Any]]


def read_original(paths: list[Path]) -> Iterator[Placed]:
    """Each record of the files, and of the files below the folders, with its place (`a.jsonl, line 3`).

    A folder's files come by name, the numbers in it as numbers: 9.json before 10.json. A .json file is one record or a
    list of them. Raises DataError with the place for anything that cannot be read.
    """
    for path in paths:
        if path.is_dir():
            files = sorted((file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file()), key=_natural)
            if not files:
                raise DataError(f"{path}: the folder has no {', '.join(SUFFIXES)} files")
        elif kind := irregular(path):
            raise DataError(f"{path}: is {kind}; expected a regular file or a folder")
        elif not path.is_file():
            raise DataError(f"{path}: there is no such file or folder")
        elif path.suffix not in SUFFIXES:
            raise DataError(f"{path}: an original file must end in {', '.join(SUFFIXES)}")
        else:
            files = [path]
        for file in files:
            yield from _records(file)


def _natural(path: Path) -> list[tuple[bool, int, str]]:
    parts = re.split(r"([0-9]+)", str(path))
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]


def _records(path: Path) -> Iterator[Placed]:
    if path.suffix == ".parquet":
        yield from _parquet(path)
        return
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: byte {error.start} is not UTF-8") from error
    if path.suffix == ".jsonl":
        for number, line in enumerate(text.split("\n"), start=1):
            if line.strip():
                yield from _parsed(line, f"{path}, line {number}")
        return
    yield from _parsed(text, str(path))


def _parsed(text: str, place: str) -> Iterator[Placed]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        line = f", line {error.lineno}" if "\n" in text.strip() else ""
        raise DataError(f"{place}{line}, column {error.colno}: broken JSON: {error.msg}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: broken JSON: {error}") from error
    records = enumerate(value) if isinstance(value, list) else [(None, value)]
    for index, record in records:
        where = place if index is None else f"{place}, record {index}"
        if not isinstance(record, dict):
            raise DataError(f"{where}: expected an object, found {type(record).__name__}")
        yield where, record


def _parquet(path: Path) -> Iterator[Placed]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches():
                for record in batch.to_pylist():
                    yield f"{path}, row {number}", record
                    number += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable parquet file: {str(error).splitlines()[0]}") from error
