"""The functions that the algorithm is made of, bound and tried out before anything starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from grpo_rl.algos import trial
from grpo_rl.algos.advantages.registered import ADVANTAGES, reads_token_rewards
from grpo_rl.algos.correction import RolloutCorrection
from grpo_rl.algos.losses.registered import POLICY_LOSSES
from grpo_rl.algos.objective import Objective
from grpo_rl.config import derived
from grpo_rl.config.checks import algorithm_rules
from grpo_rl.config.function_options import (
    ACTOR,
    AVERAGE,
    CHOICES,
    ESTIMATOR,
    KL_IN_LOSS,
    KL_IN_REWARD,
    LOSS,
    Choice,
    chosen_options,
)
from grpo_rl.config.schema.tree import Config
from grpo_rl.errors import ConfigError
from grpo_rl.registry import check_options, needs_of, options_of, own_options, shown
from grpo_rl.rewards.combined import factors_of, may_score_steps
from grpo_rl.trainer.sampled.advantage import estimator_options
from grpo_rl.trainer.sampled.selection import check_metric


def checks(config: Config) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield each rule: what its messages begin with, and the check that raises ConfigError."""
    for choice in CHOICES:
        if _is_used(config, choice):
            yield f"{choice.section}.{choice.key}: ", partial(_bind, config, choice)
    if derived.is_offline(config):
        return  # nothing is sampled that could be corrected or filtered
    if derived.estimates_advantages(config):
        yield "algorithm.adv_estimator: ", lambda: _check_estimator(config)
        yield "", lambda: _check_pair(config)
        yield "algorithm.rollout_correction.", lambda: _check_correction(config)
    groups, data = config.algorithm.filter_groups, config.data
    if groups.enable:
        yield "algorithm.filter_groups.metric", lambda: check_metric(groups.metric, config)
    if data.retire_above is not None:
        yield "data.retire_metric", lambda: check_metric(data.retire_metric, config)


def objective_of(config: Config) -> Objective:
    """Return the objective of the run."""
    try:
        correction = RolloutCorrection.from_config(config.algorithm.rollout_correction)
    except ConfigError:
        correction = None  # reported by itself
    return Objective.from_config(config.actor_rollout_ref.actor, config.data.max_response_length, correction)


def advantage_formula(config: Config) -> str:
    """Return the estimator's formula with its options as numbers."""
    return shown(ADVANTAGES.get(config.algorithm.adv_estimator), estimator_options(config.algorithm)).removeprefix("A = ")


def without_effect_on_policy(config: Config) -> list[str]:
    """Return the keys that were set and do nothing where one update per batch makes every ratio 1.

    They are not refused, for people set clip bounds by habit, and the number of updates is changed more often than they are.
    """
    loss = POLICY_LOSSES.get(LOSS.name(config))
    inputs = trial.loss_input(one_update=True)
    options = _options(config, LOSS)

    def run(function: Any, options: trial.Options) -> trial.Outcome:
        return trial.run_loss(function, options, inputs)

    # The value may change by a constant (sapo's 4/tau); what trains is the gradient.
    idle = []
    for option, (key, value) in LOSS.given(config).items():
        # What the setting changes is asked against the loss's own default; a much smaller bound could act at a ratio of 1.
        others = [options_of(loss).get(option)] if option in own_options(loss, options) else None
        if others == [value] and isinstance(value, (int, float)):
            others = [2 * value + 1]
        if option in options and trial.without_effect(loss, options, option, run, others, last=1):
            idle.append(key)
    return list(dict.fromkeys(idle))


def unread_needs(config: Config) -> Iterator[str]:
    """Yield a line for each of the user's own functions that says it needs what it does not read.

    No refusal: it may read the column on other data, or with other options. But what it needs is computed for it.
    """
    for choice in (ESTIMATOR, LOSS):
        kind, name = trial.KINDS[choice.kind], choice.name(config)
        if name in kind.registry:
            continue
        run = _run_estimator(config) if choice is ESTIMATOR else kind.run
        if unread := trial.unread_needs(dataclasses.replace(kind, run=run), kind.registry.get(name), _options(config, choice)):
            yield f"{choice.kind} {name} says that it needs {' and '.join(unread)}, and did not read it when it was tried"


def _is_used(config: Config, choice: Choice) -> bool:
    """Return whether a function is called at all; the full KL is none that is registered."""
    if choice is KL_IN_LOSS:
        return derived.has_kl_in_loss(config) and choice.name(config) != "full"
    if choice is ESTIMATOR:
        return derived.estimates_advantages(config)
    return choice is not KL_IN_REWARD or config.algorithm.use_kl_in_reward


def _bind(config: Config, choice: Choice) -> None:
    """Raise ConfigError for a function that is not there, whose options are refused or idle, or that fails when tried."""
    kind, name = trial.KINDS[choice.kind], choice.name(config)
    function = kind.registry.get(name)
    own = name not in kind.registry
    if own:  # for registered ones these rules were checked before torch was loaded
        facts = algorithm_rules.Function(name, tuple(sorted(needs_of(function))), tuple(options_of(function)))
        if problems := list(algorithm_rules.function_problems(config, choice, facts)):
            raise ConfigError(problems)
    options = _options(config, choice)
    check_options(f"{choice.kind} {name!r}", function, options)
    run = _run_estimator(config) if choice is ESTIMATOR else kind.run
    trial.check(kind, name, options, run)
    for option, (key, value) in choice.given(config).items():
        if key == "algorithm.norm_adv_by_std_in_grpo" and options_of(function)[option] == value:
            raise ConfigError(f"{key}=false: {name} has {option}={value} anyway; leave it out")
        if not own and option in options and trial.without_effect(function, options, option, run):
            others = ", ".join(f"{other}={given}" for other, given in options.items() if other != option)
            raise ConfigError(
                f"{key}: {option}={value} has no effect with {name}" + (f" and {others}" if others else "") + "; leave it out"
            )


def _check_pair(config: Config) -> None:
    """Raise ConfigError for bounds on negative advantages with an estimator that gives none (grpo_passk).

    Only for functions of this package, whose advantages on the small batch are known to be typical.
    """
    estimator, name = ESTIMATOR.name(config), LOSS.name(config)
    if estimator not in ADVANTAGES or name not in POLICY_LOSSES:
        return
    try:
        outcome = _run_estimator(config)(ADVANTAGES.get(estimator), _options(config, ESTIMATOR))
    except (ConfigError, TypeError, ValueError):
        return  # reported by itself
    if bool((outcome.values[0] < 0).any()):
        return
    inputs = trial.loss_input()
    inputs = dataclasses.replace(inputs, advantages_T=inputs.advantages_T.abs())
    loss, options = POLICY_LOSSES.get(name), _options(config, LOSS)

    def run(function: Any, options: trial.Options) -> trial.Outcome:
        return trial.run_loss(function, options, inputs)

    problems = [
        f"{key}={value:g}: has no effect with {ESTIMATOR.section}.{ESTIMATOR.key}={estimator} and {LOSS.key}={name}: no advantage "
        "of this estimator is negative; leave it out"
        for option, (key, value) in LOSS.given(config).items()
        if option in options and trial.without_effect(loss, options, option, run, last=1)
    ]
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))


def _options(config: Config, choice: Choice) -> dict[str, Any]:
    """Return the keywords that a chosen function will be called with, as far as they are known without the data."""
    if choice is ESTIMATOR:
        try:
            return estimator_options(config.algorithm, factors_of(config))
        except ConfigError:
            return estimator_options(config.algorithm, {"": 1.0})  # the reward's own problem is reported by itself
    if choice is AVERAGE:
        return dict(objective_of(config).agg_options)
    function = trial.KINDS[choice.kind].registry.get(choice.name(config))
    section = config.actor_rollout_ref.actor if choice.section == ACTOR else config.algorithm
    return chosen_options(choice, section, options_of(function))


def _run_estimator(config: Config) -> Callable[[Any, trial.Options], trial.Outcome]:
    """Return the trial of an estimator with as many parts of the reward as the run has."""
    try:
        num_parts = max(1, len(config.algorithm.reward_parts or factors_of(config)))
    except ConfigError:
        num_parts = 1
    return lambda function, options: trial.run_estimator(function, options, num_parts)


def _reads_old_logprobs(config: Config) -> bool:
    """Return whether loss or KL term depend on the policy that sampled: whether others make another gradient."""
    actor = config.actor_rollout_ref.actor
    if derived.has_kl_in_loss(config) and actor.kl_loss_type != "full":
        kl = trial.KINDS[KL_IN_LOSS.kind].registry.get(actor.kl_loss_type)
        if "old_logprobs" in needs_of(kl):
            return True
    return _has_ratio(config)


def _has_ratio(config: Config) -> bool:
    """Return whether the loss depends on the log-probs of the policy that sampled."""
    actor = config.actor_rollout_ref.actor
    return trial.has_ratio(POLICY_LOSSES.get(actor.policy_loss.loss_mode), _options(config, LOSS))


def _check_estimator(config: Config) -> None:
    """Raise ConfigError for an estimator that asks for what the run does not have."""
    algorithm = config.algorithm
    try:
        wanted = needs_of(ADVANTAGES.get(algorithm.adv_estimator))
    except ConfigError:
        return  # reported by itself
    read = "steps" if "steps" in wanted else "the parts"
    problems = []
    if "steps" in wanted and not _may_score_steps(config):
        problems.append(
            f"{algorithm.adv_estimator} reads the rewards of reasoning steps, and reward.functions={config.reward.functions} score "
            "whole responses; name arithmetic_process, or your own path.py:function that returns 'steps' beside 'score'; or take a reward model with "
            "reward.reward_model.step_separator"
        )
    if algorithm.use_kl_in_reward and not reads_token_rewards(wanted):
        problems.append(
            f"{algorithm.adv_estimator} does not read rewards of tokens, so algorithm.use_kl_in_reward=true would have no effect; "
            "put the KL into the loss: actor_rollout_ref.actor.use_kl_loss=true"
        )
    if config.reward.overlong_buffer.tokens is not None and not reads_token_rewards(wanted):
        problems.append(f"{algorithm.adv_estimator} reads {read} of the reward, so reward.overlong_buffer would have no effect")
    if config.reward.on_failure == "value" and not reads_token_rewards(wanted):
        problems.append(
            f"{algorithm.adv_estimator} reads {read} of the reward, which a failed one does not have; "
            "reward.on_failure=value cannot stand for them, use drop or stop"
        )
    if problems:
        raise ConfigError(problems)


def _check_correction(config: Config) -> None:
    """Raise ConfigError for settings that contradict each other, or a bypass that no ratio makes use of."""
    correction = RolloutCorrection.from_config(config.algorithm.rollout_correction)
    actor = config.actor_rollout_ref.actor
    is_stale = derived.max_staleness(config) > 0 and not derived.trains_pairs(config)
    if is_stale and not correction.rollout_is and not _has_ratio(config):
        raise ConfigError(
            f"rollout_is=null: trainer.schedule={config.trainer.schedule} trains tokens that older weights have sampled, and "
            f"{ACTOR}.policy_loss.loss_mode={actor.policy_loss.loss_mode} has no ratio that corrects for that; rollout_is=token"
        )
    if correction.bypass_mode and not _reads_old_logprobs(config) and not (correction.rollout_is or correction.rollout_rs):
        raise ConfigError(
            f"bypass_mode=true: has no effect with {ACTOR}.policy_loss.loss_mode={actor.policy_loss.loss_mode}, which has no ratio"
        )


def _may_score_steps(config: Config) -> bool:
    try:
        return may_score_steps(config)
    except ConfigError:
        return True  # reported by itself
