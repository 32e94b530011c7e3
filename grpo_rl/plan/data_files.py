"""A first look into the data files, before anything starts: how many rows there are, and whether the first ones can be used.

Reading all the data takes as long as there is data, and happens while Ray starts. An empty, cut or broken file and a
wrong column show in the first rows, which cost milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from grpo_rl.config.schema.tree import Config, DataConfig
from grpo_rl.data.rows import example
from grpo_rl.data.sources.bad_rows import BadRows
from grpo_rl.data.sources.locate import HUB_PREFIX, open_source
from grpo_rl.data.sources.source import BadRow, Rows, Source
from grpo_rl.data.tasks.registry import PREFIX as TASK_PREFIXES
from grpo_rl.data.tasks.registry import task_rows
from grpo_rl.errors import DataError

FIRST_ROWS = 256
"""Rows of each file that are checked."""
READ_WHOLE = 16 * 2**20
"""Bytes up to which a file is opened as the run opens it."""
INDEXED_WHOLE = 256 * 2**20
"""Bytes up to which the lines of a .jsonl file are counted; its rows are parsed one by one."""

Bind = Callable[[str, Callable[[], Any]], Any]
"""Runs a look-up for a key and returns its result, None where it failed."""


def count_rows(config: Config, bind: Bind) -> int | None:
    """Return the number of training rows, after train_max_samples; None where only reading all the data tells it.

    `bind` collects the ConfigErrors of tasks. Raises DataError for a file that cannot be used, and under
    data.on_bad_row=error for bad rows among the first of each file. The files of a user's own class are left to it.
    """
    data = config.data
    if data.custom_cls.path is not None:
        return None
    train_files = [] if config.trainer.val_only else data.train_files
    counts = [_count("train_files", name, data, data.train_max_samples, bind) for name in train_files]
    for name in data.val_files:
        _count("val_files", name, data, data.val_max_samples, bind)
    known = [count for count in counts if count is not None]
    if not known or len(known) < len(counts):
        return None
    return sum(known) if data.train_max_samples < 0 else min(sum(known), data.train_max_samples)


def _count(key: str, name: str, data: DataConfig, limit: int, bind: Bind) -> int | None:
    if name.startswith(TASK_PREFIXES):
        rows = bind(f"data.{key}={name}: ", partial(task_rows, name))
        return None if rows is None else len(rows)
    if name.startswith(HUB_PREFIX):
        return None
    count, first_rows = _look(name, data.cache_dir)
    if first_rows is not None:
        _check(first_rows, data, limit)
    return count


def _check(rows: Source, data: DataConfig, limit: int) -> None:
    """Raise DataError for bad rows among the first, where they end the run."""
    bad_rows = BadRows(data.on_bad_row)
    num_rows = min(len(rows), FIRST_ROWS, limit if limit >= 0 else len(rows))
    for index in range(num_rows):
        try:
            example(rows.row(index), rows.where(index), data)
        except BadRow as error:
            bad_rows.found(index, error, collect=True)
    bad_rows.raise_collected(num_rows)


def _look(name: str, cache_dir: str | None) -> tuple[int | None, Source | None]:
    """The number of rows of a file or folder and the first of them, each None where finding out would take long."""
    path = Path(name).expanduser()
    if path.is_file():
        return _look_into_file(name, path, path.stat().st_size, cache_dir)
    if not path.exists() and "?" in name:
        path = Path(name.rpartition("?")[0]).expanduser()
    if path.is_dir() and _size_of(path) > READ_WHOLE:
        return None, None
    # Also what is no regular file, such as a pipe: it is refused there, without being opened.
    source = open_source(name, cache_dir)
    return len(source), source


def _look_into_file(name: str, path: Path, num_bytes: int, cache_dir: str | None) -> tuple[int | None, Source | None]:
    indexed = path.name.endswith(".jsonl") and num_bytes <= INDEXED_WHOLE
    if num_bytes <= READ_WHOLE or indexed:
        source = open_source(name, cache_dir)
        return len(source), source
    return _look_into_parquet(name, path) if path.name.endswith(".parquet") else (None, None)


def _look_into_parquet(name: str, path: Path) -> tuple[int, Rows]:
    """The rows that the file says it has, and the first ones read."""
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        first: Sequence[Any] = next(file.iter_batches(FIRST_ROWS)).to_pylist() if file.metadata.num_rows else []
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{name}: not a readable parquet file: {str(error).partition(chr(10))[0]}") from error
    return int(file.metadata.num_rows), Rows(name, first)


def _size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def too_few_rows(config: Config, num_rows: int | None) -> list[str]:
    """Return a problem for each batch size that is larger than the training data."""
    if num_rows is None or config.trainer.val_only:
        return []
    sizes = {key: getattr(config.data, key) for key in ("train_batch_size", "gen_batch_size")}
    return [
        f"data.{key}={size}: larger than the training data, which has {num_rows} rows; a batch of at most {num_rows}, or more data"
        for key, size in sizes.items()
        if size is not None and num_rows < size
    ]
