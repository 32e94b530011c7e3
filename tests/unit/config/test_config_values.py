"""Values of single keys: what is taken, what is refused, and how it is said."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from config_tools import CPU, RUNNABLE, A, R, any_settings, config_of, convert, nested
from hypothesis import given, settings

from grpo_rl.config.compose import Composed, compose
from grpo_rl.config.convert import convert_or_explain, value_problem
from grpo_rl.config.schema import tree
from grpo_rl.config.schema.fields import Leaf, leaves, value_of
from grpo_rl.config.schema.kinds import Range
from grpo_rl.errors import ConfigError
from grpo_rl.plan.make import make_plan

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts"))
from conf_base import meanings

WRONG_VALUES: list[tuple[str, Any, str]] = [
    (f"{R}.n", 8.5, "not a whole number; write 8"),
    (f"{R}.n", "eight", "not a whole number"),
    (f"{R}.n", None, "null is not allowed"),
    (f"{R}.n", True, "not a whole number"),
    (f"{R}.n", 0, "out of range"),
    (f"{R}.n", math.nan, "not a whole number"),
    (f"{R}.n", "???", "no value"),
    (f"{R}.n", 10**12, "responses to one prompt are held and compared together"),
    (f"{R}.temperature", math.inf, "not finite"),
    (f"{R}.temperature", 1e-320, "engines raise smaller temperatures"),
    (f"{R}.dtype", "int8", "one of auto, bfloat16, float16, float32"),
    (f"{R}.free_cache_engine", 1, "not true or false"),
    (f"{R}.engine_kwargs", [1], "not a mapping"),
    (f"{A}.optim.lr", "nan", "not a number"),
    (f"{A}.optim.lr", "fast", "not a number"),
    (f"{A}.optim.betas", 0.9, "not a list"),
    (f"{A}.optim.betas", [0.9, "x"], "entry 2"),
    ("actor_rollout_ref.model.path", 1.5, "put it in quotes"),
    ("data.train_files", 3, "not a list"),
    ("trainer.logger", ["swanlab"], "entry 1 (swanlab)"),
]


@pytest.mark.parametrize(("key", "value", "said"), WRONG_VALUES, ids=[f"{key}={value}" for key, value, _ in WRONG_VALUES])
def test_a_wrong_value_is_refused_with_its_key_its_value_and_the_rule(key: str, value: Any, said: str) -> None:
    config, (problem,) = convert_or_explain(nested({key: value}))
    assert value_of(config, key) == leaves()[key].default
    assert problem.startswith(f"{key}=") and said in problem and "it takes" in problem


def test_every_default_is_a_value_of_its_key() -> None:
    # `field` of the schema returns Any, so that no type checker compares a default with its annotation.
    assert [problem for key, leaf in leaves().items() if (problem := value_problem(key, leaf.default))] == []


def test_all_wrong_values_are_reported_together() -> None:
    wrong = {key: value for key, value, _ in WRONG_VALUES}
    _, problems = convert_or_explain(nested(wrong))
    assert {problem.partition("=")[0] for problem in problems} == set(wrong)


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("trainer.save_frq", "trainer.save_freq"),
        ("train_batch_size", "data.train_batch_size"),
        ("trainer.train_batch_size", "data.train_batch_size"),
        ("actor_rollout_ref.rolout.n", f"{R}.n"),
        ("actor_rollout_ref.actor.lr", f"{A}.optim.lr"),
        ("actor_rollout_ref.actor.cliip_ratio", f"{A}.clip_ratio"),
        ("algorithm.adv_estimater", "algorithm.adv_estimator"),
        ("algorithm.whitening", "adv_estimator"),
        (f"{A}.adaptive_entropy.enabled", f"Did you mean {A}.adaptive_entropy.enable or"),
        (f"{R}.num_generations", f"Did you mean {R}.n?"),
        ("data.n_val", f"Did you mean {R}.val_kwargs.n?"),
        ("learning_rate", f"Did you mean {A}.optim.lr?"),
        ("trainer.output_dir", "Did you mean trainer.default_local_dir?"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_ones(key: str, expected: str) -> None:
    _, (problem,) = convert_or_explain(nested({key: 1}))
    assert problem.split(":")[0] in key and "unknown key" in problem and expected in problem


def test_a_value_where_a_group_of_keys_belongs_is_refused() -> None:
    _, problems = convert_or_explain({"trainer": 5, "data": None})
    assert [problem.partition(":")[0] for problem in problems] == ["data=null", "trainer=5"]


@pytest.mark.parametrize(
    ("key", "given", "taken"),
    [
        (f"{A}.optim.lr", "1e-6", 1e-6),
        (f"{A}.optim.lr", 1, 1.0),
        (f"{A}.optim.betas", ["0.9", 0], [0.9, 0.0]),
        (f"{R}.n", "8", 8),
        (f"{R}.free_cache_engine", "False", False),
        (f"{R}.enforce_eager", None, None),
        ("data.train_files", "a.parquet", ["a.parquet"]),
        ("trainer.logger", "console", ["console"]),
        ("trainer.experiment_name", 7, "7"),
        ("trainer.total_training_steps", None, None),
    ],
)
def test_a_value_is_converted_where_nothing_is_lost(key: str, given: Any, taken: Any) -> None:
    value = value_of(convert(nested({key: given})), key)
    assert value == taken and type(value) is type(taken)


def test_a_path_in_the_home_folder_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    config = convert(nested({"actor_rollout_ref.model.path": "~/models/qwen", "data.train_files": ["~/a.parquet"]}))
    assert config.actor_rollout_ref.model.path == "/home/someone/models/qwen"
    assert config.data.train_files == ["/home/someone/a.parquet"]


@settings(max_examples=150, deadline=None)
@given(any_settings())
def test_every_value_within_its_rule_is_taken_as_it_is(keys: dict[str, Any]) -> None:
    config = convert(nested(keys))
    for key, value in keys.items():
        assert value_of(config, key) == value


# ---- every number has two bounds with a reason -----------------------------------------------------------

NUMBERS = {key: leaf for key, leaf in leaves().items() if (leaf.kind.item or leaf.kind).base in (int, float)}
EXTREMES = (0, -1, 1e-300, 1e12, 10**12, 2**31)
BOUND_S = 2.0


def bounds_of(leaf: Leaf) -> Range:
    bounds = (leaf.kind.item or leaf.kind).range
    assert bounds is not None
    return bounds


@pytest.mark.parametrize("key", NUMBERS)
def test_a_number_has_two_finite_bounds_and_a_reason_in_the_message(key: str) -> None:
    leaf = NUMBERS[key]
    bounds = bounds_of(leaf)
    low, high = bounds.ge if bounds.gt is None else bounds.gt, bounds.le if bounds.lt is None else bounds.lt
    assert low is not None and high is not None and -math.inf < low < high < math.inf
    assert len(bounds.reason) > 10
    too_large: Any = int(high) + 1 if (leaf.kind.item or leaf.kind).base is int else float(high) * 1.01 + 1
    _, (problem,) = convert_or_explain(nested({key: [too_large] if leaf.kind.item else too_large}))
    assert problem.startswith(f"{key}=")
    assert bounds.reason in problem or high >= 2**63 - 1


@pytest.fixture(scope="module")
def runnable() -> Composed:
    """The first plan imports torch, which takes longer than a plan."""
    composed = compose([f"{name}={value}" for name, value in RUNNABLE.items()])
    make_plan(composed, CPU)
    return composed


@pytest.mark.parametrize("number", EXTREMES)
def test_an_extreme_number_is_refused_or_planned_at_once(runnable: Composed, number: float) -> None:
    extremes = {key: [number] if leaf.kind.item else number for key, leaf in NUMBERS.items()}
    extremes = {key: value for key, value in extremes.items() if value_problem(key, value) is None}
    config = compose([f"{key}={value!r}" for key, value in extremes.items()]).config
    for key, value in extremes.items():
        assert value_of(config, key) == value
        started = time.process_time()
        try:
            make_plan(replace(runnable, config=config_of({key: value})), CPU)
        except ConfigError as error:
            assert all("\n" not in problem for problem in error.problems), key
        assert time.process_time() - started < BOUND_S, key


# ---- meanings --------------------------------------------------------------------------------------------


def test_every_key_has_a_meaning() -> None:
    undocumented = [f"{name}.{field}" for name, fields in meanings().items() for field, text in fields.items() if not text]
    ours = [entry for entry in undocumented if entry.split(".")[0].endswith("Config")]
    # Fields that hold a whole group of keys need no words of their own.
    assert [entry for entry in ours if not _is_group(*entry.split("."))] == []


def _is_group(name: str, field: str) -> bool:
    return is_dataclass(get_type_hints(getattr(tree, name))[field])
