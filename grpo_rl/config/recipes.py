"""Recipes: YAML files with verl's keys, only what differs from the defaults."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

import grpo_rl
from grpo_rl.config.schema.fields import sections
from grpo_rl.errors import ConfigError

DEFAULT_RECIPE = "arithmetic/grpo"
OWN_FILE = "own_file"
"""Name under which Hydra knows a recipe that lies outside recipes/."""

_PARENT = "/recipe/"
_LARGEST = 100_000


@dataclass(frozen=True, slots=True)
class Recipe:
    """A recipe as it was read: its keys, and the recipes that it builds on (listed under `defaults`)."""

    name: str
    """As the user names it."""
    option: str
    """As Hydra names it, below the group `recipe`."""
    content: dict[str, Any]
    parents: tuple[str, ...] = ()

    def node(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """What Hydra is given: `content` with the list of parents before it."""
        if not self.parents:
            return dict(content)
        return {"defaults": [*(_PARENT + parent for parent in self.parents), "_self_"], **content}


def folder(name: str) -> Path:
    """`conf` or `recipes`: inside an installed package, beside it in a checkout."""
    package = Path(grpo_rl.__file__).parent
    for candidate in (package / name, package.parent / name):
        if candidate.is_dir():
            return candidate
    raise ConfigError(f"the folder {name}/ is missing: it belongs beside or inside {package}; install the package again")


def known_recipes() -> list[str]:
    """Names of the recipes that come with the package."""
    root = folder("recipes")
    return sorted(str(path.relative_to(root).with_suffix("")) for path in root.rglob("*.yaml"))


def read(name: str) -> Recipe:
    """The recipe called `name` (`arithmetic/grpo`), or the file at that path (`./my.yaml`).

    Raises ConfigError with the list of recipes for an unknown name, and for a file that is no YAML mapping.
    """
    own = Path(name).expanduser()
    if own.suffix in (".yaml", ".yml"):
        if not own.is_file():
            raise ConfigError(f"recipe={name}: there is no file {own.absolute()}. {_list_of_recipes()}")
        return _read(own, name, OWN_FILE)
    path = folder("recipes") / f"{name}.yaml"
    if name not in known_recipes() or not path.is_file():
        near = difflib.get_close_matches(name, known_recipes(), n=2, cutoff=0.5)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        raise ConfigError(f"recipe={name}: unknown recipe.{hint} {_list_of_recipes()}")
    return _read(path, name, name)


def with_parents(recipe: Recipe) -> list[Recipe]:
    """The recipe and all it builds on, each once. Raises ConfigError for a circle."""
    found: dict[str, Recipe] = {}

    def add(entry: Recipe, below: tuple[str, ...]) -> None:
        if entry.option in below:
            raise ConfigError(f"recipe={recipe.name}: builds on itself: {' -> '.join((*below, entry.option))}")
        found[entry.option] = entry
        for parent in entry.parents:
            add(read(parent), (*below, entry.option))

    add(recipe, ())
    return list(found.values())


def _read(path: Path, name: str, option: str) -> Recipe:
    try:
        _check_aliases(path, name)
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except (OSError, ValueError, RecursionError, yaml.YAMLError, OmegaConfBaseException) as error:
        reason = " ".join(str(error).split())[:500]
        raise ConfigError(f"recipe={name}: {path} cannot be read as YAML: {reason}") from None
    if not isinstance(content, dict) or not content:
        raise ConfigError(f"recipe={name}: {path} holds no keys; a recipe is a mapping such as trainer: {{save_freq: 10}}")
    entries: dict[str, Any] = {str(key): value for key, value in content.items()}
    parents = _parents(entries.pop("defaults", None), name)
    return Recipe(name, option, _without_empty_sections(entries), parents)


def _check_aliases(path: Path, name: str) -> None:
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

    if size(yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)) > _LARGEST:
        raise ConfigError(f"recipe={name}: {path}: its aliases unfold into more than {_LARGEST:,} entries")


def _parents(entries: Any, name: str) -> tuple[str, ...]:
    if entries is None:
        return ()
    parents = []
    for entry in entries if isinstance(entries, list) else [entries]:
        if isinstance(entry, str) and entry.startswith(_PARENT):
            parents.append(entry.removeprefix(_PARENT))
        elif entry != "_self_":
            raise ConfigError(
                f"recipe={name}: defaults may hold other recipes only, as `- {_PARENT}{DEFAULT_RECIPE}`; got {entry!r}"
            )
    return tuple(parents)


def _without_empty_sections(content: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """`actor:` with nothing below it (all lines commented out) is left out: Hydra would take it for null."""
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
