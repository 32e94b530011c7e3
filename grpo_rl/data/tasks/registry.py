"""`task:NAME?option=value`: rows that are in no file."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from grpo_rl.config.recipes import examples
from grpo_rl.data.sources.source import split_options
from grpo_rl.data.tasks.arithmetic import arithmetic, rated_sums
from grpo_rl.data.tasks.instructions import instructions
from grpo_rl.data.tasks.json_extraction import json_extraction
from grpo_rl.data.tasks.made_rows import Row, typed_options
from grpo_rl.envs.games.game import episodes
from grpo_rl.errors import DataError
from grpo_rl.registry import Registry, calling_user_function, load_function

PREFIX = "task:"

TASKS: Registry[Callable[..., Sequence[Row]]] = Registry("task")
for _task in (arithmetic, rated_sums, json_extraction, instructions, episodes):
    TASKS.register(_task.__name__)(_task)
for _name in ("countdown", "word_game", "grid_world"):
    TASKS.register(_name)(load_function(f"{examples() / _name}.py:{_name}", "task"))


@functools.lru_cache(maxsize=8)  # the plan counts the rows that are then read
def task_rows(spec: str) -> Sequence[Row]:
    """Rows in verl's format; not to be changed. Options have the types of the task function's signature.

    Raises ConfigError; DataError if a user's task fails.
    """
    name, texts = split_options(spec)
    name = name.removeprefix(PREFIX)
    task = TASKS.get(name)
    TASKS.check_keywords(name, texts)
    options = typed_options(f"task {name!r}", task, texts)
    if name in TASKS:
        return task(**options)
    called = f"{name}({', '.join(f'{key}={value!r}' for key, value in options.items())})"
    with calling_user_function(spec, f"{called} and returns a sequence of rows, each a dict in the row format", DataError):
        rows = task(**options)
        len(rows)
    return rows


def is_built_in(spec: str) -> bool:
    return spec.removeprefix(PREFIX).partition("?")[0] in TASKS
