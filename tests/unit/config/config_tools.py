"""Configurations for tests, built without Hydra: dotted keys in, a checked Config out."""

from __future__ import annotations

import math
from pathlib import Path
from string import Template
from typing import Any

from hypothesis import strategies as st

from grpo_rl.config.convert import convert_or_explain
from grpo_rl.config.derived import Machine
from grpo_rl.config.schema.fields import Kind, Leaf, leaves, nested
from grpo_rl.config.schema.tree import Config

CPU = Machine(num_gpus=0, num_cpus=2, device="cpu")
EIGHT_GPUS = Machine(num_gpus=8, num_cpus=64, device="cuda")

A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
RUNNABLE = {
    "data.train_files": "task:arithmetic",
    "actor_rollout_ref.model.path": "builtin:arithmetic",
    "data.train_batch_size": 32,
    f"{A}.ppo_mini_batch_size": 32,
}


SHORT = {"A": A, "R": R, "M": "actor_rollout_ref.model", "REF": "actor_rollout_ref.ref", "RM": "reward.reward_model"}
SHORT |= {"C": "algorithm.rollout_correction"}


def verls_commands() -> dict[str, dict[str, str]]:
    """Return the words of verl_commands.txt by the name of their command, groups of words put in their places."""
    found: dict[str, dict[str, str]] = {}
    for section in Path(__file__).with_name("verl_commands.txt").read_text().split("\n[")[1:]:
        name, _, text = section.partition("]\n")
        words = found[name] = {}
        for word in Template(text).substitute(SHORT).split():
            if word.startswith("@"):
                words |= found[f"*{word[1:]}"]
            elif word.startswith("-"):
                del words[word[1:]]
            else:
                key, _, value = word.partition("=")
                words[key] = value
    return {name: words for name, words in found.items() if not name.startswith("*")}


def convert(raw: dict[str, Any]) -> Config:
    """Return the Config of a nested mapping, in which nothing is wrong."""
    config, problems = convert_or_explain(raw)
    assert not problems, problems
    return config


def config_with(**keys: Any) -> Config:
    """The smallest runnable configuration with `keys` changed; `__` stands for a dot."""
    return config_of({key.replace("__", "."): value for key, value in keys.items()})


def config_of(keys: dict[str, Any]) -> Config:
    """The smallest runnable configuration with `keys` (dotted) changed."""
    return convert(nested(RUNNABLE | keys))


TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"], exclude_characters="$\\"), max_size=12).filter(
    lambda text: text != "???" and not text.startswith("~/")
)


def values_of(kind: Kind) -> st.SearchStrategy[Any]:
    """Values that the key's rule allows."""
    if kind.item is not None:
        inner: st.SearchStrategy[Any] = st.lists(values_of(kind.item), max_size=3)
    elif kind.choices:
        inner = st.sampled_from(kind.choices)
    elif kind.base is bool:
        inner = st.booleans()
    elif kind.base is str:
        inner = TEXTS
    elif kind.base is dict:
        inner = st.dictionaries(st.from_regex("[a-z_]{1,8}", fullmatch=True), st.integers() | st.booleans() | TEXTS, max_size=3)
    else:
        inner = numbers_of(kind)
    return st.none() | inner if kind.optional else inner


def numbers_of(kind: Kind) -> st.SearchStrategy[Any]:
    """Numbers within the key's range."""
    bounds = kind.range
    low = high = None
    exclude_low = exclude_high = False
    if bounds is not None:
        exclude_low, exclude_high = bounds.gt is not None, bounds.lt is not None
        low = bounds.gt if exclude_low else bounds.ge
        high = bounds.lt if exclude_high else bounds.le
    if kind.base is int:
        assert not exclude_low and not exclude_high
        return st.integers(-(2**63) + 1 if low is None else int(low), 2**63 - 1 if high is None else int(high))
    low = None if low == -math.inf else low
    high = None if high == math.inf else high
    inside = st.floats(
        low,
        high,
        exclude_min=exclude_low and low is not None,
        exclude_max=exclude_high and high is not None,
        allow_nan=False,
        allow_infinity=False,
    )
    return st.just(0.0) | inside if bounds is not None and bounds.zero else inside


def any_settings() -> st.SearchStrategy[dict[str, Any]]:
    """Some keys, each with a value that its rule allows."""

    def settings_of(chosen: list[Leaf]) -> st.SearchStrategy[dict[str, Any]]:
        return st.fixed_dictionaries({leaf.key: values_of(leaf.kind) for leaf in chosen})

    return st.lists(st.sampled_from(list(leaves().values())), unique_by=lambda leaf: leaf.key, max_size=20).flatmap(settings_of)
