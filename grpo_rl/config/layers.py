"""The layers that are laid over each other: defaults, `conf/config.yaml`, a recipe after those it builds on, the command line."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from grpo_rl.config import overrides, recipes, relative_paths
from grpo_rl.config.convert import show, unknown_key
from grpo_rl.config.recipes import Recipe
from grpo_rl.config.schema.fields import leaves, sections
from grpo_rl.config.schema.tree import Config
from grpo_rl.config.verl import verl_answers
from grpo_rl.errors import ConfigError

_ENVIRONMENT = "actor_rollout_ref.rollout.multi_turn.environment"


def of_recipe(name: str, problems: list[str], notes: list[str]) -> list[Recipe]:
    """Return all that the recipe builds on and, after it, the recipe, each with the keys of the schema; nothing if it cannot be read.

    What is wrong with its keys is added to `problems`, what is taken without a meaning here to `notes`.
    """
    try:
        family = recipes.with_parents(recipes.read(name))
    except ConfigError as error:
        problems += error.problems
        return []
    known = []
    for recipe in family:
        where = f" (in recipe {recipe.name})"
        keys = _known_keys(_in_place(recipe.content, where, notes), where, problems, notes)
        keys = keys if recipe.folder is None else relative_paths.from_folder(keys, recipe.folder)
        known.append(dataclasses.replace(recipe, content=keys))
    return known


def given(family: Sequence[Recipe]) -> set[str]:
    """Return the keys that the recipes set."""

    def keys(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
        for name, value in tree.items():
            if f"{prefix}{name}" in sections() and isinstance(value, Mapping):
                yield from keys(value, f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}"

    return {key for recipe in family for key in keys(recipe.content)}


def compose(family: Sequence[Recipe], words: Sequence[Override], problems: list[str], notes: list[str]) -> DictConfig:
    """Return all layers over each other; another environment than the recipe's has none of its options, which is noted.

    Where two layers do not go together, that is one more problem, and the defaults stand in for the rest.
    """
    try:
        composed = copy.deepcopy(_defaults())
        composed.merge_with(OmegaConf.load(recipes.folder("conf") / "config.yaml"), *(recipe.content for recipe in family))
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
    except (OmegaConfBaseException, ValueError) as error:
        problems.append(f"the configuration cannot be composed: {one_line(error)}")
        return copy.deepcopy(_defaults())


@cache
def _defaults() -> DictConfig:
    return OmegaConf.create(dataclasses.asdict(Config()))


def _apply(word: Override, composed: DictConfig) -> None:
    """Change `composed` as Hydra does for `++key=value` and of `~key`, the two that `grpo_rl.config.overrides` leaves."""
    key = word.key_or_group
    if not word.is_delete():
        assert word.is_force_add()
        OmegaConf.update(composed, key, word.value(), merge=True, force_add=True)
        return
    if OmegaConf.select(composed, key, throw_on_missing=False) is None:
        raise ValueError(f"~{key}: there is no such key")
    above, _, name = key.rpartition(".")
    with open_dict(composed):
        del OmegaConf.select(composed, above)[name]


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


def one_line(error: Exception) -> str:
    """Return the first line of an exception's message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
