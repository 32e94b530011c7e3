"""Every number has two bounds with a reason: what lies outside is refused at once, what lies inside can be planned at once."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
from config_tools import CPU, RUNNABLE, A, R, nested

from grpo_rl.config.compose import compose
from grpo_rl.config.convert import convert_or_explain, value_problem
from grpo_rl.config.schema.fields import Leaf, leaves
from grpo_rl.config.schema.kinds import Range
from grpo_rl.errors import ConfigError
from grpo_rl.plan.make import make_plan

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


@pytest.mark.parametrize("key", NUMBERS)
def test_an_extreme_number_is_refused_or_planned_at_once(key: str) -> None:
    for value in EXTREMES:
        if value_problem(key, [value] if NUMBERS[key].kind.item else value) is not None:
            continue
        shown = f"[{value!r}]" if NUMBERS[key].kind.item else repr(value)
        started = time.process_time()
        try:
            make_plan(compose([*(f"{name}={given}" for name, given in RUNNABLE.items() if name != key), f"{key}={shown}"]), CPU)
        except ConfigError as error:
            assert all("\n" not in problem for problem in error.problems)
        assert time.process_time() - started < BOUND_S


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data.max_response_length", 1_000_000),
        (f"{R}.n", 4096),
        (f"{R}.temperature", 0.01),
        (f"{R}.max_num_batched_tokens", 1_048_576),
        (f"{A}.optim.lr", 1e-9),
        (f"{A}.optim.eps", 1e-15),
        (f"{A}.clip_ratio_high", 1e6),
        (f"{A}.loss_scale_factor", 32_768),
        ("reward.timeout_s", 86_400),
        ("trainer.step_timeout_s", 30 * 86_400),
        ("trainer.grace_s", 0.1),
        ("trainer.total_training_steps", 10**9),
        ("trainer.seed", 2**63 - 1),
    ],
)
def test_a_sensible_number_is_taken(key: str, value: float) -> None:
    _, problems = convert_or_explain(nested({key: value}))
    assert problems == []
