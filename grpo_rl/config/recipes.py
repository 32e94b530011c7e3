"""Recipes: YAML files with verl's keys, only what differs from the defaults."""

from __future__ import annotations

import copy
import io
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

import grpo_rl
from grpo_rl.errors import ConfigError, did_you_mean

DEFAULT_RECIPE = "arithmetic/grpo"
_PARENT = "/recipe/"
_LARGEST_FILE = 1_000_000
"""The most bytes of a recipe; a full configuration has 15,000."""

VERLS_DEFAULTS = ("ppo_trainer",)
"""Names of verl's file of defaults, which verl's examples build on: here the schema's defaults take its place."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A recipe as it was read: its keys, and the recipes that it builds on (listed under `defaults`)."""

    name: str
    """The name that the user gave."""
    content: dict[str, Any]
    parents: tuple[str, ...] = ()
    folder: Path | None = None
    """The folder of a user's own file, in which its relative paths start; None for the package's recipes."""


def folder() -> Path:
    """Return the folder of the package's recipes. Raises ConfigError if it is missing."""
    return _of_package("recipes")


def conf() -> Path:
    """Return the folder of Hydra's files: the defaults list, every key with its default, and the choices. Raises as `folder`."""
    return _of_package("conf")


def _of_package(name: str) -> Path:
    """Return a folder that is inside an installed package, and beside it in a checkout."""
    package = Path(grpo_rl.__file__).parent
    for candidate in (package / name, package.parent / name):
        if candidate.is_dir():
            return candidate
    raise ConfigError(f"the folder {name}/ is missing: it belongs beside or inside {package}; install the package again")


def known_recipes() -> list[str]:
    """Return the names of the recipes that come with the package. The files in `cluster` are for other programs, which start runs."""
    root = folder()
    files = (path.relative_to(root) for path in root.rglob("*.yaml"))
    return sorted(str(path.with_suffix("")) for path in files if path.parts[0] != "cluster")


def read(name: str) -> Recipe:
    """Return the recipe called `name` (`arithmetic/grpo`), or the file at that path (`./my.yaml`).

    Raises ConfigError with the list of recipes for an unknown name, and for a file that is no YAML mapping.
    """
    own = Path(name).expanduser()
    if own.suffix in (".yaml", ".yml"):
        if not own.is_file():
            raise ConfigError(f"recipe={name}: there is no file {own.absolute()}. {_list_of_recipes()}")
        return _read(own, name, own=True)
    path = folder() / f"{name}.yaml"
    if name not in known_recipes() or not path.is_file():
        raise ConfigError(f"recipe={name}: unknown recipe.{did_you_mean(name, known_recipes(), most=2)} {_list_of_recipes()}")
    return _read(path, name, own=False)


def with_parents(name: str, below: tuple[str, ...] = ()) -> list[Recipe]:
    """Return all that a recipe builds on, each once and before those that build on it, and the recipe. Raises ConfigError as `read`."""
    if name in below:
        raise ConfigError(f"recipe={below[0]}: builds on itself: {' -> '.join((*below, name))}")
    recipe = read(name)
    found: list[Recipe] = []
    for parent in recipe.parents:
        found += [entry for entry in with_parents(parent, (*below, name)) if entry not in found]
    return [*found, recipe]


def for_every_run() -> list[Recipe]:
    """Return the layer below all recipes, `conf/config.yaml` beside them, where somebody has written keys into it."""
    path = conf() / "config.yaml"
    if not path.is_file() or not _content(path.read_text(encoding="utf-8")):
        return []
    return [_read(path, str(path), own=True)]


def _read(path: Path, name: str, *, own: bool) -> Recipe:
    try:
        if path.stat().st_size > _LARGEST_FILE:
            raise ConfigError(f"recipe={name}: {path} has more than {_LARGEST_FILE:,} bytes, which no recipe has")
        entries = copy.deepcopy(_content(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"recipe={name}: {path} cannot be read as YAML: {_place(error)}") from None
    if not entries:
        raise ConfigError(f"recipe={name}: {path} holds no keys; a recipe is a mapping such as trainer: {{save_freq: 10}}")
    if own and isinstance(entries.get("hydra"), dict) and set(entries["hydra"]) == {"searchpath"}:
        del entries["hydra"]  # the place of verl's defaults, in verl's own files
    parents = _parents(entries.pop("defaults", None), name)
    return Recipe(name, entries, parents, path.absolute().parent if own else None)


@lru_cache(maxsize=64)
def _content(text: str) -> dict[str, Any]:
    """Return the keys of a YAML text, none where it is no mapping. Raises ValueError for aliases, which may unfold without end."""
    events = list(yaml.parse(text, Loader=yaml.SafeLoader))
    if any(isinstance(event, yaml.AliasEvent) for event in events):
        raise ValueError("it has aliases; write out what they stand for")
    if len(events) < 3 or not isinstance(events[2], yaml.MappingStartEvent):
        return {}
    found = OmegaConf.to_container(OmegaConf.load(io.StringIO(text)), resolve=False)
    assert isinstance(found, dict)
    return {str(key): value for key, value in found.items()}


def _place(error: Exception) -> str:
    """Return where and why a file is no YAML. A line of it is not shown: it may be a file of secrets."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return "it is nested too deeply" if isinstance(error, RecursionError) else str(error).splitlines()[0]
    return f"line {mark.line + 1}, column {mark.column + 1}: {getattr(error, 'problem', '')}"


def _parents(entries: Any, name: str) -> tuple[str, ...]:
    parents = []
    for entry in entries if isinstance(entries, list) else [entries]:
        if isinstance(entry, str) and entry.startswith(_PARENT):
            parents.append(entry.removeprefix(_PARENT))
        elif entry not in (None, "_self_", *VERLS_DEFAULTS):
            raise ConfigError(
                f"recipe={name}: defaults may hold other recipes only, as `- {_PARENT}{DEFAULT_RECIPE}`; got {entry!r}"
            )
    return tuple(parents)


def _list_of_recipes() -> str:
    return f"Recipes: {', '.join(known_recipes()) or 'none'}; or a path to your own .yaml file"
