"""No key of the algorithm is without effect: changed, it gives another objective, or it is refused, or the plan says so."""

from __future__ import annotations

import ast
import dataclasses
import functools
import itertools
from collections.abc import Iterator
from random import Random
from typing import Any

import algos_reference as reference
import pytest
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
from grpo_rl.config.checks import algorithm_rules, switch_rules
from grpo_rl.config.checks.switch_rules import value_of
from grpo_rl.config.function_options import AVERAGE, CHOICES, ESTIMATOR, KL_IN_LOSS, LOSS
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


@functools.cache
def config_of(estimator: str, loss: str, average: str, kl: str) -> Config:
    config = with_value(with_value(Config(), "algorithm.adv_estimator", estimator), f"{A}.policy_loss.loss_mode", loss)
    config = with_value(with_value(config, f"{A}.loss_agg_mode", average), f"{A}.kl_loss_type", kl)
    if loss == "clip_cov":  # of a few tokens by default, which a small change of its bounds need not move
        config = with_value(config, f"{A}.policy_loss.clip_cov_ratio", 0.9)
    return with_value(config, "reward.functions", ["arithmetic_process"])


def refused(config: Config, key: str) -> bool:
    """Return whether a rule between the keys, or the plan's trial of the function that the key belongs to, refuses the configuration."""
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
    inputs = inputs_of(objective, advantages_of(config.algorithm.adv_estimator, repr(options)))
    loss, _ = objective(inputs, count(LENGTHS_N, GROUP_N))
    (gradient_T,) = torch.autograd.grad(loss, inputs.policy_logprobs_T)
    return loss.item(), gradient_T.tolist()


# ---- the whole product, from factors that are computed once -----------------------------------------------

# The loss factorises: an average gives every token its weight whatever stands on it, and what stands on a token, its policy
# loss, its KL and its entropy, depends on no average. A sample of the product is compared with the objective itself below.


@functools.cache
def advantages_of(estimator: str, options: str) -> Tensor:
    """The advantages of the batch; `options` is the text of a dict, for the cache needs a key."""
    return 3.0 * ADVANTAGES.get(estimator)(complete(DATA), **ast.literal_eval(options)).advantages_T.double()


@functools.cache
def policy_loss_of(estimator: str, options: str, objective: Objective) -> Tensor:
    """The policy loss of each token; of the objective, loss and options count."""
    return objective._policy_loss(inputs_of(objective, advantages_of(estimator, options))).loss_T.detach()


@functools.cache
def regularizers_of(objective: Objective) -> Tensor:
    """The KL term and the entropy bonus of each token, with their coefficients; no loss and no average counts."""
    inputs = inputs_of(objective, torch.zeros(len(DATA.policy), dtype=torch.float64))
    value_T = -objective.entropy_coeff * inputs.column("entropy_T")
    if objective.kl_loss_type is not None:
        value_T = value_T + objective.kl_loss_coef * objective._kl(inputs)
    return value_T.detach()


@functools.cache
def weights_of(objective: Objective) -> Tensor:
    """The weight that the average gives to each token."""
    x_T = torch.ones(len(DATA.policy), dtype=torch.float64, requires_grad=True)
    inputs = inputs_of(objective, x_T.detach())
    return torch.autograd.grad(objective._average(x_T, inputs, count(LENGTHS_N, GROUP_N)), x_T)[0]


@functools.cache
def factors_of(objective: Objective) -> tuple[Objective, Objective, Objective]:
    """The objective's loss, its average, and its other terms, each in an objective that has nothing else."""
    loss = Objective(loss_mode=objective.loss_mode, loss_options=objective.loss_options)
    average = Objective(loss_agg_mode=objective.loss_agg_mode, agg_options=objective.agg_options)
    rest = dataclasses.replace(objective, loss_mode="vanilla", loss_options=(), loss_agg_mode="token-mean", agg_options=())
    return loss, average, rest


def factorised(estimator: str, options: str, objective: Objective) -> float:
    """The loss, as a sum over tokens of weight times terms."""
    loss, average, rest = factors_of(objective)
    return float(weights_of(average) @ (policy_loss_of(estimator, options, loss) + regularizers_of(rest)))


def changes() -> Iterator[tuple[str, Any]]:
    for key, values in {**NUMBERS, **MAPPINGS}.items():
        yield from ((key, value) for value in values)


KL_NAMES = [*sorted(KL_ESTIMATORS), "full"]
# `sft` and the losses over pairs have no estimator: tests/unit/config/test_schedule_rules.py tests their keys.
PAIRS = list(itertools.product(sorted(ADVANTAGES), SINGLE))


def kl_of(loss: str, average: str) -> str:
    """The KL estimator that is tried with a loss and an average: over all of them, each one with every average."""
    place = sorted(POLICY_LOSSES).index(loss) + sorted(AGGREGATIONS).index(average)
    return KL_NAMES[place % len(KL_NAMES)]


@functools.cache
def objective_of(loss: str, average: str, change: str) -> Objective | None:
    """The objective after a change of one key, of which `change` is the text; None where it cannot be made."""
    key, value = ast.literal_eval(change)
    try:
        config = with_value(config_of("grpo", loss, average, kl_of(loss, average)), key, value)
        return Objective.from_config(config.actor_rollout_ref.actor, 16)
    except ConfigError:
        return None


@functools.cache
def options_after(estimator: str, change: str) -> str | None:
    """The estimator's options after a change of one key; None where it does not take them."""
    key, value = ast.literal_eval(change)
    config = with_value(config_of(estimator, "vanilla", "token-mean", "k3"), key, value)
    options = repr(estimator_options(config.algorithm, PARTS))
    try:
        advantages_of(estimator, options)
    except (TypeError, ValueError):
        return None
    return options


@functools.cache
def refused_alone(kind: str, name: str, change: str) -> bool:
    """Return whether a function refuses a change of its own keys, whatever the other functions are."""
    key, value = ast.literal_eval(change)
    others = {ESTIMATOR.kind: "grpo", LOSS.kind: "vanilla", AVERAGE.kind: "token-mean", KL_IN_LOSS.kind: "k3"}
    return refused(with_value(config_of(*(others | {kind: name}).values()), key, value), key)


@functools.cache
def refused_together(estimator: str, loss: str, change: str) -> bool:
    """Return whether an estimator and a loss refuse a change, whatever average and KL are; asked only where neither does alone."""
    key, value = ast.literal_eval(change)
    return refused(with_value(config_of(estimator, loss, "token-mean", "k3"), key, value), key)


def silent_changes(estimator: str, loss: str, average: str) -> list[tuple[str, Any]]:
    """The changes of one key that are not refused and leave loss and gradient as they are."""
    kl, silent = kl_of(loss, average), []
    config = config_of(estimator, loss, average, kl)
    nothing = repr((f"{A}.loss_agg_mode", average))
    options, objective = options_after(estimator, nothing), objective_of(loss, average, nothing)
    assert options is not None and objective is not None
    before = factorised(estimator, options, objective)
    owner = {
        f"{choice.section}.{key}": (choice.kind, choice.name(config))
        for choice in (ESTIMATOR, LOSS, AVERAGE)
        for key in (choice.options_key, *choice.fixed)
    }
    for key, value in changes():
        if value_of(config, key) == value:
            continue
        if isinstance(value, dict) and value.items() <= options_of(ADVANTAGES.get(estimator)).items():
            continue  # the estimator's own default, given by name
        if key.endswith("kl_loss_type") and KL_ESTIMATORS.get(value) is KL_ESTIMATORS.get(
            {"kl": "k1", "full": "k3"}.get(kl, kl)
        ):
            continue
        change = repr((key, value))
        other_options, other = options_after(estimator, change), objective_of(loss, average, change)
        if other_options is not None and other is not None:
            after = factorised(estimator, other_options, other)
            if abs(after - before) > 1e-9 * max(1.0, abs(before)):
                continue
        changed = with_value(config, key, value)
        if (key in owner and refused_alone(*owner[key], change)) or refused_together(estimator, loss, change):
            continue
        if refused(changed, key) or (key.endswith("clip_ratio_c") and loss.startswith("gspo")):  # the plan has a note
            continue
        if result(changed) == result(config):
            silent.append((key, value))
    return silent


@pytest.mark.parametrize(("estimator", "loss"), PAIRS)
def test_every_key_changes_the_objective_or_is_refused(estimator: str, loss: str) -> None:
    """Over every estimator x loss x average x key: the loss after a change is another one, or the gradient, or it is refused."""
    config = config_of(estimator, loss, "token-mean", "k3")
    assert not refused(config, "")
    assert {average: silent for average in sorted(AGGREGATIONS) if (silent := silent_changes(estimator, loss, average))} == {}


def test_the_factors_make_the_objective() -> None:
    random = Random(0)
    for _ in range(120):
        (estimator, loss), average = random.choice(PAIRS), random.choice(sorted(AGGREGATIONS))
        change = repr(random.choice(list(changes())))
        options, objective = options_after(estimator, change), objective_of(loss, average, change)
        if options is None or objective is None:
            continue
        key, value = ast.literal_eval(change)
        config = with_value(config_of(estimator, loss, average, kl_of(loss, average)), key, value)
        assert result(config)[0] == pytest.approx(factorised(estimator, options, objective), rel=1e-12, abs=1e-15)


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
    # Only the best response of a group has an advantage in pass@k training, and in RFT right ones have: it is positive.
    positive = estimator in ("grpo_passk", "rft")
    assert idle <= ({"clip_low", "clip_c", "tau_neg"} if positive else set())
    assert not positive or "tau_neg" in idle or loss != "sapo"


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
"""Options that act at a ratio of 1 too, where it matters which tokens are left out. kl_cov's penalty has no gradient there, whichever tokens it is on."""


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
