"""No key of the algorithm is without effect: changed, it gives another objective, or it is refused, or the plan says so."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import algos_reference as reference
import pytest
import torch
from advantage_cases import complete
from objective_cases import SINGLE

from grpo_rl.algos import trial
from grpo_rl.algos.advantages.registered import ADVANTAGES
from grpo_rl.algos.aggregate import AGGREGATIONS, count, group_tokens
from grpo_rl.algos.kl import KL_ESTIMATORS
from grpo_rl.algos.losses.registered import POLICY_LOSSES, LossInput
from grpo_rl.algos.objective import Objective
from grpo_rl.algos.segments import Segments
from grpo_rl.config.checks import algorithm_rules, switch_rules
from grpo_rl.config.function_options import CHOICES
from grpo_rl.config.schema.tree import Config
from grpo_rl.errors import ConfigError
from grpo_rl.plan import algorithm
from grpo_rl.registry import needs_of, options_of
from grpo_rl.trainer.advantage import estimator_options

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


def config_of(estimator: str, loss: str, average: str, kl: str) -> Config:
    config = with_value(with_value(Config(), "algorithm.adv_estimator", estimator), f"{A}.policy_loss.loss_mode", loss)
    config = with_value(with_value(config, f"{A}.loss_agg_mode", average), f"{A}.kl_loss_type", kl)
    if loss == "clip_cov":  # of a few tokens by default, which a small change of its bounds need not move
        config = with_value(config, f"{A}.policy_loss.clip_cov_ratio", 0.9)
    return with_value(config, "reward.functions", ["arithmetic_process"])


def refused(config: Config, key: str) -> bool:
    """Whether a rule between the keys, or the plan's trial of the function that the key belongs to, refuses the configuration."""
    if [
        line
        for line in (*algorithm_rules.problems(config), *switch_rules.problems(config))
        if "algorithm." in line or A in line
    ]:
        return True
    try:
        for choice in CHOICES:
            own = [f"{choice.section}.{name}" for name in (choice.key, choice.options_key, *choice.fixed)]
            if key in own and algorithm._is_used(config, choice):
                algorithm._bind(config, choice)
        algorithm._check_pair(config)
    except ConfigError:
        return True
    return False


DATA = dataclasses.replace(reference.ragged(1, num_rollouts=240), group=[n // 6 for n in range(240)])
"""Forty groups, so that every bound is passed by some token."""


def result(config: Config) -> tuple[float, list[float]]:
    """Loss and gradient of the objective that a configuration describes, on a batch of many groups."""
    estimate = ADVANTAGES.get(config.algorithm.adv_estimator)
    advantages_T = 3.0 * estimate(complete(DATA), **estimator_options(config.algorithm, PARTS)).advantages_T.double()
    objective = Objective.from_config(config.actor_rollout_ref.actor, 16)
    policy_T = torch.tensor(DATA.policy, dtype=torch.float64, requires_grad=True)
    old_T, lengths_N, group_N = (
        torch.tensor(DATA.old, dtype=torch.float64),
        torch.tensor(DATA.lengths),
        torch.tensor(DATA.group),
    )
    inputs = LossInput(
        policy_T,
        advantages_T,
        Segments(lengths_N),
        old_logprobs_T=old_T,
        ref_logprobs_T=torch.tensor(DATA.ref, dtype=torch.float64),
        full_kl_T=policy_T.exp(),
        entropy_T=policy_T.square(),
        selected_T=objective.select(advantages_T, old_T, torch.Generator().manual_seed(1))
        if objective.needs_selection
        else None,
        group_tokens_N=group_tokens(lengths_N, group_N),
    )
    loss, _ = objective(inputs, count(lengths_N, group_N))
    (gradient_T,) = torch.autograd.grad(loss, policy_T)
    return loss.item(), gradient_T.tolist()


def changes() -> Iterator[tuple[str, Any]]:
    for key, values in {**NUMBERS, **MAPPINGS}.items():
        yield from ((key, value) for value in values)


def combinations() -> list[tuple[str, str, str, str]]:
    """Every estimator with every loss, and every average with every KL estimator, as few times as cover all of these pairs."""
    first = list(itertools.product(sorted(ADVANTAGES), SINGLE))
    second = list(itertools.product(sorted(AGGREGATIONS), [*sorted(KL_ESTIMATORS), "full"]))
    return [(*pair, *second[i % len(second)]) for i, pair in enumerate(first)]


@pytest.mark.parametrize(("estimator", "loss", "average", "kl"), combinations())
def test_every_key_changes_the_objective_or_is_refused(estimator: str, loss: str, average: str, kl: str) -> None:
    config = config_of(estimator, loss, average, kl)
    assert not any(refused(config, f"{choice.section}.{choice.key}") for choice in CHOICES)
    before = result(config)
    silent = []
    for key, value in changes():
        if isinstance(value, dict) and value.items() <= options_of(ADVANTAGES.get(estimator)).items():
            continue  # the estimator's own default, given by name
        changed = with_value(config, key, value)
        if key.endswith("kl_loss_type") and KL_ESTIMATORS.get(value) is KL_ESTIMATORS.get(
            "k1" if kl == "kl" else "k3" if kl == "full" else kl
        ):
            continue
        if changed != config and not refused(changed, key) and result(changed) == before:
            silent.append((key, value))
    assert not silent


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ({f"{A}.policy_loss.loss_mode": "clip_cov", f"{A}.clip_ratio_c": 5.0}, f"{A}.clip_ratio_c=5: has no effect"),
        ({f"{A}.kl_loss_type": "k1", f"{A}.kl_loss_coef": 0.0}, f"{A}.kl_loss_type=k1: needs {A}.use_kl_loss=true, with"),
    ],
)
def test_settings_that_another_one_switches_off_are_refused_by_name(words: dict[str, Any], key: str) -> None:
    config = Config()
    for name, value in words.items():
        config = with_value(config, name, value)
    assert any(key in line for line in (*algorithm_rules.problems(config), *switch_rules.problems(config)))


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


@pytest.mark.parametrize("estimator", sorted(ADVANTAGES))
@pytest.mark.parametrize("loss", SINGLE)
def test_only_bounds_for_negative_advantages_are_idle_with_some_estimator(estimator: str, loss: str) -> None:
    idle = set()
    for key, (value, *_) in NUMBERS.items():
        option = {"clip_ratio_low": "clip_low", "clip_ratio_high": "clip_high", "clip_ratio_c": "clip_c"}
        name = option.get(key.rpartition(".")[2], key.rpartition(".")[2])
        if key.startswith(A) and name in options_of(POLICY_LOSSES.get(loss)):
            try:
                algorithm._check_pair(with_value(config_of(estimator, loss, "token-mean", "k3"), key, value))
            except ConfigError:
                idle.add(name)
    # Only the best response of a group has an advantage in pass@k training, and it is positive.
    assert idle <= ({"clip_low", "clip_c", "tau_neg"} if estimator == "grpo_passk" else set())
    assert estimator != "grpo_passk" or "tau_neg" in idle or loss != "sapo"


# ---- what is known of every function of this package ----------------------------------------------------


@pytest.mark.parametrize(("kind", "name"), FUNCTIONS, ids=lambda value: value if isinstance(value, str) else "")
def test_every_function_keeps_to_its_interface_and_needs_all_that_it_says(kind: trial.Kind, name: str) -> None:
    function = kind.registry.get(name)
    options = {"loss_scale_factor": 7.0} if "loss_scale_factor" in options_of(function) else {}
    trial.check(kind, name, options, kind.run)
    read = kind.run(function, options).read
    for need in needs_of(function):
        assert set(kind.needs[need]) <= read or need in kind.supplied, f"{name} needs {need} and does not read it"
    assert bool({"group", "pairs"} & needs_of(function)) == ("group_N" in read)


@pytest.mark.parametrize(("kind", "name"), FUNCTIONS, ids=lambda value: value if isinstance(value, str) else "")
def test_every_option_of_every_function_can_change_its_result(kind: trial.Kind, name: str) -> None:
    function = kind.registry.get(name)
    fixed: dict[str, Any] = {"loss_scale_factor": 7.0, "weights": [1.0, 0.5]}
    # gpg divides by nothing unless it is asked to.
    fixed |= {"std": "group"} if name == "gpg" else {}
    options = {option: value for option, value in fixed.items() if option in options_of(function)}
    for option in options_of(function):
        assert not trial.without_effect(function, options, option, kind.run), option


LOSSES_WITH_OPTIONS = sorted(name for name in SINGLE if options_of(POLICY_LOSSES.get(name)))
STILL_ACT = {"clip_cov_ratio", "clip_cov_lb", "clip_cov_ub"}
"""Which tokens are left out matters at a ratio of 1 too. kl_cov's penalty has no gradient there, whichever tokens it is on."""


@pytest.mark.parametrize("name", LOSSES_WITH_OPTIONS)
def test_with_one_update_the_plan_lists_exactly_the_options_whose_change_leaves_the_gradient(name: str) -> None:
    config = with_value(Config(), f"{A}.policy_loss.loss_mode", name)
    for key, values in NUMBERS.items():
        config = with_value(config, key, values[0]) if ".policy_loss." in key or ".clip_ratio_" in key else config
    listed = set(algorithm.without_effect_on_policy(config))
    loss = POLICY_LOSSES.get(name)
    keys = {"clip_low": f"{A}.clip_ratio_low", "clip_high": f"{A}.clip_ratio_high", "clip_c": f"{A}.clip_ratio_c"}
    expected = {keys.get(option, f"{A}.policy_loss.{option}") for option in options_of(loss) if option not in STILL_ACT}
    assert listed == expected
