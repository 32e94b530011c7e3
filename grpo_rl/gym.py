"""The data sets of the reasoning-gym package: found by name, built from options as text, their entries as plain JSON.

Rows are made where the data are read, and scored elsewhere; both sides meet here. Neither torch nor the package itself
is loaded before a data set is asked for.
"""

from __future__ import annotations

import collections.abc
import contextlib
import copy
import dataclasses
import datetime
import difflib
import enum
import io
import types
import typing
import warnings
from functools import lru_cache
from typing import Any

from grpo_rl.errors import ConfigError

SOURCE_PREFIX = "reasoning_gym/"
"""The beginning of a row's data_source; the name of the data set follows."""
ONE_ROW_EACH = frozenset({"acre", "gsm_symbolic", "list_functions", "word_ladder"})
"""Data sets that lay out or count all their rows beforehand: each row comes from a data set of its own, with a seed of its own."""
HASH_DEPENDENT = frozenset(
    {"codeio", "isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder"}
)
"""Data sets that walk over sets of strings, or run programs that do: their rows are the same only under the same PYTHONHASHSEED."""
REFUSED = {"composite": "it only mixes other data sets; list these in data.train_files instead"}

Options = tuple[tuple[str, str], ...]


def names() -> list[str]:
    """The data sets that can be used, sorted. Raises ConfigError when the package is not installed."""
    return sorted(set(_registered()) - set(REFUSED))


@lru_cache(maxsize=64)
def build(name: str, options: Options, seed: int) -> Any:
    """Return the data set `name` with these options; its size, which only its len() uses, is 1.

    Raises ConfigError for an unknown name or option, with the nearest ones, and for values that it refuses.
    """
    return _one_row(name, options, seed)


def _one_row(name: str, options: Options, seed: int) -> Any:
    dataset_class, config_class = _classes(name)
    values = _values(name, config_class, options)
    try:
        return dataset_class(config_class(**values, seed=seed, size=1))
    except (AssertionError, ValueError, TypeError, KeyError) as error:
        shown = ", ".join(f"{key}={text}" for key, text in options) or "its defaults"
        raise ConfigError(f"reasoning_gym:{name} refuses {shown}: {error}") from error


def make_entry(name: str, options: Options, seed: int, index: int) -> dict[str, Any]:
    """Entry `index`: question, answer and metadata, as the package makes them."""
    # The others make an entry from seed and index when it is asked for, whatever their size.
    dataset = _one_row(name, options, seed + index) if name in ONE_ROW_EACH else build(name, options, seed)
    # The compiler of one data set prints a dot for each program.
    with contextlib.redirect_stdout(io.StringIO()) if name == "bf" else contextlib.nullcontext():
        return dataset[0 if name in ONE_ROW_EACH else index]


@lru_cache(maxsize=4096)
def _made(name: str, options: Options, seed: int, index: int) -> dict[str, Any]:
    return make_entry(name, options, seed, index)


def remade_entry(name: str, options: Options, seed: int, index: int) -> dict[str, Any]:
    """`make_entry` once more, for scoring: the caller may change what it gets."""
    return copy.deepcopy(_made(name, options, seed, index))


def category(name: str) -> str:
    """`algebra`, `games`, `graphs`, ...: the package's folder that the data set lies in."""
    return _classes(name)[0].__module__.split(".")[1]


def config_class(name: str) -> Any:
    """The dataclass with the options of a data set. Raises ConfigError for an unknown name."""
    return _classes(name)[1]


# ---- names and options ---------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _registered() -> dict[str, tuple[Any, Any]]:
    try:
        with warnings.catch_warnings():
            # A dependency of the package has a comparison that newer compilers warn of.
            warnings.simplefilter("ignore", SyntaxWarning)
            import reasoning_gym  # noqa: F401
            from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ConfigError(
            f"reasoning_gym: the package reasoning-gym cannot be imported ({error}); "
            f"install the extra: pip install 'grpo_rl[data]' (it needs a C compiler)"
        ) from error
    return DATASETS


def _classes(name: str) -> tuple[Any, Any]:
    if name in REFUSED:
        raise ConfigError(f"reasoning_gym:{name} cannot be used: {REFUSED[name]}")
    known = _registered()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        raise ConfigError(f"reasoning_gym has no data set {name!r}.{hint} Known: {', '.join(names())}")
    return known[name]


def _values(name: str, config_class: Any, options: Options) -> dict[str, Any]:
    kinds = typing.get_type_hints(config_class)
    fields = {field.name: field for field in dataclasses.fields(config_class) if field.name not in ("seed", "size")}
    problems, values = [], {}
    for key, text in options:
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=3, cutoff=0.5)
            hint = f" Did you mean {' or '.join(near)}?" if near else ""
            problems.append(f"reasoning_gym:{name} has no option {key!r}.{hint} It takes {', '.join(sorted(fields))}")
            continue
        try:
            values[key] = _value(text, kinds[key], _default(fields[key]))
        except ValueError as error:
            problems.append(f"reasoning_gym:{name}: {key}={text} {error}")
    if problems:
        raise ConfigError(problems)
    return values


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def _value(text: str, kind: Any, default: Any = None) -> Any:
    """`text` as a value of the annotated type `kind`. Raises ValueError with what it must be."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        inner = [argument for argument in arguments if argument is not type(None)]
        return None if text.lower() in ("none", "null") else _value(text, inner[0], default)
    if origin is typing.Literal:
        if text not in arguments:
            raise ValueError(f"must be one of {', '.join(map(str, arguments))}")
        return text
    if kind in (list, tuple) or origin in (list, tuple, collections.abc.Sequence):
        element = arguments[0] if arguments else (type(default[0]) if default else str)
        items = [_value(part.strip(), element) for part in text.split(",")]
        return tuple(items) if kind is tuple or origin is tuple else items
    return _single(text, kind)


def _single(text: str, kind: Any) -> Any:
    if kind is bool:
        if text not in ("true", "false"):
            raise ValueError("must be true or false")
        return text == "true"
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        for member in kind:
            if text in (member.name, member.name.lower(), str(member.value)):
                return member
        raise ValueError(f"must be one of {', '.join(member.name.lower() for member in kind)}")
    what = {
        int: "a whole number",
        float: "a number",
        datetime.date: "a date like 2024-12-31",
        datetime.time: "a time like 23:59",
    }
    if kind in (datetime.date, datetime.time):
        parse: typing.Callable[[str], Any] = kind.fromisoformat
    elif kind in (int, float, str):
        parse = kind
    else:
        raise ValueError("cannot be set: only numbers, words, true or false, dates and lists of these can")
    try:
        return parse(text)
    except ValueError:
        raise ValueError(f"must be {what[kind]}") from None


# ---- metadata as JSON ----------------------------------------------------------------------------


def encode(value: Any) -> Any:
    """`value` as JSON that `decode` turns back into an equal one: tuples stay tuples, keys keep their type.

    Raises TypeError for what has no plain form; such an entry is made again where it is scored.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [encode(item) for item in value]
    if type(value) is dict:
        if all(type(key) is str for key in value) and "$" not in value:
            return {key: encode(item) for key, item in value.items()}
        return {"$": "dict", "items": [[encode(key), encode(item)] for key, item in value.items()]}
    if type(value) is tuple:
        return {"$": "tuple", "items": [encode(item) for item in value]}
    if type(value) in (set, frozenset):
        return {"$": type(value).__name__, "items": sorted((encode(item) for item in value), key=repr)}
    raise TypeError(f"{type(value).__name__} has no plain form")


def decode(value: Any) -> Any:
    """Return what `encode` was given."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "$" not in value:
        return {key: decode(item) for key, item in value.items()}
    items = [decode(item) for item in value["items"]]
    kinds: dict[str, typing.Callable[[list[Any]], Any]] = {"dict": dict, "tuple": tuple, "set": set, "frozenset": frozenset}
    return kinds[value["$"]](items)
