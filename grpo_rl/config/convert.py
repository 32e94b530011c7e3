"""Conversion of a composed mapping, which may hold any values, to the frozen Config or its problems."""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
from collections.abc import Mapping
from typing import Any

from grpo_rl.config.schema.fields import Kind, annotations_of, kind_of, leaves, nearest, sections, siblings
from grpo_rl.config.schema.tree import Config

_WHOLE = re.compile(r"[+-]?\d+", re.ASCII)


class _Wrong(Exception):
    """The fault of one value, without its key."""


def convert_or_explain(raw: Mapping[str, Any]) -> tuple[Config, list[str]]:
    """Return the Config and a line for each problem; missing and wrong keys have their defaults."""
    problems: list[str] = []
    config: Config = section(Config, raw, "", problems)
    return config, problems


def value_problem(key: str, value: Any) -> str | None:
    kind = leaves()[key].kind
    try:
        _value(kind, value)
    except _Wrong as wrong:
        return _problem(key, value, kind, str(wrong))
    return None


def unknown_key(key: str, where: str = "") -> str:
    if suggestions := nearest(key):
        hint = f"Did you mean {' or '.join(suggestions)}?"
    elif siblings(key):
        hint = f"There are: {', '.join(siblings(key))}."
    else:
        hint = "All keys are in conf/base; --cfg prints them with their values."
    return f"{show(key)}: unknown key{where}. {hint}"


def section(kind: type, raw: Any, prefix: str, problems: list[str]) -> Any:
    """Build the dataclass `kind`; wrong fields keep their defaults. `prefix`: its key and a dot."""
    if not isinstance(raw, Mapping):
        example = next((key for key in leaves() if key.startswith(prefix)), "its keys")
        problems.append(f"{prefix[:-1]}={show(raw)}: is a group of keys, not a value. Set {example}=...")
        return kind()
    annotations = annotations_of(kind)
    for name in raw:
        if name not in annotations:
            is_of_schema = not prefix or prefix[:-1] in sections()
            message = f"{prefix}{show(name)}: unknown key. There are: {', '.join(annotations)}."
            problems.append(unknown_key(f"{prefix}{name}") if is_of_schema else message)
    values: dict[str, Any] = {}
    for name, annotation in annotations.items():
        if name not in raw:
            continue
        if dataclasses.is_dataclass(annotation):
            assert isinstance(annotation, type)
            values[name] = section(annotation, raw[name], f"{prefix}{name}.", problems)
            continue
        of = kind_of(annotation)
        try:
            values[name] = _value(of, raw[name])
        except _Wrong as wrong:
            problems.append(_problem(f"{prefix}{name}", raw[name], of, str(wrong)))
    return kind(**values)


def _problem(key: str, value: Any, kind: Kind, wrong: str) -> str:
    usual = f" (default {show(leaves()[key].default)})" if key in leaves() and leaves()[key].default not in ("", []) else ""
    return f"{key}={show(value)}: {wrong}; it takes {kind.describe()}{usual}"


def _value(kind: Kind, value: Any) -> Any:
    """Convert `value` to the key's type, without loss."""
    if value is None:
        if kind.optional:
            return None
        raise _Wrong("null is not allowed")
    if value == "???":
        raise _Wrong("has no value yet")
    if kind.item is not None:
        return _list(kind.item, value)
    if kind.base is dict:
        if not isinstance(value, Mapping):
            raise _Wrong("is not a mapping")
        return dict(value)
    if kind.choices:
        return _choice(kind.choices, value)
    if kind.base is bool:
        return _bool(value)
    if kind.base is str:
        return _text(value)
    number = _int(value) if kind.base is int else _float(value)
    if kind.range is not None and (problem := kind.range.problem(number)):
        raise _Wrong(problem)
    return number


def _list(item: Kind, value: Any) -> list[Any]:
    if isinstance(value, str) and item.base is str:
        value = [value]
    if not isinstance(value, list | tuple):
        raise _Wrong("is not a list; a list is written [a,b]")
    entries = []
    for index, entry in enumerate(value):
        try:
            entries.append(_value(item, entry))
        except _Wrong as wrong:
            raise _Wrong(f"entry {index + 1} ({show(entry)}) {wrong}") from None
    return entries


def _choice(choices: tuple[str, ...], value: Any) -> str:
    for choice in choices:
        if isinstance(value, str) and value.lower() == choice.lower():  # verl writes AdamW
            return choice
    suggestions = difflib.get_close_matches(str(value)[:200], choices, n=1)
    raise _Wrong("is not one of the choices" + (f", did you mean {suggestions[0]}?" if suggestions else ""))


def _bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise _Wrong("is not true or false")


def _text(value: Any) -> str:
    if isinstance(value, str):
        return os.path.expanduser(value) if value.startswith("~/") else value
    if isinstance(value, int) and not isinstance(value, bool):
        return show(value)
    raise _Wrong("is not text; put it in quotes")


def _int(value: Any) -> int:
    if isinstance(value, str) and len(value) <= 40 and _WHOLE.fullmatch(value.strip()):
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise _Wrong(
        "is not a whole number" + (f"; write {round(value)}" if isinstance(value, float) and math.isfinite(value) else "")
    )


def _float(value: Any) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if math.isnan(number):
        raise _Wrong("is not a number")
    if math.isinf(number):
        raise _Wrong("is not finite")
    return number


def show(value: Any) -> str:
    """Return a value as it is written on the command line, shortened if very long."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        text = "[" + ",".join(show(entry) for entry in value) + "]"
    elif isinstance(value, Mapping):
        text = "{" + ",".join(f"{name}: {show(entry)}" for name, entry in value.items()) + "}"
    else:
        # Python refuses to convert integers of more than 4,300 digits to decimal.
        text = f"{value:#x}" if isinstance(value, int) and value.bit_length() > 1000 else str(value)
    text = "".join(char if char.isprintable() else char.encode("unicode_escape", "replace").decode() for char in text)
    return text if len(text) <= 120 else text[:100] + f"... ({len(text)} characters)"
