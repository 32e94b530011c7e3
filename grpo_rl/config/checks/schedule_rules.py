"""Keys that a run does not read: one on fixed responses samples nothing while it trains, one over pairs estimates no advantages."""

from __future__ import annotations

from collections.abc import Iterator

from grpo_rl.config.checks.algorithm_table import ESTIMATORS, LOSSES, NO_FACTS
from grpo_rl.config.convert import show
from grpo_rl.config.derived import (
    ASYNC,
    ITERATE,
    OFFLINE,
    ONE_STEP_OFF,
    REWARD_MODEL,
    collects,
    is_colocated,
    is_iterated,
    is_offline,
    max_staleness,
    overlaps,
    samples_answers,
    trains_only_reward_model,
    trains_pairs,
    trains_reward_model,
)
from grpo_rl.config.schema.fields import leaves
from grpo_rl.config.schema.tree import Config

_A, _R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
SUPERVISED_LOSS = "sft"
ANSWER_COLUMNS = ("data.response_key", "data.messages_key", "data.tools_key", "data.enable_thinking_key")
"""Columns of rows with an answer to learn."""
PAIR_COLUMNS = ("data.chosen_key", "data.rejected_key")
"""Columns of rows with two answers to compare."""
SAMPLING = ("sync", ONE_STEP_OFF, ASYNC, ITERATE)
"""The schedules of this program that train on sampled responses."""
ASYNCHRONOUS = "trainer.asynchronous."
ITERATED = "trainer.iterate."
REPLAY = ("trainer.iterate.replay_share", "trainer.iterate.replay_pairs")
TRAINED_MODEL = "reward.reward_model.train."
"""The section of a reward model that is trained."""
ROWS_ONLY = (
    "data.val_prompt_files",
    *ANSWER_COLUMNS,
    *PAIR_COLUMNS,
    "data.max_length",
    "trainer.early_stop_patience",
)
"""Keys of data.responses=rows, and of initial_policy."""
REJECTION = "algorithm.rejection."
COLLECTING = (
    REJECTION,
    *(f"{_R}.{name}" for name in ("n", "temperature", "top_p", "top_k", "min_p", "ignore_eos")),
    "data.gen_batch_size",
)
"""Keys of sampling that data.responses=initial_policy reads as well."""
SAMPLED_ONLY = (
    "algorithm.",
    "critic.",
    "actor_rollout_ref.ref.",
    f"{_A}.kl_loss_",
    f"{_A}.ppo_epochs",
    f"{_A}.shuffle",
    f"{_A}.data_loader_seed",
    *(f"{_R}.{name}" for name in ("n", "temperature", "top_p", "top_k", "min_p", "ignore_eos", "log_prob_")),
    "data.gen_batch_size",
    "data.retire_",
    "data.curriculum",
    "data.curriculum_floor",
    "data.difficulty_key",
    "data.dynamic_weights",
    "trainer.critic_warmup",
    "trainer.save_rollouts",
    "trainer.rollout_data_format",
    "trainer.log_token_groups",
)
"""Keys, and beginnings of keys that end in a dot or an underscore, that no supervised run reads."""
ESTIMATED_ONLY = (
    *("adv_estimator", "adv_options", "norm_adv_by_std_in_grpo", "gamma", "lam"),
    *("use_kl_in_reward", "kl_penalty", "kl_penalty_options", "kl_ctrl.", "mask_truncated", "rollout_correction."),
)
"""Keys of `algorithm` that shape, correct or leave out advantages of tokens, which pairs do not have."""
READ_BY_REWARD_MODEL = (
    TRAINED_MODEL,
    *(f"reward.reward_model.{name}" for name in ("model_path", "tokenizer_path", "trust_remote_code", "step_separator")),
    *(f"reward.reward_model.{name}" for name in ("max_token_len_per_gpu", "dtype", "param_offload")),
    f"{_A}.checkpoint.",
    *(f"data.{name}" for name in ("train_files", "train_weights", "val_files", "prompt_key", "chosen_key", "rejected_key")),
    *(f"data.{name}" for name in ("max_length", "max_prompt_length", "max_response_length", "filter_overlong_prompts")),
    *(
        f"data.{name}"
        for name in (
            "system_prompt",
            "chat_template",
            "apply_chat_template_kwargs",
            "control_tokens_in_text",
            "custom_cls.",
            "cache_dir",
        )
    ),
    *(f"data.{name}" for name in ("on_bad_row", "check_rows", "allow_change", "train_batch_size", "shuffle", "seed")),
    *(f"data.{name}" for name in ("train_max_samples", "val_max_samples", "responses")),
    *(
        key
        for key in leaves()
        if key.startswith("trainer.")
        and not key.startswith((ITERATED, ASYNCHRONOUS))
        and key
        not in (f"trainer.{name}" for name in ("critic_warmup", "save_rollouts", "rollout_data_format", "log_token_groups"))
    ),
    "ray_kwargs.",
)
"""All that trainer.schedule=reward_model reads, or has a rule of its own for."""
SCORED_ONLY = (
    f"{_R}.",
    "reward.",
    "data.reward_fn_key",
    "data.data_source",
    "data.ground_truth_key",
    "data.extra_info_key",
)
"""Those that one reads which validates by sampling."""


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
    if loss != SUPERVISED_LOSS and loss in LOSSES and not trains_pairs(config):
        yield (
            f"{key}={loss}: is made for responses of the policy as it is, and {chosen} trains on fixed ones; {key}={SUPERVISED_LOSS} "
            f"learns them, {key}=dpo compares two"
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
            f"{ASYNCHRONOUS}sync_every={own.sync_every}: the weights would be older than max_staleness={own.max_staleness} before they "
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
    trains_model, estimator = iterate.reward_model_steps > 0, config.algorithm.adv_estimator
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
    needs = ESTIMATORS.get(estimator, NO_FACTS)["needs"]
    if "parts" in needs:
        yield f"algorithm.adv_estimator={estimator}: reads the parts of the reward, and with {key} only the model's score counts"
    if "steps" in needs and reward.reward_model.step_separator is None:
        yield (
            f"algorithm.adv_estimator={estimator}: reads rewards of steps, which with {key} come from the reward model alone "
            "(reward.reward_model.step_separator); take an estimator of whole responses, such as grpo"
        )


def switches(config: Config) -> dict[str, tuple[bool, str]]:
    """Return the keys that the schedule does not read, as `switch_rules` has them: (False, the reason)."""
    if trains_only_reward_model(config):
        return _unread_by_reward_model(config)
    idle = {} if trains_reward_model(config) else _of(TRAINED_MODEL, f"is of trainer.schedule={REWARD_MODEL}, which trains it")
    if not is_offline(config):
        if config.trainer.schedule not in SAMPLING:
            return idle  # a schedule of the user's own may read whatever it likes
        idle |= {key: (False, "is of data.responses=rows and initial_policy") for key in ROWS_ONLY}
        idle |= _of(REJECTION, "is of data.responses=initial_policy")
        if trains_pairs(config):
            idle |= _without_advantages(config)
        return idle | _of_iterations(config) | _of_asynchronous(config)
    fixed = "samples its responses before training" if collects(config) else "trains on the answers in the data"
    read = COLLECTING if collects(config) else ()
    idle |= {
        key: (False, f"has no effect with data.responses={config.data.responses}, which {fixed}")
        for key in leaves()
        if _lies_in(key, SAMPLED_ONLY) and not _lies_in(key, read)
    }
    if ":" not in (loss := config.actor_rollout_ref.actor.policy_loss.loss_mode):
        unread, kind = (ANSWER_COLUMNS, "pairs") if trains_pairs(config) else (PAIR_COLUMNS, "answers to learn")
        idle |= {key: (False, f"policy_loss.loss_mode={loss} reads rows with {kind}") for key in unread}
    if collects(config) and trains_pairs(config):
        idle |= _of(
            REJECTION, f"keeps single responses, and loss_mode={loss} compares the best with the worst response, however good"
        )
    idle |= _of(
        (ITERATED, ASYNCHRONOUS), f"has no effect with data.responses={config.data.responses}, which trains on fixed responses"
    )
    if not samples_answers(config) and not collects(config):
        idle |= {
            key: (False, "needs data.val_prompt_files: data.responses=rows samples and scores nothing else")
            for key in leaves()
            if _lies_in(key, SCORED_ONLY) and key not in idle
        }
        if config.data.max_length is not None:
            why = "has no effect with data.max_length, the longest row"
            idle |= {f"data.{name}": (False, why) for name in ("max_prompt_length", "max_response_length")}
    return idle


def _unread_by_reward_model(config: Config) -> dict[str, tuple[bool, str]]:
    """Return the keys that the training of a reward model does not read: those of the policy, of sampling, of other rewards."""
    loss, why = (
        config.reward.reward_model.train.loss,
        f"has no effect with trainer.schedule={REWARD_MODEL}, which trains no policy",
    )
    idle = {key: (False, why) for key in leaves() if not _lies_in(key, READ_BY_REWARD_MODEL)}
    unread = ("reward.reward_model.step_separator",) if loss == "bradley_terry" else PAIR_COLUMNS
    idle |= {key: (False, f"has no effect with {TRAINED_MODEL}loss={loss}") for key in unread}
    if config.data.max_length is not None:
        longest = "has no effect with data.max_length, the longest sequence"
        idle |= {f"data.{name}": (False, longest) for name in ("max_prompt_length", "max_response_length")}
    return idle


def _without_advantages(config: Config) -> dict[str, tuple[bool, str]]:
    """Return the keys that sampled pairs do not read: the loss compares them by itself, and no advantage is estimated."""
    why = f"has no effect with policy_loss.loss_mode={config.actor_rollout_ref.actor.policy_loss.loss_mode}, which "
    estimated = (*(f"algorithm.{name}" for name in ESTIMATED_ONLY), "critic.", "trainer.critic_warmup")
    return {
        key: (False, why + ("compares pairs and reads no advantages" if reads else "has the reference in it and no KL term"))
        for key in leaves()
        for reads in (_lies_in(key, estimated),)
        if reads or key.startswith(f"{_A}.kl_loss_")
    }


def _of_iterations(config: Config) -> dict[str, tuple[bool, str]]:
    """Return the keys of iterated training that a run does not read whose responses the policy samples."""
    if not is_iterated(config):
        return _of(ITERATED, f"is of trainer.schedule={ITERATE}")
    if config.trainer.iterate.reward_model_steps == 0:
        return {key: (False, "has no effect with trainer.iterate.reward_model_steps=0") for key in REPLAY}
    if config.trainer.iterate.replay_share == 0:
        return {"trainer.iterate.replay_pairs": (False, "has no effect with trainer.iterate.replay_share=0")}
    return {}


def _of_asynchronous(config: Config) -> dict[str, tuple[bool, str]]:
    """Return the keys of asynchronous training that a run does not read whose responses the policy samples."""
    own, in_flight = config.trainer.asynchronous, (f"{ASYNCHRONOUS}partial_rollout", f"{ASYNCHRONOUS}keep_cache")
    if config.trainer.schedule != ASYNC:
        return _of(ASYNCHRONOUS, f"is of trainer.schedule={ASYNC}")
    if own.max_staleness == 0:
        return {
            key: (False, f"has no effect with {ASYNCHRONOUS}max_staleness=0, where all responses end first")
            for key in in_flight
        }
    if not own.partial_rollout:
        return {in_flight[1]: (False, f"has no effect with {in_flight[0]}=false")}
    return {}


def _of(section: str | tuple[str, ...], reason: str) -> dict[str, tuple[bool, str]]:
    return {key: (False, reason) for key in leaves() if key.startswith(section)}


def _lies_in(key: str, entries: tuple[str, ...]) -> bool:
    return key in entries or any(key.startswith(entry) for entry in entries if entry.endswith((".", "_")))
