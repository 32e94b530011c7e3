"""No option of a function of the algorithm is without effect: changed, it gives another objective, or it is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import ragged_batches as reference
import torch
from advantage_cases import complete
from objective_cases import SINGLE
from torch import Tensor

from grpo_rl.algos import trial
from grpo_rl.algos.advantages.registered import ADVANTAGES
from grpo_rl.algos.aggregate import AGGREGATIONS, count, group_tokens
from grpo_rl.algos.kl import KL_ESTIMATORS
from grpo_rl.algos.losses.registered import POLICY_LOSSES, LossInput
from grpo_rl.algos.objective import Objective
from grpo_rl.algos.segments import Segments
from grpo_rl.config import effects
from grpo_rl.config.derived import Machine
from grpo_rl.config.function_options import CHOICES
from grpo_rl.config.schema.fields import value_of
from grpo_rl.config.schema.tree import Config
from grpo_rl.errors import ConfigError
from grpo_rl.plan import algorithm
from grpo_rl.registry import needs_of, options_of
from grpo_rl.trainer.sampled.advantage import estimator_options

A = "actor_rollout_ref.actor"
PARTS = {"first": 1.0, "second": 0.5}
FUNCTIONS = [(kind, name) for kind in trial.KINDS.values() for name in sorted(kind.registry)]
NUMBERS: dict[str, tuple[Any, ...]] = {
    "algorithm.gamma": (0.5,),
    "algorithm.lam": (0.5,),
    "algorithm.norm_adv_by_std_in_grpo": (False,),
    f"{A}.clip_ratio": (0.05,),
    f"{A}.clip_ratio_low": (0.05,),
    f"{A}.clip_ratio_high": (0.05,),
    f"{A}.clip_ratio_c": (1.1,),
    f"{A}.policy_loss.tau_pos": (3.0,),
    f"{A}.policy_loss.tau_neg": (3.0,),
    f"{A}.policy_loss.clip_cov_ratio": (0.02,),
    f"{A}.policy_loss.clip_cov_lb": (0.1,),
    f"{A}.policy_loss.clip_cov_ub": (1.5,),
    f"{A}.policy_loss.kl_cov_ratio": (0.5,),
    f"{A}.policy_loss.ppo_kl_coef": (2.0,),
    f"{A}.policy_loss.dro_beta": (2.0,),
    f"{A}.policy_loss.max_ratio": (1.5,),
    f"{A}.loss_scale_factor": (7.0,),
    f"{A}.kl_loss_coef": (0.0, 0.5),
    f"{A}.kl_loss_type": ("k1",),
    f"{A}.use_kl_loss": (False,),
    f"{A}.entropy_coeff": (0.1,),
}
"""Every key that sets a number of the objective, with other values than the default."""
MAPPINGS = {
    "algorithm.adv_options": ({"epsilon": 0.5}, {"std": "batch"}, {"std": "none"}, {"whiten": False}, {"nonsense": 1}),
    f"{A}.policy_loss.options": ({"nonsense": 1.0}, {"clip_low": 0.1}),
    f"{A}.loss_agg_options": ({"nonsense": 1.0},),
    f"{A}.kl_loss_options": ({"nonsense": 1.0},),
}


def with_value(root: Any, key: str, value: Any) -> Any:
    """A copy of a configuration with another value of one key."""
    head, _, rest = key.partition(".")
    return dataclasses.replace(root, **{head: with_value(getattr(root, head), rest, value) if rest else value})


def config_of(changes: dict[str, Any]) -> Config:
    config = with_value(Config(), "reward.functions", ["arithmetic_process"])
    for key, value in changes.items():
        config = with_value(config, key, value)
    if config.actor_rollout_ref.actor.policy_loss.loss_mode == "clip_cov" and f"{A}.policy_loss.clip_cov_ratio" not in changes:
        # Of a few tokens by default, which a small change of its bounds need not move.
        config = with_value(config, f"{A}.policy_loss.clip_cov_ratio", 0.9)
    return config


def refused(config: Config) -> bool:
    """Return whether a key has no effect as the rules say, or the plan's trial of the functions refuses the configuration."""
    machine = Machine(num_gpus=0, num_cpus=2, device="cpu")
    told = [*effects.problems(config, machine), *effects.notes(config, machine, reference="its own ranks", old_logprobs=True)]
    if [line for line in told if line.startswith(("algorithm.", A))]:
        return True
    try:
        for choice in CHOICES:
            if algorithm._is_used(config, choice):
                algorithm._bind(config, choice)
    except ConfigError:
        return True
    return False


DATA = dataclasses.replace(reference.ragged(1, num_rollouts=240), group=[n // 6 for n in range(240)])
"""Forty groups, so that every bound is passed by some token."""


GROUP_N = torch.tensor(DATA.group)
LENGTHS_N = torch.tensor(DATA.lengths)


def inputs_of(objective: Objective, advantages_T: Tensor) -> LossInput:
    """All that a loss can read of the batch."""
    policy_T = torch.tensor(DATA.policy, dtype=torch.float64, requires_grad=True)
    old_T = torch.tensor(DATA.old, dtype=torch.float64)
    selected_T = None
    if objective.needs_selection:
        selected_T = objective.select(advantages_T, old_T, torch.Generator().manual_seed(1))
    return LossInput(
        policy_T,
        advantages_T,
        Segments(LENGTHS_N),
        old_logprobs_T=old_T,
        ref_logprobs_T=torch.tensor(DATA.ref, dtype=torch.float64),
        full_kl_T=policy_T.exp(),
        entropy_T=policy_T.square(),
        selected_T=selected_T,
        group_tokens_N=group_tokens(LENGTHS_N, GROUP_N),
    )


def result(config: Config) -> tuple[float, list[float]]:
    """Loss and gradient of the objective that a configuration describes, on a batch of many groups."""
    objective = Objective.from_config(config.actor_rollout_ref.actor, 16)
    options = estimator_options(config.algorithm, PARTS)
    inputs = inputs_of(
        objective, 3.0 * ADVANTAGES.get(config.algorithm.adv_estimator)(complete(DATA), **options).advantages_T.double()
    )
    loss, _ = objective(inputs, count(LENGTHS_N, GROUP_N))
    (gradient_T,) = torch.autograd.grad(loss, inputs.policy_logprobs_T)
    return loss.item(), gradient_T.tolist()


BASES = [
    *({"algorithm.adv_estimator": name} for name in sorted(ADVANTAGES)),
    *({f"{A}.policy_loss.loss_mode": name} for name in SINGLE),
    *({f"{A}.loss_agg_mode": name} for name in sorted(AGGREGATIONS)),
    *({f"{A}.kl_loss_type": name} for name in [*sorted(KL_ESTIMATORS), "full"]),
]
"""Every function of the algorithm, with the default ones beside it. `sft` and the losses over pairs have no estimator."""


@pytest.mark.parametrize("base", BASES, ids=lambda base: next(iter(base.values())))
def test_every_key_changes_the_objective_or_is_refused(base: dict[str, Any]) -> None:
    config = config_of(base)
    assert not refused(config)
    before, silent = result(config), []
    estimator = ADVANTAGES.get(config.algorithm.adv_estimator)
    for key, values in {**NUMBERS, **MAPPINGS}.items():
        for value in values:
            if value_of(config, key) == value or (isinstance(value, dict) and value.items() <= options_of(estimator).items()):
                continue  # as it was, or the estimator's own default, given by name
            same_kl = {"kl": "k1", "full": "k3"}.get(
                config.actor_rollout_ref.actor.kl_loss_type, config.actor_rollout_ref.actor.kl_loss_type
            )
            if key.endswith("kl_loss_type") and KL_ESTIMATORS.get(value) is KL_ESTIMATORS.get(same_kl):
                continue
            changed = config_of(base | {key: value})
            if base.get("algorithm.adv_estimator") in ("grpo_passk", "rft") and key.endswith(("low", "_c", "tau_neg")):
                continue  # bounds for negative advantages, of which these have none
            if not refused(changed) and result(changed) == before:
                silent.append((key, value))
    assert silent == []


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
        key = keys.get(option, f"{A}.policy_loss.{option}")
        config = with_value(config, key, NUMBERS[key][0])
        before, after = (trial.run_loss(loss, base | changed, inputs)[-1] for changed in ({}, {option: NUMBERS[key][0]}))
        idle |= {key} if torch.allclose(before, after, rtol=1e-12, atol=1e-15) else set()
    assert set(algorithm.without_effect_on_policy(config)) == idle


def loss_options(name: str) -> list[str]:
    return list(options_of(POLICY_LOSSES.get(name)))
