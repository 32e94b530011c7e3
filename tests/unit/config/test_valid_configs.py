"""A configuration that keeps the rules is never refused, and means the same after it was written down and read."""

from __future__ import annotations

import dataclasses
from typing import Any

from config_tools import CPU, nested
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from valid_configs import valid_settings

from grpo_rl.config.checks.all_rules import check
from grpo_rl.config.compose import to_yaml
from grpo_rl.config.convert import convert, convert_or_explain

QUICK = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@QUICK
@given(valid_settings())
def test_a_valid_configuration_is_not_refused(keys: dict[str, Any]) -> None:
    assert check(convert(nested(keys)), CPU) == []


@settings(QUICK, max_examples=10)
@given(valid_settings())
def test_writing_down_and_reading_again_changes_nothing(keys: dict[str, Any]) -> None:
    config = convert(nested(keys))
    text = to_yaml(
        dataclasses.asdict(dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, default_local_dir="r")))
    )
    again = convert(OmegaConf.to_container(OmegaConf.create(text)))
    assert dataclasses.replace(again, trainer=config.trainer) == config


@QUICK
@given(valid_settings(), st.data())
def test_one_changed_value_is_refused_or_means_the_same_or_is_taken_as_it_is(keys: dict[str, Any], data: st.DataObject) -> None:
    key = data.draw(st.sampled_from(sorted(keys)))
    value = data.draw(st.sampled_from([None, -5, 0, 1.5, "x", "", [1], {"a": 1}, True, 10**30, float("nan"), str(keys[key])]))
    config, problems = convert_or_explain(nested(keys | {key: value}))
    if problems:
        assert all(problem.startswith(key) for problem in problems)
        return
    taken: Any = config
    for name in key.split("."):
        taken = getattr(taken, name)
    # Only what loses nothing is converted: text to the number it spells, one entry to a list of one, 1 to "1".
    # Beyond 2^53 a real number is the nearest one to the whole number.
    nearest = float(value) if isinstance(taken, float) and isinstance(value, int) else value
    assert taken in (value, nearest, keys[key], [value]) or str(taken) == str(value)
    check(config, CPU)
