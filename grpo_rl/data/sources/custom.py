"""A user's own data set class: `data.custom_cls.path` and `name`, as in verl."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from grpo_rl.config.schema.tree import DataConfig
from grpo_rl.data.sources.source import BadRow, Rows, Source
from grpo_rl.errors import ConfigError, DataError, raised_in
from grpo_rl.registry import calling_user_function, load_function


class CustomDataset(Protocol):
    """The interface of a data set class: its length, and each row as a dict in the row format.

    It is made as `cls(data_files=[...], tokenizer=..., config=...)`, once for training and once for validation;
    `config` is the `data` part of the configuration. `self[index]` gives the same row at any time: rows are read when
    they are drawn, and again after a resume. Rows are checked, rendered and tokenized as those of a file are.
    """

    def __init__(self, data_files: list[str], tokenizer: Any, config: DataConfig) -> None: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> dict[str, Any]: ...


class UserRows(Rows):
    """Rows that a user's own code makes, whatever it raises."""

    def row(self, index: int) -> dict[str, Any]:
        try:
            return super().row(index)
        except DataError:
            raise
        except Exception as error:
            raise BadRow(f"{self.where(index)}: {type(error).__name__}: {error}{raised_in(error)}") from error


def custom_source(files: Sequence[str], config: DataConfig, tokenizer: Any) -> Source:
    """The user's data set over `files`. Raises ConfigError for a class that is not there or is no data set."""
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
