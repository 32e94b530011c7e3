"""Rules of the data: what is named must be there, and no two settings may contradict each other."""

from __future__ import annotations

import difflib
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

from grpo_rl.config.schema.tree import Config, DataConfig

DATA_SUFFIXES = (".parquet", ".jsonl", ".json", ".jsonl.gz", ".json.gz", ".arrow", ".feather")


def problems(config: Config) -> Iterator[str]:
    """Yield what is wrong in `data`."""
    data = config.data
    if not data.train_files and not config.trainer.val_only:
        yield (
            "data.train_files is not set: give data files (.parquet, .json, .jsonl, .arrow), a folder, hf:owner/name?split=train, "
            "or a task, such as data.train_files=task:arithmetic"
        )
    if data.custom_cls.path is None:
        for key in ("train_files", "val_files", "val_prompt_files"):
            for file in getattr(data, key):
                problem = _data_file(file, elsewhere=config.trainer.machine is not None)
                if problem:
                    yield f"data.{key}={file}: {problem}"
    for key in ("train_max_samples", "val_max_samples"):
        if getattr(data, key) == 0:
            yield f"data.{key}=0: would leave no rows; -1 takes all"
    if 0 < data.train_max_samples < data.train_batch_size:
        yield (
            f"data.train_max_samples={data.train_max_samples}: fewer rows than one batch; at least "
            f"data.train_batch_size={data.train_batch_size}, or -1 for all"
        )
    yield from _sources(data)
    yield from _mixture(data)
    yield from _curriculum(data)


def _data_file(file: str, *, elsewhere: bool = False) -> str | None:
    """Return what is wrong with one entry; a file that is not here is no problem where the run is `elsewhere`."""
    if file.startswith(("task:", "reasoning_gym:")):
        return None
    if file.startswith("hf:"):
        if importlib.util.find_spec("datasets") is None:
            return "the package datasets is not installed; install the extra `data` (pip install datasets), or name files"
        options = file.partition("?")[2].split("&")
        return None if any(option.startswith("split=") for option in options) else f"needs a split: {file}?split=train"
    path = Path(file).expanduser()
    if not path.exists() and "?" in file:
        path = Path(file.rpartition("?")[0]).expanduser()
    if not path.exists():
        if elsewhere:
            return None
        folder = path.parent if path.parent.is_dir() else None
        near = difflib.get_close_matches(path.name, os.listdir(folder), n=2) if folder else []
        hint = f"; there is {' and '.join(str(folder / name) for name in near)}" if folder and near else ""
        return f"there is no file {path.absolute()}{hint}"
    if path.is_dir():
        return _data_folder(path)
    if not path.name.endswith(DATA_SUFFIXES):
        return f"cannot be read: data files end in {', '.join(DATA_SUFFIXES)}"
    kind = irregular(path)
    return f"is {kind}; give a regular file" if kind else None


def irregular(path: Path) -> str | None:
    """Return what a path is that is neither a regular file nor a folder; None for these, and for what is not there.

    To open a FIFO waits for a writer, and a device may have no end: neither is ever opened.
    """
    kinds = {
        "a FIFO": path.is_fifo(),
        "a socket": path.is_socket(),
        "a device": path.is_block_device() or path.is_char_device(),
    }
    return next((kind for kind, found in kinds.items() if found), None)


def _data_folder(path: Path) -> str | None:
    saved = any((path / name).is_file() for name in ("state.json", "dataset_dict.json"))
    folder = path / "data" if (path / "data").is_dir() else path
    if saved or any(name.endswith(DATA_SUFFIXES) for name in os.listdir(folder)):
        return None
    return f"is a folder without data files ({', '.join('*' + suffix for suffix in DATA_SUFFIXES)})"


def _sources(data: DataConfig) -> Iterator[str]:
    for name in ("path", "name"):
        other = "name" if name == "path" else "path"
        if getattr(data.custom_cls, name) is not None and getattr(data.custom_cls, other) is None:
            yield f"data.custom_cls.{name}={getattr(data.custom_cls, name)}: needs data.custom_cls.{other} as well"
    template = data.chat_template
    if template is not None and "{{" not in template and "{%" not in template and not Path(template).expanduser().is_file():
        yield f"data.chat_template={template}: neither a Jinja template ({{{{ ... }}}}) nor a file"
    if data.cache_dir is not None and not Path(data.cache_dir).expanduser().is_dir():
        yield f"data.cache_dir={data.cache_dir}: there is no such folder"
    for key in ("system_prompt", "data_source"):
        if getattr(data, key) == "":
            yield f"data.{key} is empty: give a text, or leave it out"


def _mixture(data: DataConfig) -> Iterator[str]:
    weights = data.train_weights
    shown = f"data.train_weights=[{','.join(f'{weight:g}' for weight in weights)}]"
    if not weights:
        return
    if data.custom_cls.path is not None:
        yield f"{shown}: a class of your own is one source; mix inside it, or leave out data.custom_cls"
    elif len(weights) != len(data.train_files):
        yield f"{shown}: {len(weights)} weights for {len(data.train_files)} entries of data.train_files; one for each"
    if data.train_max_samples > 0:
        yield f"{shown}: with data.train_max_samples some sources would have no rows; cut the files, or leave it out"
    if data.curriculum == "pass_rate":
        yield f"{shown}: curriculum=pass_rate draws from all rows alike; curriculum=difficulty, or data.dynamic_weights=true"


def _curriculum(data: DataConfig) -> Iterator[str]:
    if data.dynamic_weights and len(data.train_weights) < 2:
        yield "data.dynamic_weights=true: needs data.train_weights with two sources or more, e.g. [1,1]"
    if data.curriculum == "pass_rate" and not data.shuffle:
        yield "data.curriculum=pass_rate: draws at random, which data.shuffle=false forbids"
