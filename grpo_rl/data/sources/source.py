"""Sources of rows: each knows its length at once, and reads a row when it is asked for it."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from grpo_rl.config.schema.tree import DataConfig
from grpo_rl.data.rows import BadRow, Row, plain
from grpo_rl.errors import ConfigError, DataError, raised_in
from grpo_rl.registry import calling_user_function, load_function

HASHED_ROWS = 16
"""Rows in the fingerprint, spread evenly over each source."""
Fingerprint = list[dict[str, Any]]


class RowSource(ABC):
    name: str
    num_bytes: int = 0
    """0 for rows that are in no file."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def row(self, index: int) -> Row:
        """Raises BadRow, with its place."""

    def where(self, index: int) -> str:
        """As a message names the row: `train.jsonl, line 3`."""
        return f"{self.name}, row {index}"


class Rows(RowSource):
    """Of anything with a length that can be indexed: tasks, arrays, a user's class."""

    def __init__(self, name: str, rows: Sequence[Any], num_bytes: int = 0) -> None:
        self.name, self.num_bytes = name, num_bytes
        self._rows: Any = rows

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> Row:
        return {key: plain(value) for key, value in as_row(self._rows[index], self.where(index)).items()}


def as_row(value: Any, where: str) -> Row:
    if not isinstance(value, dict):
        raise BadRow(f"{where}: expected an object with the row's columns, found {type(value).__name__}")
    return value


class UserRows(Rows):
    """Whatever a user's own code raises is a BadRow."""

    def row(self, index: int) -> Row:
        try:
            return super().row(index)
        except DataError:
            raise
        except Exception as error:
            raise BadRow(f"{self.where(index)}: {type(error).__name__}: {error}{raised_in(error)}") from error


def custom_source(files: Sequence[str], config: DataConfig, tokenizer: Any) -> RowSource:
    """The user's data set, `data.custom_cls`, as in verl: `cls(data_files=[...], tokenizer=..., config=...)`.

    `self[index]` gives the same row as a dict at any time: when it is drawn, and again after a resume.
    """
    name = f"{config.custom_cls.path}:{config.custom_cls.name}"
    kind = load_function(name, "data set class")
    missing = [part for part in ("__len__", "__getitem__") if not hasattr(kind, part)]
    if missing:
        raise ConfigError(f"data.custom_cls: {name} has no {' and no '.join(missing)}; it must be a class that has both")
    called = f"{config.custom_cls.name}(data_files=[...], tokenizer=..., config=...), then len() is taken of it"
    with calling_user_function(f"data.custom_cls: {name}", called, DataError):
        rows = kind(data_files=list(files), tokenizer=tokenizer, config=config)
        length = len(rows)
    if length == 0:
        raise DataError(f"data.custom_cls: {name} has no rows")
    return UserRows(name, rows)


class Joined(RowSource):
    def __init__(self, name: str, parts: Sequence[RowSource]) -> None:
        self.name = name
        self.parts = list(parts)
        self.num_bytes = sum(part.num_bytes for part in parts)
        self._ends = list(accumulate(map(len, parts)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def row(self, index: int) -> Row:
        part, inside = self._place(index)
        return part.row(inside)

    def where(self, index: int) -> str:
        part, inside = self._place(index)
        return part.where(inside)

    def _place(self, index: int) -> tuple[RowSource, int]:
        number = bisect_right(self._ends, index)
        return self.parts[number], index - (self._ends[number - 1] if number else 0)


def split_options(spec: str, known: Sequence[str] = ()) -> tuple[str, dict[str, str]]:
    """Name and options of `NAME?option=value&...`. Raises ConfigError."""
    name, _, query = spec.partition("?")
    options: dict[str, str] = {}
    for part in query.split("&") if query else []:
        key, equals, value = part.partition("=")
        if not equals or key in options or (known and key not in known):
            listed = f"; options: {', '.join(known)}" if known else ""
            raise ConfigError(f"{spec}: {part!r} must be option=value, each option once, joined by &{listed}")
        options[key] = value
    return name, options


def fingerprint_of(sources: Sequence[RowSource]) -> Fingerprint:
    return [
        {
            "name": Path(source.name).name if source.num_bytes else source.name,
            "bytes": source.num_bytes,
            "rows": len(source),
            "sha256": _hash(source),
        }
        for source in sources
    ]


def differences(before: Fingerprint, now: Fingerprint) -> list[str]:
    if len(before) != len(now):
        old, new = (", ".join(str(entry.get("name")) for entry in side) for side in (before, now))
        return [f"there were {len(before)} sources ({old}), now there are {len(now)} ({new})"]
    changes = []
    for was, entry in zip(before, now, strict=True):
        parts = [
            f"{key} was {was.get(key)}, now {entry[key]}" for key in ("name", "bytes", "rows") if was.get(key) != entry[key]
        ]
        if not parts and was.get("sha256") != entry["sha256"]:
            parts = ["some rows have another content"]
        if parts:
            changes.append(f"{entry['name']}: {', '.join(parts)}")
    return changes


def _hash(source: RowSource) -> str:
    digest = hashlib.sha256()
    for index in np.unique(np.linspace(0, len(source) - 1, HASHED_ROWS, dtype=np.int64)).tolist():
        try:
            text = json.dumps(source.row(index), sort_keys=True, default=lambda value: type(value).__name__)
        except (BadRow, TypeError, RecursionError) as error:
            text = type(error).__name__
        digest.update(text.encode("utf-8", "surrogatepass") + b"\n")
    return digest.hexdigest()
