"""The one mechanism against settings that do nothing: which keys a run does not read, and what each of them needs.

`unread` names them. `as_read` is the configuration without them, and the plan is made of it: no process can see what is said
to have no effect. A key that was set and that `as_read` has not kept is refused; one that bears on speed, memory, processes
or logs only is noted in the plan, for people set these by habit (verl's commands give sizes to passes that do not exist).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

from grpo_rl.config import derived
from grpo_rl.config.convert import show
from grpo_rl.config.derived import ASYNC, ITERATE, ONE_STEP_OFF, REWARD_MODEL, Machine, MicroBatchRule
from grpo_rl.config.function_options import WITHOUT_DUAL_CLIP
from grpo_rl.config.schema.fields import leaves, value_of
from grpo_rl.config.schema.tree import Config, ProfilerConfig

A, R, REF, M = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "ref", "model"))
TURNS, SCORER, JUDGE, RAY = f"{R}.multi_turn", "reward.reward_model", "reward.judge", "ray_kwargs.ray_init"
Keys = str | tuple[str, ...]
"""Keys, or beginnings of keys that end in a dot or an underscore."""
Reasons = Iterator[tuple[Keys, str]]


def _in(group: str, names: str) -> tuple[str, ...]:
    """Return the keys of a group by their names, with spaces between them."""
    return tuple(f"{group}.{name}" for name in names.split())


SAMPLING = ("sync", ONE_STEP_OFF, ASYNC, ITERATE)
"""The schedules of this package that train on sampled responses; one of the user's own may read whatever it likes."""
_OF_DISTRIBUTION = _in(R, "n temperature top_p top_k min_p ignore_eos")
_OF_PROMPTS = _in("data", "curriculum curriculum_floor difficulty_key dynamic_weights retire_")
_OF_ROLLOUTS = _in("trainer", "save_rollouts rollout_data_format log_token_groups")
_ANSWERS = _in("data", "response_key messages_key tools_key enable_thinking_key")
_PAIRS = ("data.chosen_key", "data.rejected_key")
_SOURCE = _in("data", "reward_fn_key data_source ground_truth_key extra_info_key")
_LENGTHS = ("data.max_prompt_length", "data.max_response_length")
_CRITIC = ("critic.", "trainer.critic_warmup")

HARMLESS = (
    *(f"{REF}.", f"{R}.log_prob_", f"{R}.val_kwargs.", f"{R}.checkpoint_engine."),
    *_in(R, "gpu_memory_utilization kv_cache_memory_bytes kv_cache_gib free_cache_engine"),
    *_in(R, "enforce_eager enable_prefix_caching cpu_threads engine_kwargs"),
    *_in(A, "ppo_micro_batch_size_per_gpu clip_ratio_c fsdp_config.fsdp_size"),
    *_in("critic", "ppo_micro_batch_size_per_gpu fsdp.fsdp_size"),
    *_in("trainer", "val_before_train log_val_generations"),
    *_in(RAY, "num_cpus object_store_memory"),
    *("reward.overlong_buffer.", "global_profiler.tool"),
)
"""Keys that are set by habit, and change nothing that is learned where another key has switched them off in plain sight."""


def problems(config: Config, machine: Machine) -> Iterator[str]:
    """Yield a line for each key that was set, has no effect in this run, and may have been meant to change what is learned."""
    for key, why in _set_and_unread(config, unread(config, machine)).items():
        if not _lies_in(key, HARMLESS):
            default = show(leaves()[key].default)
            yield f"{_given(config, key)}: has no effect in this run: {why}; leave it out, or set it to {default} where the recipe has it"


def notes(config: Config, machine: Machine, *, reference: str, old_logprobs: bool) -> Iterator[str]:
    """Yield a line for each harmless key that was set and has no effect in this run.

    `reference` is who computes the reference's log-probs: its own ranks, the actor's, or nobody; `old_logprobs`: the actor makes
    a pass for old log-probs.
    """
    reasons = [*unread(config, machine), *_of_passes(reference, old_logprobs)]
    for key, why in _set_and_unread(config, reasons).items():
        if _lies_in(key, HARMLESS):
            yield f"{_given(config, key)}: has no effect in this run: {why}"
    rollout = config.actor_rollout_ref.rollout
    if rollout.name in rollout.engine_kwargs and (others := sorted(set(rollout.engine_kwargs) - {rollout.name})):
        yield f"{R}.engine_kwargs.{','.join(others)}: has no effect in this run: the engine is {rollout.name}"


def as_read(config: Config, machine: Machine) -> Config:
    """Return the configuration as the run reads it: every key without an effect has its default."""
    for key in _set_and_unread(config, unread(config, machine)):
        config = _replaced(config, key, leaves()[key].default)
    return config


def of_keys(config: Config, keys: Keys, why: str) -> list[str]:
    """Return the refusals of those of the keys that were set, which are known to have no effect for the reason given."""
    return [
        f"{_given(config, key)}: has no effect in this run: {why}; leave it out"
        for key in _set_and_unread(config, [(keys, why)])
    ]


def unread(config: Config, machine: Machine) -> Reasons:
    """Yield the keys that nothing in this run reads, each with what it needs. The first reason of a key is the one that is told."""
    yield from _of_schedule(config)
    yield from _of_algorithm(config)
    yield from _of_data(config)
    yield from _of_sampling(config, machine)
    yield from _of_rewards(config)
    yield from _of_sizes(config)
    yield from _of_groups(config, machine)
    yield from _of_run(config)


def _of_schedule(config: Config) -> Reasons:
    """What is trained on, and when it is sampled."""
    schedule, loss, data = config.trainer.schedule, config.actor_rollout_ref.actor.policy_loss.loss_mode, config.data
    offline, collects, pairs = derived.is_offline(config), derived.collects(config), derived.trains_pairs(config)
    if derived.trains_only_reward_model(config):
        yield _all_but_reward_models(), f"trainer.schedule={REWARD_MODEL} trains no policy"
        train = config.reward.reward_model.train
        unread_columns: Keys = f"{SCORER}.step_separator" if train.loss == "bradley_terry" else _PAIRS
        yield unread_columns, f"{SCORER}.train.loss={train.loss} does not read it"
        if data.max_length is not None:
            yield _LENGTHS, "data.max_length is the longest sequence"
        return
    if not derived.trains_reward_model(config):
        yield f"{SCORER}.train.", f"it is of trainer.schedule={REWARD_MODEL}, which trains it"
    if not offline and schedule not in SAMPLING:
        return
    if not offline:
        yield (
            ("data.val_prompt_files", *_ANSWERS, *_PAIRS, "data.max_length", "trainer.early_stop_patience"),
            "it is of data.responses=rows and initial_policy",
        )
    if not collects:
        yield "algorithm.rejection.", "it is of data.responses=initial_policy"
    elif pairs:
        yield "algorithm.rejection.", f"loss_mode={loss} compares the best with the worst response, however good"
    if offline or schedule != ITERATE:
        yield "trainer.iterate.", f"it is of trainer.schedule={ITERATE}"
    elif config.trainer.iterate.reward_model_steps == 0:
        yield "trainer.iterate.replay_", "trainer.iterate.reward_model_steps=0 trains no reward model"
    elif config.trainer.iterate.replay_share == 0:
        yield "trainer.iterate.replay_pairs", "trainer.iterate.replay_share=0 replays none"
    own, flying = config.trainer.asynchronous, _in("trainer.asynchronous", "partial_rollout keep_cache")
    if offline or schedule != ASYNC:
        yield "trainer.asynchronous.", f"it is of trainer.schedule={ASYNC}"
    elif own.max_staleness == 0:
        yield flying, "with trainer.asynchronous.max_staleness=0 all responses end first"
    elif not own.partial_rollout:
        yield flying[1], f"{flying[0]}=false lets responses end first"
    if not offline:
        return
    fixed = f"data.responses={data.responses} " + (
        "samples before training" if collects else "trains on the answers in the data"
    )
    unsampled = (*_CRITIC, f"{REF}.", *_in(A, "kl_loss_ ppo_epochs shuffle data_loader_seed"), f"{R}.log_prob_")
    yield (*unsampled, *_OF_PROMPTS, *_OF_ROLLOUTS, *_algorithm_but("rejection.")), fixed
    if not collects:
        yield (*_OF_DISTRIBUTION, "data.gen_batch_size"), fixed
    if ":" not in loss:
        yield (
            (_ANSWERS, f"loss_mode={loss} reads rows with pairs")
            if pairs
            else (_PAIRS, f"loss_mode={loss} reads rows with answers to learn")
        )
    if not derived.samples_answers(config) and not collects:
        yield (f"{R}.", "reward.", *_SOURCE), "needs data.val_prompt_files: data.responses=rows samples and scores nothing else"
        if data.max_length is not None:
            yield _LENGTHS, "data.max_length is the longest row"


@cache
def _all_but_reward_models() -> tuple[str, ...]:
    """Return the keys that the training of a reward model does not read."""
    unread_data = (*_ANSWERS, *_SOURCE, *_OF_PROMPTS, "data.truncation", "data.gen_batch_size", "data.val_prompt_files")
    unread_run = ("trainer.iterate.", "trainer.asynchronous.", "trainer.critic_warmup", *_OF_ROLLOUTS)
    scorer = _in(
        SCORER, "train. model_path tokenizer_path trust_remote_code step_separator max_token_len_per_gpu dtype param_offload"
    )
    read = (*scorer, f"{A}.checkpoint.", "data.", "trainer.", "ray_kwargs.")
    return tuple(key for key in leaves() if not _lies_in(key, read) or _lies_in(key, (*unread_data, *unread_run)))


@cache
def _algorithm_but(read: str) -> tuple[str, ...]:
    return tuple(key for key in leaves() if key.startswith("algorithm.") and not key.startswith(f"algorithm.{read}"))


def _of_algorithm(config: Config) -> Reasons:
    """Advantages, loss, KL and groups."""
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    loss, groups, kl = actor.policy_loss.loss_mode, algorithm.filter_groups, algorithm.kl_ctrl
    if derived.trains_pairs(config):
        yield (*_algorithm_but("filter_groups."), *_CRITIC), f"loss_mode={loss} compares pairs and reads no advantages"
        yield f"{A}.kl_loss_", f"loss_mode={loss} has the reference in it and no KL term"
    elif not derived.may_have_critic(config):
        yield (
            tuple(key for key in _of(_CRITIC) if key != "critic.enable"),
            f"algorithm.adv_estimator={algorithm.adv_estimator} needs no critic",
        )
        if config.critic.enable:
            yield "critic.enable", f"algorithm.adv_estimator={algorithm.adv_estimator} needs no critic"
    if not actor.use_kl_loss and actor.kl_loss_coef:
        yield f"{A}.kl_loss_coef", f"needs {A}.use_kl_loss=true"
    if not derived.has_kl_in_loss(config):
        yield (f"{A}.kl_loss_type", f"{A}.kl_loss_options"), f"needs {A}.use_kl_loss=true, with a kl_loss_coef above 0"
    if not algorithm.use_kl_in_reward:
        yield (
            ("algorithm.kl_penalty", "algorithm.kl_penalty_options", "algorithm.kl_ctrl.type"),
            "needs algorithm.use_kl_in_reward=true",
        )
        if kl.kl_coef:
            yield "algorithm.kl_ctrl.kl_coef", "needs algorithm.use_kl_in_reward=true"
    if kl.type != "adaptive":
        yield ("algorithm.kl_ctrl.horizon", "algorithm.kl_ctrl.target_kl"), "needs algorithm.kl_ctrl.type=adaptive"
    if actor.clip_ratio_low is not None and actor.clip_ratio_high is not None:
        yield f"{A}.clip_ratio", f"{A}.clip_ratio_low and clip_ratio_high are both there"
    if loss in WITHOUT_DUAL_CLIP:
        yield f"{A}.clip_ratio_c", f"the loss {loss} clips no second time"
    if not actor.adaptive_entropy.enable:
        yield (f"{A}.adaptive_entropy.target", f"{A}.adaptive_entropy.delta"), f"needs {A}.adaptive_entropy.enable=true"
    if not actor.shuffle:
        yield f"{A}.data_loader_seed", f"needs {A}.shuffle=true"
    if not groups.enable:
        yield ("algorithm.filter_groups.metric", "algorithm.filter_groups.refill"), "needs algorithm.filter_groups.enable=true"
    if not (groups.enable and groups.refill):
        refill = "needs algorithm.filter_groups.enable=true, with refill"
        yield "algorithm.filter_groups.max_num_gen_batches", refill
        if not derived.collects(config):
            yield "data.gen_batch_size", refill
    for key in (f"{A}.optim", "critic.optim", f"{SCORER}.train.optim"):
        optim = value_of(config, key)
        if optim.lr_scheduler_type == "constant":
            yield f"{key}.min_lr_ratio", f"needs {key}.lr_scheduler_type=linear or cosine"
        if optim.lr_warmup_steps >= 0:
            yield f"{key}.lr_warmup_steps_ratio", f"{key}.lr_warmup_steps={optim.lr_warmup_steps} is there; -1 takes the ratio"
    model = config.actor_rollout_ref.model
    if model.lora_rank == 0:
        yield _in(M, "lora_alpha target_modules exclude_modules lora_adapter_path"), f"needs {M}.lora_rank above 0"
    for key in (M, "critic.model"):
        if not value_of(config, f"{key}.enable_gradient_checkpointing"):
            yield (
                f"{key}.enable_activation_offload",
                f"needs {key}.enable_gradient_checkpointing=true: it moves the inputs of layers that are recomputed",
            )


def _of_data(config: Config) -> Reasons:
    data = config.data
    by_rate = data.curriculum == "pass_rate" or data.dynamic_weights
    if not data.shuffle:
        yield "data.seed", "needs data.shuffle=true"
    if data.retire_above is None and not by_rate:
        yield (
            ("data.retire_metric", "data.retire_score"),
            "needs data.retire_above, data.curriculum=pass_rate or data.dynamic_weights=true",
        )
    if not by_rate:
        yield "data.curriculum_floor", "needs data.curriculum=pass_rate or data.dynamic_weights=true"
    if data.curriculum != "difficulty":
        yield "data.difficulty_key", "needs data.curriculum=difficulty"
    if data.data_source is not None:
        yield "data.reward_fn_key", "data.data_source gives it for all rows"
    if config.trainer.resume_mode == "disable":
        yield "data.allow_change", "with trainer.resume_mode=disable nothing is resumed"
    if not data.val_files:
        yield "data.val_max_samples", "needs data.val_files"
    if not data.val_files and not data.val_prompt_files:
        yield "trainer.val_before_train", "there is nothing to validate on"


def _of_sampling(config: Config, machine: Machine) -> Reasons:
    """The engine, validation by sampling, and episodes."""
    rollout, data, values = config.actor_rollout_ref.rollout, config.data, config.actor_rollout_ref.rollout.val_kwargs
    of_gpus, of_cpus = "gpu_memory_utilization free_cache_engine kv_cache_memory_bytes", "kv_cache_gib cpu_threads"
    if rollout.name == "hf":
        of_vllm = f"{of_gpus} kv_cache_gib enforce_eager enable_prefix_caching"
        yield _in(R, of_vllm), f"needs {R}.name=vllm, and it is hf"
    else:
        yield f"{R}.hf.", f"needs {R}.name=hf, and it is {rollout.name}"
    if rollout.engine_kwargs and rollout.name not in rollout.engine_kwargs:
        yield f"{R}.engine_kwargs", f"it names engines other than {R}.name={rollout.name}"
    yield (_in(R, of_gpus), "it is for GPUs") if machine.device == "cpu" else (_in(R, of_cpus), "it is for CPUs")
    if not derived.is_colocated(config):
        yield f"{R}.free_cache_engine", "engines have devices of their own, and keep their memory"
    elif rollout.n_gpus_per_node is not None:
        yield f"{R}.n_gpus_per_node", f"with {R}.nnodes=0 engines share the actor's devices; {R}.nnodes gives them their own"
    prompts = "val_prompt_files" if derived.is_offline(config) else "val_files"
    greedy = _in(f"{R}.val_kwargs", "temperature top_p top_k")
    if not getattr(data, prompts):
        yield f"{R}.val_kwargs.", f"needs data.{prompts}: only validation reads it"
    elif not values.do_sample:
        yield greedy, f"validation is greedy without {R}.val_kwargs.do_sample=true"
    elif not values.temperature:
        yield (f"{R}.val_kwargs.do_sample", *greedy), "validation is greedy at temperature 0"
    turns = rollout.multi_turn
    if not turns.enable:
        yield tuple(key for key in _of(f"{TURNS}.") if key != f"{TURNS}.enable"), f"needs {TURNS}.enable=true"
        return
    if not has_tools(config):
        of_answers = "max_tool_response_length tool_response_truncate_side environment.tool_timeout_s"
        yield _in(TURNS, f"format max_parallel_calls {of_answers}"), f"needs {TURNS}.tools or tool_config_path"
    if turns.environment.name is None:
        yield f"{TURNS}.environment.options", f"needs {TURNS}.environment.name"
    if turns.environment.reward_weight == 0:
        yield f"{TURNS}.turn_discount", f"needs {TURNS}.environment.reward_weight other than 0"
    if "punish" not in (turns.truncation.turns, turns.truncation.tokens, turns.truncation.time):
        yield f"{TURNS}.truncation.penalty", f"needs {TURNS}.truncation.turns, tokens or time =punish"
    if turns.max_assistant_turns is None and turns.max_user_turns is None:
        yield f"{TURNS}.truncation.turns", f"needs {TURNS}.max_assistant_turns or max_user_turns"


def _of_rewards(config: Config) -> Reasons:
    reward, scorer = config.reward, config.reward.reward_model
    if reward.custom_reward_function.path is None:
        yield (
            ("reward.custom_reward_function.name", "reward.custom_reward_function.reward_kwargs"),
            "needs reward.custom_reward_function.path",
        )
    if reward.on_failure != "value":
        yield "reward.failure_value", "needs reward.on_failure=value"
    if reward.overlong_buffer.len is None:
        yield (
            ("reward.overlong_buffer.enable", "reward.overlong_buffer.penalty_factor"),
            "there is no reward.overlong_buffer.len",
        )
    elif not reward.overlong_buffer.enable:
        yield ("reward.overlong_buffer.len", "reward.overlong_buffer.penalty_factor"), "reward.overlong_buffer.enable=false"
    if not scorer.enable and not derived.trains_only_reward_model(config):
        yield tuple(key for key in _of(f"{SCORER}.") if key != f"{SCORER}.enable"), f"needs {SCORER}.enable=true"
    elif not scorer.enable_resource_pool:
        yield (
            (f"{SCORER}.nnodes", f"{SCORER}.n_gpus_per_node"),
            f"it shares the actor's devices; {SCORER}.enable_resource_pool=true gives it its own",
        )
    if scorer.train.loss != "bradley_terry":
        yield f"{SCORER}.train.center_coef", f"needs {SCORER}.train.loss=bradley_terry"
    if reward.judge.base_url is None:
        yield f"{JUDGE}.", f"needs {JUDGE}.base_url"


def _of_sizes(config: Config) -> Reasons:
    """Sizes of passes that are cut otherwise."""
    parts = config.actor_rollout_ref
    update, own = derived.update_rule(config), (derived.logprob_rule(config, "ref"), derived.logprob_rule(config, "rollout"))
    critic = derived.critic_rule(config)
    if not any(
        rule.max_tokens == parts.actor.ppo_max_token_len_per_gpu * rule.sequence_ranks for rule in (update, *own, critic)
    ):
        yield f"{A}.ppo_max_token_len_per_gpu", "micro-batches are cut by rollouts"
    yield from _of_rule(f"{REF}.log_prob", own[0])
    yield from _of_rule(f"{R}.log_prob", own[1])
    yield from _of_rule("critic.ppo", critic)
    if all(rule.max_rollouts is None for rule in (update, *own, critic)):
        yield f"{A}.ppo_micro_batch_size_per_gpu", "its passes are cut by tokens (use_dynamic_bsz=true)"


def _of_groups(config: Config, machine: Machine) -> Reasons:
    """Groups of ranks that are larger than the set is: verl's commands say 8 wherever they run, and mean all."""
    parts, ranks = config.actor_rollout_ref, machine.world_size(config)
    sizes = {
        f"{A}.fsdp_config": parts.actor.fsdp_config.fsdp_size,
        f"{REF}.fsdp_config": parts.ref.fsdp_config.fsdp_size,
        "critic.fsdp": config.critic.fsdp.fsdp_size,
    }
    for key, size in sizes.items():
        if size > ranks:
            yield f"{key}.fsdp_size", f"there are {ranks} ranks, and a larger group is all of them, as in verl"


def _of_rule(key: str, rule: MicroBatchRule) -> Reasons:
    if rule.max_tokens is None:
        yield f"{key}_max_token_len_per_gpu", "its passes are cut by rollouts"
    else:
        yield f"{key}_micro_batch_size_per_gpu", "its passes are cut by tokens (use_dynamic_bsz=true)"


def _of_passes(reference: str, old_logprobs: bool) -> Reasons:
    """Passes that the plan has found to be superfluous."""
    if reference == "actor":
        yield (
            (f"{REF}.fsdp_config.", f"{REF}.ulysses_sequence_parallel_size"),
            "the reference is the base model in the actor's ranks",
        )
    elif reference == "nobody":
        yield f"{REF}.", "no reference runs"
    if not old_logprobs:
        yield f"{R}.log_prob_", "no pass computes old log-probs: a step has one update, for which they are the engine's"


def _of_run(config: Config) -> Reasons:
    """Checkpoints, recovery, profiles and Ray."""
    trainer, profiler = config.trainer, config.global_profiler
    saves = trainer.save_freq > 0
    if not saves:
        yield (f"{A}.checkpoint.", "trainer.on_save_error", "trainer.max_actor_ckpt_to_keep"), "needs trainer.save_freq"
    if trainer.resume_mode != "resume_path":
        yield "trainer.resume_from_path", "needs trainer.resume_mode=resume_path"
    if trainer.val_only:
        yield "trainer.stop_on", "nothing is trained with trainer.val_only=true"
    if trainer.recover == "off":
        restarted = ("trainer.on_out_of_memory", "trainer.max_restarts", "trainer.restart_window_s")
        yield restarted, "needs trainer.recover=auto: ranks are started again"
    if trainer.on_nonfinite != "skip":
        yield "trainer.max_nonfinite_steps", "needs trainer.on_nonfinite=skip"
    if not {"wandb", "mlflow"} & set(trainer.logger):
        yield "trainer.log_val_generations", "neither wandb nor mlflow is among trainer.logger"
    for key, own in profilers_of(config).items():
        if not own.enable:
            yield (f"{key}.all_ranks", f"{key}.ranks"), f"needs {key}.enable=true"
    if profiler.tool is None:
        yield "global_profiler.steps", "needs global_profiler.tool"
    elif profiler.tool == "torch" and profiler.steps is None:
        yield "global_profiler.tool", "no step is named in global_profiler.steps"
    if profiler.tool != "torch_memory":
        yield "global_profiler.global_tool_config.", "needs global_profiler.tool=torch_memory"
    if config.ray_kwargs.ray_init.address is not None:
        yield (f"{RAY}.num_cpus", f"{RAY}.object_store_memory"), "it is for a local cluster"
    elif not os.environ.get("RAY_ADDRESS"):
        yield (
            (f"{RAY}.wait_for_nodes_s", f"{RAY}.allow_insecure"),
            f"needs {RAY}.address; a local cluster has one node, and asks for a token",
        )


def has_tools(config: Config) -> bool:
    """Return whether turns may call tools."""
    own = config.actor_rollout_ref.rollout.multi_turn
    return bool(own.tools) or own.tool_config_path is not None


def profilers_of(config: Config) -> dict[str, ProfilerConfig]:
    """Return the profilers of all roles that have one, by their key."""
    return {key: value_of(config, key) for key in (f"{A}.profiler", f"{REF}.profiler", "critic.profiler")}


@cache
def _of(keys: Keys) -> tuple[str, ...]:
    return tuple(key for key in leaves() if _lies_in(key, keys))


def _lies_in(key: str, keys: Keys) -> bool:
    entries = (keys,) if isinstance(keys, str) else keys
    return key in entries or key.startswith(tuple(entry for entry in entries if entry.endswith((".", "_"))))


def _set_and_unread(config: Config, reasons: Iterable[tuple[Keys, str]]) -> dict[str, str]:
    """Return the keys that were set to something other than their default and that nothing reads, with the reason."""
    were_set = [key for key, leaf in leaves().items() if value_of(config, key) != leaf.default]
    found: dict[str, str] = {}
    for keys, why in reasons:
        found |= {key: why for key in were_set if key not in found and _lies_in(key, keys)}
    return found


def _given(config: Config, key: str) -> str:
    return f"{key}={show(value_of(config, key))}"


def _replaced(root: Any, key: str, value: Any) -> Any:
    head, _, rest = key.partition(".")
    return dataclasses.replace(root, **{head: _replaced(getattr(root, head), rest, value) if rest else value})
