"""Rows to a parquet or JSON Lines file that is complete or not there at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from grpo_rl.errors import ConfigError

SUFFIXES = {"parquet": ".parquet", "jsonl": ".jsonl"}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """The file `path` with these rows, its folder made where it is missing; raises ConfigError where it cannot be written."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            _write(temporary, path.suffix, rows)
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"--to: {path} cannot be written: {error.strerror or error}") from error


def _write(path: Path, suffix: str, rows: list[dict[str, Any]]) -> None:
    if suffix == ".jsonl":
        with path.open("w", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps(row, ensure_ascii=True) + "\n")
        return
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
