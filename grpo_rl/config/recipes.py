"""Recipes: YAML files with verl's keys, only what differs from the defaults.

A recipe may be any file that a user names, also a link to a file with secrets that is no recipe and whose lines must
not appear in a log. So a message names the wrong line and quotes nothing of a file that is no YAML mapping.
"""

from __future__ import annotations

import copy
import difflib
import io
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

import grpo_rl
from grpo_rl.config.schema.fields import leaves, sections
from grpo_rl.config.verl.verl_answers import ANSWERS
from grpo_rl.errors import ConfigError

DEFAULT_RECIPE = "arithmetic/grpo"
_PARENT = "/recipe/"
_LARGEST = 100_000
"""The most entries of a recipe, aliases unfolded."""
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


def folder(name: str) -> Path:
    """Return the folder `conf` or `recipes`: inside an installed package, beside it in a checkout."""
    package = Path(grpo_rl.__file__).parent
    for candidate in (package / name, package.parent / name):
        if candidate.is_dir():
            return candidate
    raise ConfigError(f"the folder {name}/ is missing: it belongs beside or inside {package}; install the package again")


def known_recipes() -> list[str]:
    """Return the names of the recipes that come with the package."""
    root = folder("recipes")
    return sorted(str(path.relative_to(root).with_suffix("")) for path in root.rglob("*.yaml"))


def read(name: str) -> Recipe:
    """Return the recipe called `name` (`arithmetic/grpo`), or the file at that path (`./my.yaml`).

    Raises ConfigError with the list of recipes for an unknown name, and for a file that is no YAML mapping.
    """
    own = Path(name).expanduser()
    if own.suffix in (".yaml", ".yml"):
        if not own.is_file():
            raise ConfigError(f"recipe={name}: there is no file {own.absolute()}. {_list_of_recipes()}")
        return _read(own, name, own=True)
    path = folder("recipes") / f"{name}.yaml"
    if name not in known_recipes() or not path.is_file():
        near = difflib.get_close_matches(name, known_recipes(), n=2, cutoff=0.5)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        raise ConfigError(f"recipe={name}: unknown recipe.{hint} {_list_of_recipes()}")
    return _read(path, name, own=False)


def with_parents(recipe: Recipe, below: tuple[str, ...] = ()) -> list[Recipe]:
    """Return all that the recipe builds on, each once and before those that build on it, and the recipe. Raises ConfigError for a circle."""
    if recipe.name in below:
        raise ConfigError(f"recipe={below[0]}: builds on itself: {' -> '.join((*below, recipe.name))}")
    found: list[Recipe] = []
    for parent in recipe.parents:
        found += [entry for entry in with_parents(read(parent), (*below, recipe.name)) if entry not in found]
    return [*found, recipe]


def _read(path: Path, name: str, *, own: bool) -> Recipe:
    no_keys = ConfigError(f"recipe={name}: {path} holds no keys; a recipe is a mapping such as trainer: {{save_freq: 10}}")
    try:
        if path.stat().st_size > _LARGEST_FILE:
            raise ConfigError(f"recipe={name}: {path} has more than {_LARGEST_FILE:,} bytes, which no recipe has")
        content = copy.deepcopy(_content(path.read_text(encoding="utf-8"), path, name))
    except (OSError, ValueError, RecursionError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"recipe={name}: {path} cannot be read as YAML: {_place(error)}") from None
    if not isinstance(content, dict) or not content:
        raise no_keys
    entries: dict[str, Any] = {str(key): value for key, value in content.items()}
    if not any(map(_may_be_meant, entries)):
        raise ConfigError(
            f"recipe={name}: {path}: none of its {len(entries)} keys is one of a configuration, so it is no recipe"
        )
    if own and isinstance(entries.get("hydra"), dict) and set(entries["hydra"]) == {"searchpath"}:
        del entries["hydra"]  # the place of verl's defaults, in verl's own files
    parents = _parents(entries.pop("defaults", None), name)
    return Recipe(name, _without_empty_sections(entries), parents, path.absolute().parent if own else None)


@lru_cache(maxsize=64)
def _content(text: str, path: Path, name: str) -> Any:
    """Return what a YAML text says, None where that is no mapping with keys."""
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if not isinstance(root, yaml.MappingNode) or not root.value:
        return None
    _check_aliases(root, path, name)
    return OmegaConf.to_container(OmegaConf.load(io.StringIO(text)), resolve=False)


def _place(error: Exception) -> str:
    """Return where and why a file is no YAML, without a word of its content."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return {UnicodeDecodeError: "it is no UTF-8 text", RecursionError: "it is nested too deeply"}.get(
            type(error), error.strerror or "" if isinstance(error, OSError) else "its content is no plain mapping of values"
        )
    said = getattr(error, "problem", None) or ""
    twice = said.partition("found duplicate key ")[2]
    if twice:
        ours = any(twice in name.split(".") for name in leaves())
        reason = f": {twice if ours else 'a key'} stands twice"
    else:
        # PyYAML quotes what it stumbled on.
        reason = f" ({re.split(r'[^a-z ]', said)[0].strip()} ...)" if said else ""
    return f"line {mark.line + 1}, column {mark.column + 1}{reason}"


def _may_be_meant(key: str) -> bool:
    """Return whether a recipe's outermost key is one of the configuration or of verl, or looks like a misspelt one."""
    known = {"defaults", *(name.partition(".")[0] for name in (*sections(), *ANSWERS))}
    outer = key.partition(".")[0]
    return outer in known or bool(difflib.get_close_matches(outer[:100], known, n=1, cutoff=0.7))


def _check_aliases(root: yaml.Node, path: Path, name: str) -> None:
    """Raise ConfigError for aliases that unfold into a tree too large for any recipe ("billion laughs")."""
    sizes: dict[int, int] = {}

    def size(node: yaml.Node | None) -> int:
        if not isinstance(node, yaml.CollectionNode):
            return 1
        if id(node) not in sizes:
            # An alias to something that it lies in would never end.
            sizes[id(node)] = _LARGEST + 1
            parts = (part for entry in node.value for part in (entry if isinstance(entry, tuple) else (entry,)))
            sizes[id(node)] = 1 + sum(size(part) for part in parts)
        return sizes[id(node)]

    if size(root) > _LARGEST:
        raise ConfigError(f"recipe={name}: {path}: its aliases unfold into more than {_LARGEST:,} entries")


def _parents(entries: Any, name: str) -> tuple[str, ...]:
    if entries is None:
        return ()
    parents = []
    for entry in entries if isinstance(entries, list) else [entries]:
        if isinstance(entry, str) and entry.startswith(_PARENT):
            parents.append(entry.removeprefix(_PARENT))
        elif entry != "_self_" and entry not in VERLS_DEFAULTS:
            raise ConfigError(
                f"recipe={name}: defaults may hold other recipes only, as `- {_PARENT}{DEFAULT_RECIPE}`; got {entry!r}"
            )
    return tuple(parents)


def _without_empty_sections(content: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Leave out `actor:` with nothing below it (all lines commented out): Hydra would take it for null."""
    kept: dict[str, Any] = {}
    for name, value in content.items():
        key = f"{prefix}{name}"
        if key in sections():
            if value is None:
                continue
            if isinstance(value, dict):
                value = _without_empty_sections(value, f"{key}.")
        kept[name] = value
    return kept


def _list_of_recipes() -> str:
    return f"Recipes: {', '.join(known_recipes()) or 'none'}; or a path to your own .yaml file"
