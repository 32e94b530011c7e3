"""The procedural tasks by name, and `task:NAME?option=value&option=value` as a source of rows."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from typing import Any, Literal

from grpo_rl.data.tasks.arithmetic import Row, arithmetic
from grpo_rl.errors import ConfigError
from grpo_rl.registry import Registry

PREFIX = "task:"

TASKS: Registry[Callable[..., list[Row]]] = Registry("task")
TASKS.register("arithmetic")(arithmetic)


def task_rows(spec: str) -> list[Row]:
    """The rows that `task:NAME?option=value&...` stands for, in verl's format.

    Options have the types and defaults of the task function's signature. Raises ConfigError for an
    unknown task or option, or a value of another type.
    """
    name, _, query = spec.removeprefix(PREFIX).partition("?")
    task = TASKS.get(name)
    return task(**_options(name, task, query))


def _options(name: str, task: Callable[..., list[Row]], query: str) -> dict[str, Any]:
    texts: dict[str, str] = {}
    for part in query.split("&") if query else []:
        key, equals, text = part.partition("=")
        if not equals or key in texts:
            raise ConfigError(f"task {name!r}: {part!r} in {query!r} must be option=value, each option once, joined by &")
        texts[key] = text
    TASKS.check_options(name, texts)
    kinds = typing.get_type_hints(task)
    known = inspect.signature(task).parameters
    return {key: _value(f"task {name!r}: {key}", text, kinds.get(key, str)) for key, text in texts.items() if key in known}


def _value(what: str, text: str, kind: Any) -> Any:
    """`text` as a value of the annotated type `kind`."""
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        if text not in choices:
            raise ConfigError(f"{what}={text} must be one of {', '.join(choices)}")
        return text
    if kind is bool:
        if text not in ("true", "false"):
            raise ConfigError(f"{what}={text} must be true or false")
        return text == "true"
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(f"{what}={text} must be {'a whole number' if kind is int else f'of type {kind.__name__}'}") from None
