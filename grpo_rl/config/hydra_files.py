"""The files that Hydra composes: conf/, recipes and user files, read by the same rules. A file holds keys of
the schema or of verl's; its relative paths start at its folder. Problems are collected, to be told at
once."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from grpo_rl.config import choices, recipes, relative_paths
from grpo_rl.config.overrides import Settings, refused_of_hydra
from grpo_rl.config.recipes import PRIMARY, VERLS_DEFAULTS, YamlFile
from grpo_rl.config.schema.fields import flat
from grpo_rl.errors import ConfigError

_GLOBAL = {"package": "_global_"}
_RECIPE = "recipe/"
_TYPED = "Hydra's own settings are typed, or stand in a primary file, --config-name=FILE"
_NO_DEFAULT = (
    f"it may hold recipes (`- /recipe/{recipes.DEFAULT_RECIPE}`, `- ./base.yaml` for a file beside it) and choices "
    "(`- override /algorithm: dapo`)"
)
_GENERATED = ("base/", "hydra/")  # files with the schema's defaults, and Hydra's own


@dataclass(slots=True)
class Reading:
    folders: Sequence[Path]
    """Of primary files and choices: that of --config-path, conf/, that of --config-dir."""
    config_name: str = PRIMARY
    settings: dict[str, Settings] = field(default_factory=dict)
    is_verls: bool = True  # nothing of this package but its defaults has been read

    @property
    def problems(self) -> list[str]:
        return [problem for settings in self.settings.values() for problem in settings.problems]


_CURRENT: ContextVar[Reading] = ContextVar("reading")


@contextmanager
def reading(folders: Sequence[Path], config_name: str) -> Iterator[Reading]:
    for plugin in (_Folder, _Recipes, _SearchPath):
        Plugins.instance().register(plugin)
    current = Reading(folders, config_name)
    token = _CURRENT.set(current)
    try:
        yield current
    finally:
        _CURRENT.reset(token)


class _SearchPath(SearchPathPlugin):
    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        current = _CURRENT.get(None)
        if current is None:
            return
        # Hydra would read the first folder, its main one, by its own rules.
        for element in search_path.get_path():
            if element.provider == "main":
                element.path = f"{_Folder.scheme()}://{element.path}"
        search_path.prepend("recipes", f"{_Recipes.scheme()}://", anchor="main")
        for folder in current.folders[1:]:
            search_path.append("grpo_rl", f"{_Folder.scheme()}://{folder}")


def searched(path: Path) -> list[Path]:
    """Return the folders on the search path of a primary file. Raises ConfigError for missing ones."""
    try:
        hydra = recipes.read(path, path.stem).entries.get("hydra")
    except ConfigError:
        return []  # reported when it is composed
    entries = hydra.get("searchpath") if isinstance(hydra, Mapping) else None
    folders = [Path(str(entry).removeprefix("file://")).absolute() for entry in entries or []]
    # verl's files name the folder of its defaults, which conf/ has.
    missing = [folder for folder in folders if not folder.is_dir() and not folder.match("trainer/config")]
    if missing:
        raise ConfigError([f"hydra.searchpath (in {path}): there is no folder {folder}" for folder in missing])
    return [folder for folder in folders if folder.is_dir()]


class _Folder(ConfigSource):
    @staticmethod
    def scheme() -> str:
        return "yaml"

    def _file(self, config_path: str) -> Path:
        return Path(self.path) / self._normalize_file_name(config_path)

    def load_config(self, config_path: str) -> ConfigResult:
        return _result(self, config_path, self._file(config_path))

    def available(self) -> bool:
        return Path(self.path).is_dir()

    def is_group(self, config_path: str) -> bool:
        return (Path(self.path) / config_path).is_dir()

    def is_config(self, config_path: str) -> bool:
        # Hydra has a user's file with the package's name under another one (`command_line`).
        return self._file(config_path).is_file() and (config_path != PRIMARY or Path(self.path) == recipes.conf())

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        names: list[str] = []
        for path in (Path(self.path) / config_path).iterdir():
            if path.is_dir() or path.suffix == ".yaml":
                self._list_add_result(names, str(Path(config_path) / path.name), path.name, results_filter)
        return sorted(set(names) - set(choices.HIDDEN[:2]))


class _Recipes(ConfigSource):
    @staticmethod
    def scheme() -> str:
        return "recipes"

    def load_config(self, config_path: str) -> ConfigResult:
        return _result(self, config_path, recipes.path_of(config_path.removeprefix(_RECIPE)))

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return config_path.strip("/") in ("", "recipe")

    def is_config(self, config_path: str) -> bool:
        return config_path.startswith(_RECIPE) and recipes.problem(config_path.removeprefix(_RECIPE)) is None

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        if not config_path.strip("/"):
            return ["recipe"] if results_filter != ObjectType.CONFIG else []
        return recipes.known_recipes() if results_filter != ObjectType.GROUP else []


def _result(source: ConfigSource, config_path: str, path: Path) -> ConfigResult:
    # Hydra's launcher composes in processes without `reading`; the process of the run composes again.
    current = _CURRENT.get(None) or Reading([recipes.conf()])
    header: Mapping[str, str | None] = _GLOBAL
    try:
        file = recipes.read(path, config_path.removeprefix(_RECIPE))
        if config_path.startswith(_GENERATED):
            config = OmegaConf.create(dict(file.entries))
            header = {"package": None, **file.header}
        else:
            config = _checked(current, config_path, path, file)
    except ConfigError as error:
        current.settings[config_path] = Settings(problems=error.problems)
        config = OmegaConf.create({})
    return ConfigResult(source.provider, source.full_path(), config, dict(header))


def _checked(reading: Reading, config_path: str, path: Path, file: YamlFile) -> Any:
    """Return the keys at their places in the schema, with absolute paths, and Hydra's defaults list."""
    is_packages = path.is_relative_to(recipes.folder()) or path.is_relative_to(recipes.conf())
    settings = reading.settings[config_path] = _settings(path, file, config_path)
    reading.is_verls &= not is_packages or config_path in (PRIMARY, *VERLS_DEFAULTS) or config_path.startswith("verl/")
    pairs = settings.pairs
    if not is_packages or config_path == PRIMARY:
        pairs = list(relative_paths.from_folder(dict(pairs), path.absolute().parent).items())
    config = OmegaConf.create({})
    for key, value in pairs:
        OmegaConf.update(config, key, value, merge=bool(value), force_add=True)
    entries = file.entries
    is_primary = config_path in (reading.config_name, PRIMARY, *VERLS_DEFAULTS)
    if hydra := entries.get("hydra"):
        is_checked = config_path != PRIMARY or not is_packages
        for key in flat({"hydra": hydra}) if is_checked else ():
            reason = refused_of_hydra(key) if is_primary else _TYPED
            if reason and not key.startswith("hydra.searchpath"):  # `searched` has read the search path
                settings.problems.append(f"{key} (in {path}): {reason}")
        if is_primary:
            config["hydra"] = {key: value for key, value in hydra.items() if key != "searchpath"}
    if defaults := _defaults(reading, config_path, path, settings, is_primary, entries.get("defaults")):
        config["defaults"] = defaults
    return config


def _settings(path: Path, file: YamlFile, config_path: str) -> Settings:
    name = config_path.removeprefix(_RECIPE)
    settings = Settings(where=f" (in recipe {name})" if config_path.startswith(_RECIPE) else f" (in {path})")
    package = file.header.get("package") or "_global_"
    prefix = "" if package == "_global_" else f"{package.removeprefix('_global_.')}."
    for key, value in file.entries.items():
        if key not in ("defaults", "hydra"):
            settings.take(f"{prefix}{key}", value)
    return settings


def _defaults(reading: Reading, config_path: str, path: Path, settings: Settings, is_primary: bool, entries: Any) -> list[Any]:
    """Return Hydra's defaults list for that of a file."""
    if config_path == PRIMARY:
        return list(entries or [])
    entries = entries if isinstance(entries, list) else [] if entries is None else [entries]
    if config_path.startswith(_RECIPE) and (problem := _repeated(config_path.removeprefix(_RECIPE))):
        settings.problems.append(problem)
        entries = [entry for entry in entries if _parent(path, entry) is None]
    items: list[Any] = []
    group_of_file = config_path.rpartition("/")[0]
    siblings = choices.options(reading.folders, group_of_file) if group_of_file != "recipe" else []
    for entry in entries:
        item, problem, reason = entry, None, ""
        if isinstance(entry, Mapping) and len(entry) == 1:
            ((key, choice),) = entry.items()
            group = key.split()[-1].lstrip("/")
            if group in choices.groups([recipes.conf()]):
                # config.yaml has the group already: another form would add a second one.
                item = {f"override /{group}": choice}
                problem = choices.problem(reading.folders, group, choice) if isinstance(choice, str) else None
            elif not is_primary:
                reason = _TYPED if group.startswith("hydra/") else _NO_DEFAULT
        elif (parent := _parent(path, entry)) is not None:
            item, problem = f"/{_RECIPE}{parent}", recipes.problem(parent)
        elif entry in VERLS_DEFAULTS and not is_primary:
            item = {"override /verl": entry}
        elif is_primary and isinstance(entry, str) and entry != "_self_":
            item = f"/{entry.lstrip('/')}"
        elif entry != "_self_" and entry not in siblings:
            reason = _NO_DEFAULT
        if reason:
            settings.problems.append(f"defaults{settings.where}: {entry!r} cannot stand there: {reason}")
        elif problem:
            settings.problems.append(f"{problem}{settings.where}")
        else:
            items.append(item)
    is_based = any(str(item).strip("/").partition("/")[0] in (PRIMARY, *VERLS_DEFAULTS, "base") for item in items)
    if is_primary and not is_based:
        items.insert(0, f"/{PRIMARY}")
    if is_primary and "_self_" not in items:
        items.append("_self_")
    return sorted(items, key=lambda item: isinstance(item, Mapping) and next(iter(item)).startswith("override"))


def _parent(path: Path, entry: Any) -> str | None:
    """Return the recipe that an entry of a defaults list names, as `recipe=NAME` does."""
    if not isinstance(entry, str):
        return None
    if entry.startswith(("/recipe/", "recipe/")):
        return entry.lstrip("/").removeprefix(_RECIPE)
    return os.path.normpath(path.absolute().parent / entry) if entry.endswith((".yaml", ".yml")) else None


def _parents(name: str) -> list[str]:
    path = recipes.path_of(name)
    try:
        entries = recipes.read(path, name).entries.get("defaults")
    except ConfigError:
        return []
    names = (_parent(path, entry) for entry in (entries if isinstance(entries, list) else [entries]))
    return [name for name in names if name is not None]


def _repeated(name: str) -> str | None:
    """Return what is wrong with a recipe's ancestors: a circle, or one that comes twice."""
    # Hydra would follow a circle forever, and lay a repeated one over changes between.
    seen: dict[Path, str] = {}

    def search(*ancestry: str) -> str | None:
        for parent in _parents(ancestry[-1]):
            path = recipes.path_of(parent).resolve()
            if path in (recipes.path_of(child).resolve() for child in ancestry):
                return f"recipe={name}: builds on itself: {' -> '.join((*ancestry, parent))}"
            if path in seen:
                return f"recipe={name}: {parent} comes twice, by {seen[path]} and by {ancestry[-1]}: name it once"
            seen[path] = ancestry[-1]
            if problem := search(*ancestry, parent):
                return problem
        return None

    return search(name)
