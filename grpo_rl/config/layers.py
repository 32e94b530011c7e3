"""The layers that Hydra lays over each other: defaults, `conf/config.yaml`, a recipe after those it builds on, the command line."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import Override
from hydra.errors import ConfigCompositionException, HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from grpo_rl.config import overrides, recipes, relative_paths
from grpo_rl.config.convert import show, unknown_key
from grpo_rl.config.schema.fields import leaves, sections
from grpo_rl.config.schema.tree import Config
from grpo_rl.config.verl import verl_answers
from grpo_rl.errors import ConfigError

_ENVIRONMENT = "actor_rollout_ref.rollout.multi_turn.environment"


@dataclass(frozen=True, slots=True)
class Layer:
    """A recipe in the form that Hydra takes."""

    option: str
    text: str
    """The node as text, by which layers are compared."""
    node: dict[str, Any] = field(compare=False)


def of_recipe(name: str, problems: list[str], notes: list[str]) -> tuple[Layer, ...]:
    """Return the recipe and, after it, all that it builds on; nothing if it cannot be read.

    What is wrong with its keys is added to `problems`, what is taken without a meaning here to `notes`.
    """
    try:
        family = recipes.with_parents(recipes.read(name))
    except ConfigError as error:
        problems += error.problems
        return ()
    layers = []
    for recipe in family:
        where = f" (in recipe {recipe.name})"
        known = _known_keys(_in_place(recipe.content, where, notes), where, problems, notes)
        node = recipe.node(known if recipe.folder is None else relative_paths.from_folder(known, recipe.folder))
        layers.append(Layer(recipe.option, repr(node), node))
    return tuple(layers)


def given(layers: Sequence[Layer]) -> set[str]:
    """Return the keys that the layers set."""

    def keys(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
        for name, value in tree.items():
            if f"{prefix}{name}" in sections() and isinstance(value, Mapping):
                yield from keys(value, f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}"

    return {key for layer in layers for key in keys(layer.node)}


def compose(layers: tuple[Layer, ...], words: Sequence[Override], problems: list[str], notes: list[str]) -> DictConfig:
    """Return what Hydra composes; another environment than the recipe's has none of its options, which is noted. If Hydra refuses, that is one more problem, and the defaults stand in for the rest."""
    folder = recipes.folder("conf").absolute()
    try:
        composed = copy.deepcopy(_below_the_words(str(folder), (folder / "config.yaml").read_text(encoding="utf-8"), layers))
        before = OmegaConf.select(composed, _ENVIRONMENT)
        for word in words:
            if (
                word.key_or_group == f"{_ENVIRONMENT}.name"
                and not word.is_delete()
                and word.value() != before.name
                and before.options
            ):
                notes.append(
                    f"{_ENVIRONMENT}.options: those of {before.name} in the recipe are left out, as the environment is {word.value()}"
                )
                before.options = {}
        for word in words:
            _apply(word, composed)
        return composed
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        problems.append(f"the configuration cannot be composed: {one_line(error)}")
        return OmegaConf.create(_plain_defaults())


@lru_cache(maxsize=32)
def _below_the_words(folder: str, text: str, layers: tuple[Layer, ...]) -> DictConfig:
    """Return defaults, `config.yaml` (its `text`) and the recipe, composed. Hydra takes a tenth of a second, so equal ones are kept."""
    store = _store_with_defaults()
    for layer in layers:
        group, _, option = f"recipe/{layer.option}".rpartition("/")
        store.store(option, layer.node, group=group, package="_global_")
    with initialize_config_dir(version_base="1.3", config_dir=folder):
        return hydra_compose("config", overrides=[f"recipe={layer.option}" for layer in layers[:1]])


@cache
def _store_with_defaults() -> ConfigStore:
    """Return Hydra's store, in which the defaults lie; putting them there takes a sixth of the time of a composition."""
    store = ConfigStore.instance()
    store.store("schema", _plain_defaults())
    return store


def _apply(word: Override, composed: DictConfig) -> None:
    """Change `composed` as Hydra does for `++key=value` and of `~key`, the two that `grpo_rl.config.overrides` leaves."""
    key = word.key_or_group
    if word.is_delete():
        if OmegaConf.select(composed, key, throw_on_missing=False) is None:
            raise ConfigCompositionException(f"Could not delete from config. '{key}' does not exist.")
        above, _, name = key.rpartition(".")
        with open_dict(composed):
            del OmegaConf.select(composed, above)[name]
        return
    assert word.is_force_add()
    try:
        OmegaConf.update(composed, key, word.value(), merge=True, force_add=True)
    except OmegaConfBaseException as error:
        raise ConfigCompositionException(f"Error merging override {word.input_line}") from error


def _in_place(tree: Mapping[str, Any], where: str, notes: list[str]) -> dict[str, Any]:
    """Return `tree` with the values of verl's keys that have another place here in that place."""
    moved = OmegaConf.create(dict(tree))
    for key, answer in verl_answers.ANSWERS.items():
        value = OmegaConf.select(moved, key) if answer.target else None
        if value is None or answer.target is None or value in answer.accepts:
            continue
        notes.append(f"{key}={show(value)}: is {answer.target} here{where}")
        OmegaConf.update(moved, answer.target, value, force_add=True)
        above, _, name = key.rpartition(".")
        del OmegaConf.select(moved, above)[name]
        while above and not OmegaConf.select(moved, above):
            above, _, name = above.rpartition(".")
            del (OmegaConf.select(moved, above) if above else moved)[name]
    content = OmegaConf.to_container(moved)
    assert isinstance(content, dict)
    return {str(name): value for name, value in content.items()}


def _known_keys(tree: Mapping[str, Any], where: str, problems: list[str], notes: list[str], prefix: str = "") -> dict[str, Any]:
    """Return `tree` without the keys that are not in the schema; those that cannot be accepted become problems."""
    kept: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if len(problems) >= overrides.MOST_PROBLEMS:
            break
        if key in sections() and isinstance(value, Mapping):
            kept[name] = _known_keys(value, where, problems, notes, f"{key}.")
        elif key in sections() or key in leaves():
            if "." in str(name):
                problems.append(f"{key}: dots do not nest in a YAML file{where}; write each part on its own, indented line")
            elif unknown := overrides.unknown_resolvers(str(value)):
                problems.append(f"{key}: {unknown}{where}")
            else:
                kept[name] = value
        else:
            answers = verl_answers.refusals(key, value, where)
            notes += verl_answers.notes(key, value, where)
            problems += [unknown_key(key, where)] if answers is None else answers
    return kept


def _plain_defaults() -> dict[str, Any]:
    # Frozen dataclasses as Hydra nodes would be read-only, and Literal types refused: plain data merges.
    return dataclasses.asdict(Config())


def one_line(error: Exception) -> str:
    """Return the first line of an exception's message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
