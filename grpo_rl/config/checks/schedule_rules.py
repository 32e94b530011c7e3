"""Settings that the schedule cannot do: with fixed responses, in iterations, or while responses are sampled."""

from __future__ import annotations

from collections.abc import Iterator

from grpo_rl.config.convert import show
from grpo_rl.config.derived import (
    ASYNC,
    ITERATE,
    OFFLINE,
    REWARD_MODEL,
    collects,
    is_colocated,
    is_iterated,
    is_offline,
    max_staleness,
    overlaps,
    trains_only_reward_model,
    trains_pairs,
)
from grpo_rl.config.effects import SAMPLING
from grpo_rl.config.schema.fields import leaves
from grpo_rl.config.schema.tree import Config

_A, _R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
SUPERVISED_LOSS = "sft"


def problems(config: Config) -> Iterator[str]:
    """Yield what does not go with the schedule."""
    loss, trainer = config.actor_rollout_ref.actor.policy_loss.loss_mode, config.trainer
    key = f"{_A}.policy_loss.loss_mode"
    if trains_only_reward_model(config):
        yield from _reward_model(config)
        return
    if not is_offline(config):
        if trainer.schedule == OFFLINE:
            yield f"trainer.schedule={OFFLINE}: is chosen by data.responses=rows, which trains on the answers in data.train_files"
        if loss == SUPERVISED_LOSS and trainer.schedule in SAMPLING:
            yield (
                f"{key}={loss}: reads no advantages, so the reward would have no effect with trainer.schedule={trainer.schedule}; "
                f"data.responses=rows learns the answers in the data, {key}=reinforce weighs sampled ones"
            )
        if is_iterated(config):
            yield from _iterated(config)
        if overlaps(config):
            yield from _overlapping(config)
        return
    chosen = f"data.responses={config.data.responses}"
    if trainer.schedule != leaves()["trainer.schedule"].default:
        yield (
            f"trainer.schedule={show(trainer.schedule)}: says when responses are sampled, and with {chosen} they are fixed before "
            "training; leave it out"
        )
    if trains_pairs(config) and config.data.truncation != "error":
        yield (
            f"data.truncation={config.data.truncation}: {key}={loss} compares whole answers, and a cut one would be another; drop "
            "long rows with data.filter_overlong_prompts=true"
        )
    if collects(config) and trains_pairs(config) and config.actor_rollout_ref.rollout.n < 2:
        yield f"{_R}.n={config.actor_rollout_ref.rollout.n}: {chosen} compares the best and the worst of a group; 2 or more"
    mini, batch = config.actor_rollout_ref.actor.ppo_mini_batch_size, config.data.train_batch_size
    if mini not in (batch, leaves()[f"{_A}.ppo_mini_batch_size"].default):
        yield (
            f"{_A}.ppo_mini_batch_size={mini}: {chosen} takes one optimizer step on each batch, "
            f"data.train_batch_size={batch}; leave it out"
        )
    if trainer.val_only:
        yield (
            f"trainer.val_only=true: {chosen} only trains; with data.responses=policy the answers to data.val_files are sampled "
            "and scored"
        )
    if collects(config) and config.data.train_weights:
        yield f"data.train_weights={show(config.data.train_weights)}: {chosen} answers every prompt alike; leave it out"
    yield from _early_stop(config)


def _overlapping(config: Config) -> Iterator[str]:
    """Yield what a schedule cannot do that samples while it trains."""
    key, own, correction = f"trainer.schedule={config.trainer.schedule}", config.trainer.asynchronous, config.algorithm
    if is_colocated(config) and not config.trainer.val_only:
        yield (
            f"{key}: samples while it trains, and with {_R}.nnodes=0 the engines share the actor's devices; give them their own: "
            f"{_R}.nnodes=1 {_R}.n_gpus_per_node=..., beside trainer.n_gpus_per_node"
        )
    groups = correction.filter_groups
    if groups.enable and groups.refill:
        yield (
            "algorithm.filter_groups.refill=true: samples further prompts until enough groups have a signal, and "
            f"{key} has sampled the next ones already; refill=false trains those of a batch that have one"
        )
    is_corrected = correction.rollout_correction.rollout_is or correction.rollout_correction.rollout_rs
    if max_staleness(config) and correction.rollout_correction.bypass_mode is False and not is_corrected:
        yield (
            f"algorithm.rollout_correction.bypass_mode=false: with {key} the weights that sampled a token may be older than "
            "those that it trains, and nothing would correct for that; leave it out, or set rollout_is=token beside it"
        )
    if config.trainer.schedule == ASYNC and own.sync_every > own.max_staleness + 1:
        yield (
            f"trainer.asynchronous.sync_every={own.sync_every}: the weights would be older than max_staleness={own.max_staleness} before they "
            "are sent; at most max_staleness + 1"
        )


def _reward_model(config: Config) -> Iterator[str]:
    """Yield what contradicts the schedule that trains a reward model alone."""
    if config.data.responses != "policy":
        yield (
            f"data.responses={config.data.responses}: says what a policy learns from, and trainer.schedule={REWARD_MODEL} trains none; "
            "leave it out"
        )
    if config.trainer.val_only:
        yield f"trainer.val_only=true: trainer.schedule={REWARD_MODEL} validates while it trains; leave it out"
    yield from _early_stop(config)


def _early_stop(config: Config) -> Iterator[str]:
    trainer = config.trainer
    if trainer.early_stop_patience is not None and not (config.data.val_files and trainer.test_freq > 0):
        yield (
            f"trainer.early_stop_patience={trainer.early_stop_patience}: needs the loss on data.val_files every trainer.test_freq "
            "steps; give both"
        )


def _iterated(config: Config) -> Iterator[str]:
    """Yield what iterated training cannot do: its reward is the model's score, and the labels are those of the rules."""
    key, iterate, reward = f"trainer.schedule={ITERATE}", config.trainer.iterate, config.reward
    trains_model = iterate.reward_model_steps > 0
    if not reward.reward_model.enable:
        yield f"{key}: trains on the score of a reward model; give reward.reward_model.enable=true and its model_path"
    if not reward.functions:
        yield f"{key}: needs reward.functions, whose reward labels the reward model's pairs and shows the true accuracy"
    if reward.judge.base_url is not None:
        yield f"reward.judge.base_url: with {key} the reward is the reward model's score alone; leave the judge out"
    if config.trainer.critic_warmup:
        yield f"trainer.critic_warmup={config.trainer.critic_warmup}: counts first steps, which with {key} may be the reward model's"
    if trains_model and config.actor_rollout_ref.rollout.n < 2:
        yield f"{_R}.n={config.actor_rollout_ref.rollout.n}: {key} compares the best and the worst of a group; 2 or more"
    if trains_model and reward.reward_model.step_separator is not None:
        yield (
            f"reward.reward_model.step_separator={show(reward.reward_model.step_separator)}: {key} trains the reward model on pairs "
            "of whole responses; leave it out, or set trainer.iterate.reward_model_steps=0"
        )
    if trains_model and reward.reward_model.train.loss != "bradley_terry":
        yield (
            f"reward.reward_model.train.loss={reward.reward_model.train.loss}: {key} makes pairs of whole responses and no rated "
            "steps; bradley_terry"
        )
    if trains_model and config.trainer.val_only and (reward.reward_model.model_path or "").startswith("builtin:"):
        yield (
            f"trainer.val_only=true: reward.reward_model.model_path={reward.reward_model.model_path} has no head before {key} trains it; "
            "name a trained one, or validate by the rules alone, without this schedule and reward.reward_model"
        )
