"""A first look into the data files, before anything starts: can they be used, and how many rows have they?

Reading all the data takes as long as there is data, and happens while Ray starts. An empty, cut or broken file and a
wrong column show in a few rows, which cost milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from grpo_rl.config.derived import collects, is_offline, trains_only_reward_model
from grpo_rl.config.schema.tree import Config, DataConfig
from grpo_rl.data.sources.locate import HUB_PREFIX, check_data_files, data_files, open_source
from grpo_rl.data.tasks.registry import PREFIX as TASK_PREFIX
from grpo_rl.data.tasks.registry import task_rows
from grpo_rl.data.training_rows.conversations import conversation
from grpo_rl.data.training_rows.pairs import labelled_texts, pair_texts
from grpo_rl.data.training_rows.rated_steps import rated_row
from grpo_rl.plan.algorithm import objective_of

READ_WHOLE = 16 * 2**20
"""Bytes up to which a file is opened as the run opens it."""
INDEXED_WHOLE = 256 * 2**20
"""Bytes up to which the lines of a .jsonl file are counted."""


def unusable(config: Config) -> list[str]:
    """Return what is wrong with the data files: those that cannot be used, and under data.on_bad_row=error their bad rows."""
    data = config.data
    if trains_only_reward_model(config):
        return check_data_files(
            data, rated_row if config.reward.reward_model.train.loss == "steps" else partial(pair_texts, with_margin=True)
        )
    if is_offline(config):
        read = _reader(config)
        sampled = data.train_files if collects(config) else []
        rows = check_data_files(replace(data, train_files=[]) if sampled else data, read)
        prompts = check_data_files(replace(data, train_files=[*sampled, *data.val_prompt_files], val_files=[]))
        return [*rows, *(problem for problem in prompts if problem not in rows)]
    return check_data_files(replace(data, train_files=[]) if config.trainer.val_only else data)


def missing(config: Config) -> list[str]:
    """Return the data files that are not on this machine; tasks, and data sets of the hub, are no files."""
    data = config.data
    names = [*data.train_files, *data.val_files, *data.val_prompt_files]
    files = [name for name in names if not name.startswith((*TASK_PREFIX, HUB_PREFIX))]
    return [name for name in files if not Path(name).expanduser().exists()]


def _reader(config: Config) -> Callable[..., Any]:
    """Return the function that reads a row as the loss needs it."""
    objective = objective_of(config)
    if objective.needs_kl:
        return labelled_texts
    return pair_texts if objective.needs_pairs else conversation


def count_rows(config: Config, *, with_files: bool = True) -> int | None:
    """Return the number of training rows, after train_max_samples; None where only reading all the data would show it, and
    where they are sampled first. Files are counted `with_files` only; a user's own class reads its files itself.
    """
    data = config.data
    if data.custom_cls.path is not None or config.trainer.val_only or collects(config):
        return None
    total = _sum(_count(name, data, with_files) for name in data.train_files)
    return total if total is None or data.train_max_samples < 0 else min(total, data.train_max_samples)


def _count(name: str, data: DataConfig, with_files: bool) -> int | None:
    """The rows of one entry of `data.train_files`; None where finding out would take long."""
    if name.startswith(TASK_PREFIX):
        return len(task_rows(name))
    if name.startswith(HUB_PREFIX) or not with_files:
        return None
    return _sum(_count_file(str(path), path) for _, path in data_files(name))


def _sum(counts: Iterable[int | None]) -> int | None:
    """Return the sum; None where there is nothing, or one is not known."""
    known = list(counts)
    return None if not known or None in known else sum(count or 0 for count in known)


def _count_file(name: str, path: Path) -> int | None:
    num_bytes = path.stat().st_size
    if path.name.endswith(".parquet"):
        import pyarrow.parquet

        return int(pyarrow.parquet.read_metadata(path).num_rows)
    if num_bytes <= READ_WHOLE or (path.name.endswith(".jsonl") and num_bytes <= INDEXED_WHOLE):
        return len(open_source(name))
    return None


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
