"""A run's configuration as the page shows it: what differs from the defaults, all of it, and the command that repeats it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from grpo_rl.config.schema.fields import leaves
from grpo_rl.errors import DataError
from grpo_rl.run_files import read_text

_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
_NAME = "trainer.experiment_name"
_FOLDER = "trainer.default_local_dir"


def configuration(run: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that differ from their defaults, the whole as YAML text, and the commands that repeat and resume the run."""
    words = _words(run)
    whole = ""
    with suppress(DataError):
        whole = read_text(run / "config.yaml")
    return {"different": differences(config, words), "whole": whole, "words": words} | commands(run, config, words)


def differences(config: Mapping[str, Any], words: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return key, value, default and whether the command line named it, for each key that differs from its default."""
    flat = flattened(config)
    named = {word.partition("=")[0].lstrip("+~") for word in words}
    found = []
    for key, value in flat.items():
        leaf = leaves().get(key)
        default = _resolved(leaf.default, flat) if leaf is not None else None
        if leaf is not None and value == default:
            continue
        if leaf is None and value in ({}, [], None):
            continue
        is_named = any(key == name or key.startswith(f"{name}.") for name in named)
        found.append({"key": key, "value": _shown(value), "default": _shown(default) if leaf else "", "named": is_named})
    return found


def commands(run: Path, config: Mapping[str, Any], words: Sequence[str]) -> dict[str, str]:
    """Return the command that repeats the run under another name, and the one that resumes it."""
    flat = flattened(config)
    name, folder = flat.get(_NAME), flat.get(_FOLDER)
    unnamed = [word for word in words if word.partition("=")[0] != _NAME]
    repeat = [*unnamed, f"{_NAME}={(name or run.name)}_again"]
    resume = list(words)
    if name is None:  # it was named by its date
        resume = [word for word in unnamed if word.partition("=")[0] != _FOLDER]
        resume += [f"{_NAME}={run.name}", f"{_FOLDER}={folder or run.parent}"]
    return {"repeat": _command(repeat), "resume": _command(resume)}


def flattened(tree: Any, path: str = "") -> dict[str, Any]:
    """Return the values of nested mappings by their dotted keys; what the schema has as one key stays one."""
    if not isinstance(tree, Mapping) or (path and path in leaves()):
        return {path: tree}
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flattened(value, f"{path}.{key}" if path else str(key))
    return found


def _resolved(default: Any, flat: Mapping[str, Any]) -> Any:
    """Return a default with `${key}` filled in."""
    if not isinstance(default, str):
        return default
    whole = _REFERENCE.fullmatch(default)
    if whole is not None:
        return flat.get(whole[1], default)
    return _REFERENCE.sub(lambda match: str(flat.get(match[1], match[0])), default)


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int | float):
        return str(value)
    return yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True, sort_keys=False).strip()


def _words(run: Path) -> list[str]:
    with suppress(DataError):
        return read_text(run / "overrides.txt").splitlines()
    return []


def _command(words: Sequence[str]) -> str:
    return " ".join(["python -m grpo_rl.main", *map(shlex.quote, words)])
