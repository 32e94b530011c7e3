"""The schema as a table: every key with its kind of value and its default."""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Iterator, Mapping
from functools import cache, lru_cache
from operator import attrgetter
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from grpo_rl.config.schema.tree import Config, Range
from grpo_rl.frozen import frozen

T = TypeVar("T")
_NOUNS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", dict: "a mapping {name: value}"}


@frozen
class Kind:
    base: type
    optional: bool = False
    range: Range | None = None
    choices: tuple[str, ...] = ()
    item: Kind | None = None

    def describe(self) -> str:
        """`a whole number >= 1, or null`."""
        if self.choices:
            text = "one of " + ", ".join(self.choices)
        elif self.item is not None:
            text = f"a list, each {self.item.describe()}"
        else:
            text = _NOUNS[self.base]
        bounds = "" if self.range is None else self.range.describe()
        return text + (f" {bounds}" if bounds else "") + (", or null" if self.optional else "")


@frozen
class Leaf:
    kind: Kind
    default: Any
    key: str
    part: str  # part of a run that reads it (`kinds.field`); empty if no rule is about it
    needs: tuple[tuple[str, str], ...]
    """Needs of the key and the sections around it, after the section that has them."""
    harmless: bool


def kind_of(annotation: Any) -> Kind:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        (inner,) = (part for part in arguments if part is not types.NoneType)
        return dataclasses.replace(kind_of(inner), optional=True)
    if origin is Annotated:
        base, bounds = arguments
        return dataclasses.replace(kind_of(base), range=bounds)
    if origin is Literal:
        return Kind(str, choices=arguments)
    if origin is list:
        return Kind(list, item=kind_of(*arguments))
    base = origin or annotation
    assert base in _NOUNS, f"no rule for values of {annotation}"
    return Kind(base)


@cache
def annotations_of(section: type) -> dict[str, Any]:
    hints = get_type_hints(section, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(section)}


@cache
def leaves() -> dict[str, Leaf]:
    return {leaf.key: leaf for leaf in _leaves(Config(), "", "", (), False)}


def _leaves(section: Any, key: str, part: str, needs: tuple[tuple[str, str], ...], harmless: bool) -> Iterator[Leaf]:
    """A section's part, needs and harmlessness hold for its keys by default."""
    group: type = type(section)
    for entry in dataclasses.fields(section):
        default, metadata = getattr(section, entry.name), entry.metadata
        inherited = (
            f"{key}.{entry.name}".lstrip("."),
            metadata.get("part") or part,
            needs + tuple((key, need) for need in metadata.get("needs", ())),
            harmless or metadata.get("harmless", False),
        )
        if dataclasses.is_dataclass(default):
            yield from _leaves(default, *inherited)
        else:
            yield Leaf(kind_of(annotations_of(group)[entry.name]), default, *inherited)


def groups_around(key: str) -> Iterator[str]:
    """Yield `a.b` and `a` for `a.b.c`."""
    while key := key.rpartition(".")[0]:
        yield key


@cache
def sections() -> frozenset[str]:
    return frozenset(group for key in leaves() for group in groups_around(key))


def leaf_around(key: str) -> Leaf | None:
    """Return the leaf of the schema that `key` lies in, e.g. `...override_config` for `...override_config.a`.

    A key with a point behind it is a leaf of its own, if it is one.
    """
    return next((leaves()[group] for group in groups_around(key) if group in leaves()), None)


def free_mapping(key: str) -> Leaf | None:
    """Return the leaf that `key` lies in, if that takes any keys below it."""
    leaf = leaf_around(key)
    return leaf if leaf and leaf.kind.base is dict else None


def value_of(config: Any, key: str) -> Any:
    return attrgetter(key)(config)


def replaced(config: T, values: Mapping[str, Any]) -> T:
    """Return a configuration or section with the values of these dotted keys."""
    for key, value in values.items():
        head, _, rest = key.partition(".")
        part = replaced(getattr(config, head), {rest: value}) if rest else value
        config = dataclasses.replace(config, **{head: part})  # type: ignore[type-var]
    return config


OTHER_NAMES = {
    "beta": "actor_rollout_ref.actor.kl_loss_coef",
    "learning_rate": "actor_rollout_ref.actor.optim.lr",
    "max_completion_length": "data.max_response_length",
    "max_steps": "trainer.total_training_steps",
    "n_val": "actor_rollout_ref.rollout.val_kwargs.n",
    "num_generations": "actor_rollout_ref.rollout.n",
    "num_train_epochs": "trainer.total_epochs",
    "output_dir": "trainer.default_local_dir",
    "report_to": "trainer.logger",
    "save_steps": "trainer.save_freq",
}
"""Keys' names in other trainers, for suggestions."""


@lru_cache(maxsize=1024)
def nearest(key: str) -> tuple[str, ...]:
    """Return keys that `key` may have meant, the likeliest first, those of its group before others."""
    key = key[:200]  # comparing is quadratic in the length
    group, _, last = key.rpartition(".")
    if last in OTHER_NAMES:
        return (OTHER_NAMES[last],)
    names = {name.rpartition(".")[2] for name in leaves()}
    in_group = [name.rpartition(".")[2] for name in leaves() if name.rpartition(".")[0] == group]
    near_in_group = [f"{group}.{name}" for name in difflib.get_close_matches(last, in_group, n=3, cutoff=0.75)]
    # A right name in the wrong group is as near as a misspelt one in the right group.
    meant = [last] if last in names else difflib.get_close_matches(last, names, n=3, cutoff=0.75)
    candidates = {name for name in leaves() if name.rpartition(".")[2] in meant}
    if last not in names:
        candidates.update(difflib.get_close_matches(key, leaves(), n=3, cutoff=0.9 if candidates else 0.75))
    likeliest = sorted(candidates, key=lambda name: (-difflib.SequenceMatcher(None, name, key).ratio(), name))
    return tuple(dict.fromkeys((*near_in_group, *likeliest)))[:3]


def siblings(key: str) -> list[str]:
    """Return the names directly in the group that `key` would lie in."""
    group = key.rpartition(".")[0]
    names = (name.removeprefix(f"{group}.").partition(".")[0] for name in leaves() if name.startswith(f"{group}."))
    return list(dict.fromkeys(names))


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested configuration by dotted keys; free mappings are values."""
    values: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and key not in leaves():
            values |= flat(value, f"{key}.")
        else:
            values[key] = value
    return values


_REFERENCE = re.compile(r"\$\{([\w.]+)\}")


def changed(values: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return value and default of keys that differ; `${key}` in defaults is filled in."""
    changes: dict[str, tuple[Any, Any]] = {}
    for key, value in values.items():
        default = leaves()[key].default if key in leaves() else None
        if isinstance(default, str):
            default = _REFERENCE.sub(lambda match: str(values.get(match[1], match[0])), default)
        if value != default and (key in leaves() or value not in ({}, [])):
            changes[key] = value, default
    return changes


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *groups, name = key.split(".")
        place = tree
        for group in groups:
            place = place.setdefault(group, {})
        place[name] = value
    return tree
