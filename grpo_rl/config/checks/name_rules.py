"""Names and options of tasks, data sets and rewards, checked without loading any of them."""

from __future__ import annotations

import difflib
import functools
import importlib.metadata
import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path

from grpo_rl.config.checks import option_tables as table
from grpo_rl.config.checks.algorithm_table import REWARDS, TASKS
from grpo_rl.config.convert import show
from grpo_rl.config.schema.tree import Config

_TASK, _GYM = "task:", "reasoning_gym:"
_KINDS = {"int": (int, "a whole number"), "float": (float, "a number")}
_OWN_KINDS = {"num_rows": "int", "seed": "int", "split": "all|train|val", "answer_tags": "bool"}


def problems(config: Config) -> Iterator[str]:
    """Yield names that no task, data set or reward has, and options that those named do not have.

    A task's own rules between its options are the plan's, which makes its rows.
    """
    if config.data.custom_cls.path is None:
        for key in ("train_files", "val_files", "val_prompt_files"):
            for spec in getattr(config.data, key):
                yield from (f"data.{key}={show(spec)}: {problem}" for problem in _source(spec))
    yield from _rewards(config)


def _source(spec: str) -> Iterator[str]:
    if spec.startswith(_TASK):
        name, options, broken = _taken_apart(spec.removeprefix(_TASK))
        yield from broken
        if name in TASKS:
            kinds = dict(entry.split(":") for entry in table.TASK_OPTIONS[name].split())
            yield from _unknown(f"task {name!r}", options, kinds)
            yield from _values(options, kinds)
    elif spec.startswith(_GYM):
        yield from _gym(*_taken_apart(spec.removeprefix(_GYM)))


def _gym(name: str, options: dict[str, str], broken: list[str]) -> Iterator[str]:
    yield from broken
    version = _gym_version()
    if version is None:
        yield "the package reasoning-gym is not installed; pip install 'grpo_rl[data]' (it needs a C compiler)"
        return
    yield from _values(options, _OWN_KINDS)
    if "size" in options:
        yield "size is called num_rows here"
    if name in table.GYM_REFUSED:
        yield f"cannot be used: {table.GYM_REFUSED[name]}"
    if version != table.GYM_VERSION or name in table.GYM_REFUSED:
        return
    if name not in table.GYM_OPTIONS:
        hint = _hint(name, table.GYM_OPTIONS) or f" Known: {', '.join(table.GYM_OPTIONS)}"
        yield f"reasoning_gym has no data set {show(name)!r}.{hint}"
        return
    known = [*table.GYM_OPTIONS[name].split(), *table.GYM_OWN_OPTIONS.split()]
    yield from _unknown(name, {key: text for key, text in options.items() if key != "size"}, known)


@functools.cache
def _gym_version() -> str | None:
    """Return the installed version of reasoning-gym, None without the package."""
    try:
        return importlib.metadata.version("reasoning-gym")
    except importlib.metadata.PackageNotFoundError:
        return "unknown" if importlib.util.find_spec("reasoning_gym") else None


def _taken_apart(spec: str) -> tuple[str, dict[str, str], list[str]]:
    """Return name and options of NAME?option=value&..., and what is wrong with their form."""
    name, _, query = spec.partition("?")
    options: dict[str, str] = {}
    broken = []
    for part in query.split("&") if query else []:
        key, equals, text = part.partition("=")
        if not equals or key in options:
            broken.append(f"{show(part)!r} must be option=value, each option once, joined by &")
        else:
            options[key] = text
    return name, options, broken


def _unknown(what: str, options: Iterable[str], known: Iterable[str]) -> Iterator[str]:
    names = list(known)
    for key in options:
        if key not in names:
            takes = f"It takes {', '.join(names)}" if names else "It takes none"
            yield f"{what} has no option {show(key)!r}.{_hint(key, names)} {takes}"


def _values(options: dict[str, str], kinds: dict[str, str]) -> Iterator[str]:
    for key, text in options.items():
        kind = kinds.get(key, "str")
        choices = ["true", "false"] if kind == "bool" else kind.split("|") if "|" in kind else []
        if choices and text not in choices:
            yield f"{key}={show(text)} must be {' or '.join(choices) if len(choices) == 2 else 'one of ' + ', '.join(choices)}"
        if kind in _KINDS:
            read, said = _KINDS[kind]
            try:
                read(text)
            except ValueError:
                yield f"{key}={show(text)} must be {said}"


def _rewards(config: Config) -> Iterator[str]:
    reward, custom = config.reward, config.reward.custom_reward_function
    specs = [name.rpartition("*")[2].strip() for name in reward.functions]
    for spec in specs:
        file = spec.rpartition(":")[0]
        if file.endswith(".py") and not Path(file).expanduser().is_file():
            yield f"reward.functions: {show(spec)}: there is no file {Path(file).expanduser().absolute()}"
    # As the sum calls its parts: `function`, or `file.function` where two files have one of that name.
    own = [f"{custom.path}:{custom.name}"] if custom.path is not None else []
    names = {part for spec in [*specs, *own] for part in _parts(spec)}
    for key, given in (("batched", reward.batched), ("function_kwargs", reward.function_kwargs)):
        for name in given:
            if name not in names:
                listed = ", ".join(spec.rpartition(":")[2] for spec in [*specs, *own]) or "none"
                yield f"reward.{key}: {show(name)!r} is not in the reward's sum.{_hint(name, names)} It has {listed}"
    for name in reward.batched:
        if name in REWARDS and name in specs:
            yield f"reward.batched: {name} takes one response at a time; only functions of your own that take lists stand here"
    for name, options in reward.function_kwargs.items():
        if not isinstance(options, dict):
            yield f"reward.function_kwargs.{name}={show(options)}: write its options by name, {{option: value}}"
        elif name in specs and name in REWARDS:
            yield from (
                f"reward.function_kwargs: {problem}"
                for problem in _unknown(name, map(str, options), table.REWARD_OPTIONS[name].split())
            )


def _parts(spec: str) -> list[str]:
    source, colon, function = spec.rpartition(":")
    return [spec, function, f"{Path(source).stem}.{function}"] if colon else [spec]


def _hint(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(str(name)[:200], list(known), n=3, cutoff=0.5)
    return f" Did you mean {' or '.join(near)}?" if near else ""
