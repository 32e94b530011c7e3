"""Options of registered functions: their keywords with defaults. The signature is the only place that lists them."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from grpo_rl.errors import ConfigError


def options_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The options a function takes, with their defaults."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is not p.empty}


def takes(function: Callable[..., Any], name: str) -> bool:
    """Whether the function has a parameter of this name."""
    return name in inspect.signature(function).parameters


def own_options(function: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `options` that this function takes."""
    return {name: value for name, value in options.items() if name in options_of(function)}


def check_options(what: str, functions: Iterable[Callable[..., Any]], options: Mapping[str, Any]) -> None:
    """Raise ConfigError, with all problems, for options that none of the functions takes, or of another type.

    `what` names the functions in the message, such as "policy loss 'sapo'".
    """
    known: dict[str, Any] = {}
    for function in functions:
        known |= options_of(function)
    problems = []
    for name, value in options.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            problems.append(f"{what} has no option {name}.{hint} It takes {', '.join(known) or 'none'}")
        elif not _fits(value, known[name]):
            problems.append(f"{what}: {name}={value!r} is not of the type of its default, {known[name]!r}")
    if problems:
        raise ConfigError(problems)


def _fits(value: Any, default: Any) -> bool:
    if default is None:
        return True
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(default, bool) and isinstance(value, bool)
    if isinstance(default, float):
        return isinstance(value, (int, float))
    return isinstance(value, type(default))
