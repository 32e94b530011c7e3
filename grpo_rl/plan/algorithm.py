"""What of the algorithm does not fit together, found before anything starts: estimators and what they need."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from grpo_rl.algos.advantages.registered import ADVANTAGES, AdvantageInput, needs_of
from grpo_rl.algos.aggregate import AGGREGATIONS
from grpo_rl.algos.correction import RolloutCorrection
from grpo_rl.algos.losses.registered import POLICY_LOSSES, selection_of
from grpo_rl.algos.objective import Objective
from grpo_rl.algos.options import check_options, options_of
from grpo_rl.config.checks import algorithm_rules
from grpo_rl.config.schema.tree import Config
from grpo_rl.errors import ConfigError
from grpo_rl.rewards.combined import factors_of, may_score_steps
from grpo_rl.trainer.advantage import estimator_options
from grpo_rl.trainer.selection import check_metric

_A = "actor_rollout_ref.actor"
_WITHOUT_RATIO = ("reinforce", "gpg")


def checks(config: Config) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Each rule: what its messages begin with, and the check that raises ConfigError."""
    yield "algorithm.adv_estimator: ", lambda: _check_estimator(config)
    yield "", lambda: _check_options(config)
    actor = config.actor_rollout_ref.actor
    yield f"{_A}.policy_loss.loss_mode: ", lambda: POLICY_LOSSES.get(actor.policy_loss.loss_mode)
    yield f"{_A}.loss_agg_mode: ", lambda: AGGREGATIONS.get(actor.loss_agg_mode)
    yield f"{_A}: ", lambda: _check_objective(config)
    yield "algorithm.rollout_correction.", lambda: _check_correction(config)
    groups, data = config.algorithm.filter_groups, config.data
    if groups.enable:
        yield "algorithm.filter_groups.metric", lambda: check_metric(groups.metric, config)
    if data.retire_above is not None:
        yield "data.retire_metric", lambda: check_metric(data.retire_metric, config)


def objective_of(config: Config) -> Objective:
    """The objective of the run."""
    return Objective.from_config(config.actor_rollout_ref.actor, config.data.max_response_length)


def _check_objective(config: Config) -> None:
    """Raise ConfigError for options that the policy loss or the average does not take."""
    actor = config.actor_rollout_ref.actor
    try:
        loss = POLICY_LOSSES.get(actor.policy_loss.loss_mode)
        AGGREGATIONS.get(actor.loss_agg_mode)
    except ConfigError:
        return  # reported by itself
    if actor.policy_loss.loss_mode not in POLICY_LOSSES:
        POLICY_LOSSES.check_call(actor.policy_loss.loss_mode, "inputs")
    options = options_of(selection_of(loss) or loss) | dict(objective_of(config).loss_options)
    low, high = options.get("clip_cov_lb"), options.get("clip_cov_ub")
    if low is not None and high is not None and low >= high:
        raise ConfigError(f"policy_loss.clip_cov_lb={low:g} must be below policy_loss.clip_cov_ub={high:g}")


def _check_estimator(config: Config) -> None:
    """Raise ConfigError for an unknown estimator, and for one that asks for what the run does not have."""
    algorithm = config.algorithm
    wanted = needs_of(ADVANTAGES.get(algorithm.adv_estimator))
    problems = []
    if wanted.steps and not _may_score_steps(config):
        problems.append(
            f"{algorithm.adv_estimator} reads the rewards of reasoning steps, and reward.functions={config.reward.functions} score "
            "whole responses; name arithmetic_process, or your own path.py:function that returns 'steps' beside 'score'; or take a reward model with "
            "reward.reward_model.step_separator"
        )
    if algorithm.use_kl_in_reward and not wanted.reads_token_rewards:
        problems.append(
            f"{algorithm.adv_estimator} does not read rewards of tokens, so algorithm.use_kl_in_reward=true would have no effect; "
            "put the KL into the loss: actor_rollout_ref.actor.use_kl_loss=true"
        )
    if config.reward.overlong_buffer.len is not None and not wanted.reads_token_rewards:
        problems.append(
            f"{algorithm.adv_estimator} reads {'steps' if wanted.steps else 'the parts'} of the reward, "
            "so reward.overlong_buffer would have no effect"
        )
    if config.reward.on_failure == "value" and not wanted.reads_token_rewards:
        problems.append(
            f"{algorithm.adv_estimator} reads {'steps' if wanted.steps else 'the parts'} of the reward, which a failed one does not have; "
            "reward.on_failure=value cannot stand for them, use drop or stop"
        )
    if problems:
        raise ConfigError(problems)


def _check_correction(config: Config) -> None:
    """Raise ConfigError for settings that contradict each other, or a bypass that no ratio makes use of."""
    correction = RolloutCorrection.from_config(config.algorithm.rollout_correction)
    actor = config.actor_rollout_ref.actor
    corrected_kl = actor.use_kl_loss and actor.kl_loss_type == "k3_unbiased"
    if correction.bypass_mode and actor.policy_loss.loss_mode in _WITHOUT_RATIO and not corrected_kl:
        raise ConfigError(
            f"bypass_mode=true: has no effect with {_A}.policy_loss.loss_mode={actor.policy_loss.loss_mode}, which has no ratio"
        )


def _check_options(config: Config) -> None:
    """Raise ConfigError for options that the estimator does not take, or whose value it refuses."""
    algorithm = config.algorithm
    name = algorithm.adv_estimator
    try:
        estimate = ADVANTAGES.get(name)
    except ConfigError:
        return  # reported by itself
    if name not in ADVANTAGES:  # for registered ones these rules were checked before torch was loaded
        ADVANTAGES.check_call(name, "inputs")
        wanted = needs_of(estimate)
        needs = tuple(field.name for field in dataclasses.fields(wanted) if getattr(wanted, field.name))
        own = algorithm_rules.Estimator(name, needs, tuple(options_of(estimate)))
        if problems := list(algorithm_rules.estimator_problems(config, own)):
            raise ConfigError(problems)
    check_options(f"algorithm.adv_options: {name}", [estimate], algorithm.adv_options)
    if name in ADVANTAGES:
        _try_out(config)


def _may_score_steps(config: Config) -> bool:
    try:
        return may_score_steps(config)
    except ConfigError:
        return True  # reported by itself


def _try_out(config: Config) -> None:
    """Raise ConfigError when the estimator refuses its options on a batch of four one-token responses."""
    try:
        factors = factors_of(config)
    except ConfigError:
        return  # reported by itself
    rewards_N = torch.tensor([0.0, 1.0, 0.0, 1.0])
    inputs = AdvantageInput(
        token_rewards_T=rewards_N,
        lengths_N=torch.ones(4, dtype=torch.long),
        group_N=torch.tensor([0, 0, 1, 1]),
        rewards_N=rewards_N,
        baselines_N=rewards_N,
        step_ends_K=torch.arange(4),
        step_rewards_K=rewards_N,
        reward_parts_NP=rewards_N[:, None].expand(-1, len(factors)),
        values_T=torch.zeros(4),
    )
    try:
        ADVANTAGES.get(config.algorithm.adv_estimator)(inputs, **estimator_options(config.algorithm, factors))
    except ValueError as error:
        raise ConfigError(f"algorithm.adv_options: {config.algorithm.adv_estimator}: {error}") from error
