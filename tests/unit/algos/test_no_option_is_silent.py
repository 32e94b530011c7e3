"""What is known of every function of the algorithm: its interface, what it needs, and options without effect."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from objective_cases import SINGLE

from grpo_rl.algos import trial
from grpo_rl.algos.losses.registered import POLICY_LOSSES
from grpo_rl.config.function_options import CHOICES
from grpo_rl.config.schema.tree import Config
from grpo_rl.errors import ConfigError
from grpo_rl.plan import algorithm
from grpo_rl.registry import needs_of, options_of

A = "actor_rollout_ref.actor"
FUNCTIONS = [(kind, name) for kind in trial.KINDS.values() for name in sorted(kind.registry)]
NUMBERS: dict[str, tuple[Any, ...]] = {
    "algorithm.gamma": (0.5,),
    "algorithm.lam": (0.5,),
    "algorithm.norm_adv_by_std_in_grpo": (False,),
    f"{A}.clip_ratio": (0.05,),
    f"{A}.clip_ratio_low": (0.05,),
    f"{A}.clip_ratio_high": (0.05,),
    f"{A}.clip_ratio_c": (1.1,),
    f"{A}.loss_scale_factor": (7.0,),
    f"{A}.kl_loss_coef": (0.0, 0.5),
    f"{A}.kl_loss_type": ("k1",),
    f"{A}.use_kl_loss": (False,),
    f"{A}.entropy_coeff": (0.1,),
}
"""Every key that sets a number of the objective, with other values than the default."""
OPTIONS = {
    "tau_pos": 3.0, "tau_neg": 3.0, "clip_cov_ratio": 0.02, "clip_cov_lb": 0.1, "clip_cov_ub": 1.5, "kl_cov_ratio": 0.5,
    "ppo_kl_coef": 2.0, "dro_beta": 2.0, "max_ratio": 1.5,
}  # fmt: skip
"""Other values of the options of losses that have no key of their own."""


def with_value(root: Any, key: str, value: Any) -> Any:
    """A copy of a configuration with another value of one key."""
    head, _, rest = key.partition(".")
    return dataclasses.replace(root, **{head: with_value(getattr(root, head), rest, value) if rest else value})


@pytest.mark.parametrize(
    ("estimator", "words", "why"),
    [
        ("gpg", {"algorithm.adv_options": {"epsilon": 0.5}}, "epsilon=0.5 has no effect with gpg"),
        ("grpo", {"algorithm.adv_options": {"epsilon": 0.5, "std": "none"}}, "has no effect with grpo and std=none"),
        (
            "grpo",
            {"algorithm.adv_options": {"epsilon": 0.5}, "algorithm.norm_adv_by_std_in_grpo": False},
            "has no effect with grpo and std=none",
        ),
        ("gpg", {"algorithm.norm_adv_by_std_in_grpo": False}, "gpg has std=none anyway"),
    ],
)
def test_options_that_another_option_switches_off_are_refused(estimator: str, words: dict[str, Any], why: str) -> None:
    config = with_value(Config(), "algorithm.adv_estimator", estimator)
    for name, value in words.items():
        config = with_value(config, name, value)
    with pytest.raises(ConfigError, match=why):
        algorithm._bind(config, CHOICES[0])


# ---- what is known of every function of this package ----------------------------------------------------


@pytest.mark.parametrize(("kind", "name"), FUNCTIONS, ids=lambda value: value if isinstance(value, str) else "")
def test_every_function_keeps_to_its_interface_and_needs_all_that_it_says(kind: trial.FunctionKind, name: str) -> None:
    function = kind.registry.get(name)
    options = {"loss_scale_factor": 7.0} if "loss_scale_factor" in options_of(function) else {}
    trial.check(kind, name, options, kind.run)
    for need in needs_of(function) - {"group", "pairs"} - set(kind.supplied):
        with pytest.raises((AssertionError, TypeError, AttributeError)):  # it reads what it declares
            kind.run(without_need(function, need), options)


def without_need(function: Any, need: str) -> Any:
    def same(*arguments: Any, **keywords: Any) -> Any:
        return function(*arguments, **keywords)

    same.needs = needs_of(function) - {need}  # type: ignore[attr-defined]
    same.__wrapped__ = function  # type: ignore[attr-defined]
    return same


@pytest.mark.parametrize("name", sorted(name for name in SINGLE if options_of(POLICY_LOSSES.get(name)) and name != "topr"))
def test_with_one_update_the_plan_lists_exactly_the_options_whose_change_leaves_the_gradient(name: str) -> None:
    loss, inputs = POLICY_LOSSES.get(name), trial.loss_input(one_update=True)
    keys = {"clip_low": f"{A}.clip_ratio_low", "clip_high": f"{A}.clip_ratio_high", "clip_c": f"{A}.clip_ratio_c"}
    base = {"clip_cov_ratio": 0.9} if name == "clip_cov" else {}
    config, idle = with_value(Config(), f"{A}.policy_loss.loss_mode", name), set()
    for option in loss_options(name):
        key, value = keys.get(option, f"{A}.policy_loss.options.{option}"), OPTIONS.get(option)
        if value is None:
            value = NUMBERS[key][0]
            config = with_value(config, key, value)
        else:
            given = config.actor_rollout_ref.actor.policy_loss.options | {option: value}
            config = with_value(config, f"{A}.policy_loss.options", given)
        before, after = (trial.run_loss(loss, base | changed, inputs)[-1] for changed in ({}, {option: value}))
        idle |= {key} if torch.allclose(before, after, rtol=1e-12, atol=1e-15) else set()
    assert set(algorithm.without_effect_on_policy(config)) == idle


def loss_options(name: str) -> list[str]:
    return list(options_of(POLICY_LOSSES.get(name)))
