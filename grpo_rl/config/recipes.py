"""The package's folders of YAML files, and how such a file is read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import yaml

import grpo_rl
from grpo_rl.errors import ConfigError, did_you_mean
from grpo_rl.frozen import frozen

DEFAULT_RECIPE = "arithmetic/grpo"
PRIMARY = "config"
_HEADER = re.compile(r"^#\s*@(\w+)\s+(\S+)\s*$", re.MULTILINE)
_SUFFIXES = (".yaml", ".yml")
_LARGEST_FILE = 1_000_000  # bytes; a full configuration has 15,000

VERLS_DEFAULTS = ("ppo_trainer",)  # verl's file of defaults, on which its examples build


@frozen
class YamlFile:
    entries: Mapping[str, Any]
    header: dict[str, str]  # the words after `# @` in the first lines: `{"package": "_global_"}`


def folder() -> Path:
    """Raises ConfigError if it is missing."""
    return _of_package("recipes")


def conf() -> Path:
    """Hydra's files: the defaults list, every key with its default, choices. Raises as `folder`."""
    return _of_package("conf")


def examples() -> Path:
    return _of_package("examples")


def _of_package(name: str) -> Path:
    """It is inside an installed package, and beside it in a checkout."""
    package = Path(grpo_rl.__file__).parent
    for candidate in (package / name, package.parent / name):
        if candidate.is_dir():
            return candidate
    raise ConfigError(f"the folder {name}/ is missing: it belongs beside or inside {package}; install the package again")


def known_recipes() -> list[str]:
    """Without `cluster/`, whose files are for other programs, which start runs."""
    return list(_names(folder()))


@cache
def _names(root: Path) -> tuple[str, ...]:
    files = (path.relative_to(root) for path in root.rglob("*.yaml"))
    return tuple(sorted(str(path.with_suffix("")) for path in files if path.parts[0] != "cluster"))


def path_of(name: str) -> Path:
    """Return the file of a recipe by name (`arithmetic/grpo`) or path (`./my.yaml`)."""
    path = Path(name).expanduser()
    return path if path.suffix in _SUFFIXES else folder() / f"{name}.yaml"


def problem(name: str) -> str | None:
    if Path(name).suffix in _SUFFIXES:
        path = path_of(name)
        return None if path.is_file() else f"recipe={name}: there is no file {path.absolute()}. {_list_of_recipes()}"
    if name in known_recipes():
        return None
    return f"recipe={name}: unknown recipe.{did_you_mean(name, known_recipes(), most=2)} {_list_of_recipes()}"


def read(path: Path, name: str) -> YamlFile:
    """Return the keys of a file that a user calls `name`. Raises ConfigError if it is no readable mapping."""
    try:
        status = path.stat()
        if status.st_size > _LARGEST_FILE:
            raise ConfigError(f"{name}: {path} has more than {_LARGEST_FILE:,} bytes, which no configuration has")
        file = _read(path, status.st_mtime_ns, status.st_size)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{name}: {path} cannot be read as YAML: {_place(error)}") from None
    if not file.entries:
        raise ConfigError(f"{name}: {path} holds no keys; it has to be a mapping such as trainer: {{save_freq: 10}}")
    return file


class _Loader(yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader):  # type: ignore[misc]
    """YAML as OmegaConf reads it (`1e-5` is a number, dates are text, no duplicate keys), by libyaml."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        names = set[str]()
        for key, _ in node.value:
            if key.tag == self.DEFAULT_SCALAR_TAG and key.value in names:
                raise yaml.constructor.ConstructorError(None, None, f"found duplicate key {key.value}", key.start_mark)
            names.add(key.value if key.tag == self.DEFAULT_SCALAR_TAG else "")
        return super().construct_mapping(node, deep=deep)


_DATE, _FLOAT = "tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:float"
_Loader.add_implicit_resolver(_FLOAT, re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?([eE][-+]?[0-9]+)$"), list("-+0123456789"))
_Loader.yaml_implicit_resolvers = {
    start: [(tag, pattern) for tag, pattern in resolvers if tag != _DATE]
    for start, resolvers in _Loader.yaml_implicit_resolvers.items()
}


@lru_cache(maxsize=256)
def _read(path: Path, modified_ns: int, size: int) -> YamlFile:
    """No keys if it is no mapping. Raises ValueError for aliases, which may unfold without end."""
    text = path.read_text(encoding="utf-8")
    events = list(yaml.parse(text, Loader=_Loader))
    if any(isinstance(event, yaml.AliasEvent) for event in events):
        raise ValueError("it has aliases; write out what they stand for")
    if len(events) < 3 or not isinstance(events[2], yaml.MappingStartEvent):
        return YamlFile({}, {})
    entries = _Loader(text).get_single_data()
    header = {match[1]: match[2] for match in _HEADER.finditer(text[:512])}
    return YamlFile({str(key): value for key, value in entries.items()}, header)


def _place(error: Exception) -> str:
    """Return where and why a file is no YAML, without its text, which may be secret."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return "it is nested too deeply" if isinstance(error, RecursionError) else str(error).splitlines()[0]
    return f"line {mark.line + 1}, column {mark.column + 1}: {getattr(error, 'problem', '')}"


def _list_of_recipes() -> str:
    return f"Recipes: {', '.join(known_recipes()) or 'none'}; or a path to your own .yaml file"
