"""The meaning of a name in `data.train_files`, and a first look into such files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo_rl import hub
from grpo_rl.config.schema.tree import DataConfig
from grpo_rl.data.rows import BadRow, Row, at, example, irregular
from grpo_rl.data.sources.jsonl import first_line, open_json
from grpo_rl.data.sources.source import Joined, Rows, RowSource, UserRows, split_options
from grpo_rl.data.tasks.registry import PREFIX as TASK_PREFIX
from grpo_rl.data.tasks.registry import is_built_in, task_rows
from grpo_rl.errors import ConfigError, DataError

TABLE_SUFFIXES = (".parquet", ".arrow", ".feather", ".csv")
DATA_SUFFIXES = (*TABLE_SUFFIXES, ".jsonl", ".json")
HUB_PREFIX = "hf:"
_OF_DATASETS = ("cache-", "indices", "dataset_info.json", "state.json", "dataset_dict.json")
"""Files that `datasets` keeps beside saved rows."""
FIRST_ROWS, FIRST_BYTES = 64, 16 * 2**20
"""What is read of each file before anything starts."""
LISTED = 10


def open_source(name: str) -> RowSource:
    """`name`: a file; a folder (`FOLDER?split=train`); `task:NAME?option=value`;
    `hf:owner/name?split=train`."""
    if name.startswith(TASK_PREFIX):
        rows = task_rows(name)
        return Rows(name, rows) if is_built_in(name) else UserRows(name, rows)
    if name.startswith(HUB_PREFIX):
        return _from_hub(name)
    parts = [_file(label, path) for label, path in data_files(name)]
    is_file = len(parts) == 1 and parts[0].name == name
    source = parts[0] if is_file else Joined(name, parts)
    if len(source) == 0:
        raise DataError(f"{name}: the {'file' if is_file else 'folder'} has no rows")
    return source


def data_files(name: str) -> list[tuple[str, Path]]:
    """In the order of the rows, each as messages name it."""
    path, split = Path(name).expanduser(), None
    if not path.exists() and "?" in name:
        base, options = split_options(name, known=("split",))
        path, split = Path(base).expanduser(), options.get("split")
    files = [(str(file), file) for file in _folder_files(name, path, split)] if path.is_dir() else [(name, path)]
    for label, file in files:
        if not file.name.endswith(DATA_SUFFIXES):
            raise DataError(
                f"{label}: a data file must end in {', '.join(DATA_SUFFIXES)}, or be task:NAME or hf:owner/name; "
                f"found {file.suffix or 'none'!r}"
            )
        if kind := irregular(file):
            raise DataError(f"{label}: is {kind}; expected a regular file")
        if not file.is_file():
            raise DataError(f"{label}: there is no such file")
        if file.stat().st_size == 0:
            raise DataError(f"{label}: the file is empty")
    return files


def _file(name: str, path: Path, *, is_head: bool = False) -> RowSource:
    """With `is_head` the first rows alone."""
    try:
        if path.name.endswith(TABLE_SUFFIXES):
            from grpo_rl.data.sources.tables import open_table  # pyarrow: a tenth of a second, in runs that read such files

            return open_table(name, path, FIRST_ROWS if is_head else None)
        return open_json(name, path, FIRST_BYTES if is_head else None)
    except OSError as error:
        raise DataError(f"{name}: cannot be read: {first_line(error)}") from error


def _folder_files(name: str, path: Path, split: str | None) -> list[Path]:
    """Of the folder of a split, or those whose names begin with it."""
    if split is not None and (path / split).is_dir():
        path, split = path / split, None
    folder = path / "data" if (path / "data").is_dir() else path
    files = sorted(file for file in folder.iterdir() if _is_data(file) and not file.name.startswith(_OF_DATASETS))
    of_split = [file for file in files if split is None or file.name.startswith(split)]
    if files and not of_split:
        raise DataError(
            f"{name}: no file begins with {split!r}; the folder has {', '.join(file.name for file in files[:5])}{', ...' * (len(files) > 5)}"
        )
    if not of_split:
        splits = sorted(inner.name for inner in folder.iterdir() if inner.is_dir() and any(map(_is_data, inner.iterdir())))
        if splits:
            raise DataError(f"{name}: the folder has the splits {', '.join(splits)}; name one: {path}?split=NAME")
        raise DataError(f"{name}: the folder has no data files ({', '.join('*' + suffix for suffix in DATA_SUFFIXES)})")
    return of_split


def _is_data(file: Path) -> bool:
    return file.name.endswith(DATA_SUFFIXES) and not file.is_dir()


def _from_hub(name: str) -> RowSource:
    repository, options = split_options(name, known=("split", "config", "revision"))
    repository = repository.removeprefix(HUB_PREFIX)
    split = options.get("split")
    if not repository or split is None:
        raise ConfigError(f"{name}: name the data set and its split, as in hf:openai/gsm8k?split=train&config=main")
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"{name}: the package datasets is not installed; install the extra `data` (pip install datasets), or name files"
        ) from error
    cache = Path(datasets.config.HF_DATASETS_CACHE) / repository.replace("/", "___")
    if not Path(repository).is_dir() and not cache.is_dir() and (why := hub.why_unreachable()):
        raise DataError(
            f"{name}: no such folder, no such data set in the cache of datasets on this machine, and {why}; give a folder or files "
            "that were copied from the hub"
        )
    try:
        rows = datasets.load_dataset(repository, options.get("config"), split=split, revision=options.get("revision"))
    # Whatever goes wrong in the hub's client, in the network or in the data set's own files: the user gets one line.
    except Exception as error:
        raise DataError(
            f"{name}: cannot be loaded from the hub: {type(error).__name__}: {first_line(error)}; where no hub can be reached "
            "give a folder or files that were copied from it"
        ) from error
    if len(rows) == 0:
        raise DataError(f"{name}: the data set has no rows")
    from grpo_rl.data.sources.tables import Table

    return Table(name, rows.with_format("arrow")[:])


def check_data_files(config: DataConfig, read: Callable[[Row, DataConfig], Any] = example) -> list[str]:
    """Problems of the data files, each with the file and its line or row.

    Of each file the first rows are read; `read` checks one and raises BadRow. Bad rows are ten lines at most,
    one for those that lack the same, and none under `data.on_bad_row=skip`. Of a task the first row is looked
    at; hub data sets and what a user's own class reads are not.
    """
    if config.custom_cls.path is not None:
        return []
    problems: list[str] = []
    bad_rows: dict[str, str] = {}
    for name in dict.fromkeys((*config.train_files, *config.val_files)):
        try:
            for head in _heads(name):
                for index in range(min(len(head), FIRST_ROWS)):
                    where = head.where(index)
                    try:
                        row = head.row(index)
                        with at(where):
                            read(row, config)
                    except BadRow as error:
                        bad_rows.setdefault(head.name + str(error).removeprefix(where), str(error))
        except (DataError, ConfigError) as error:
            problems.append(str(error))
        except OSError as error:
            problems.append(f"{name}: cannot be read: {first_line(error)}")
    if config.on_bad_row == "skip":
        return problems
    rest = [f"and {len(bad_rows) - LISTED} more bad rows among those that were read"] if len(bad_rows) > LISTED else []
    return [*problems, *list(bad_rows.values())[:LISTED], *rest]


def _heads(name: str) -> list[RowSource]:
    if name.startswith(TASK_PREFIX):
        try:
            return [Rows(name, [open_source(name).row(0)])]
        except (ConfigError, DataError, LookupError):
            return []  # reported where its rows are counted
    heads = [_file(label, path, is_head=True) for label, path in ([] if name.startswith(HUB_PREFIX) else data_files(name))]
    for head in heads:
        if len(head) == 0:
            raise DataError(f"{head.name}: the file has no rows")
    return heads
