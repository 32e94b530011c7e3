"""The one mechanism against settings that do nothing: which keys a run does not read, and what each of them needs.

`unread` names them. `as_read` is the configuration without them, and the plan is made of it: no process can see what is said
to have no effect. A key that was set and that `as_read` has not kept is refused; one that bears on speed, memory, processes
or logs only is noted in the plan, for people set these by habit (verl's commands give sizes to passes that do not exist).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

from grpo_rl.config import derived
from grpo_rl.config.convert import show
from grpo_rl.config.derived import ASYNC, ITERATE, ONE_STEP_OFF, REWARD_MODEL, Machine
from grpo_rl.config.function_options import WITHOUT_DUAL_CLIP
from grpo_rl.config.schema.fields import leaves, value_of
from grpo_rl.config.schema.tree import Config, ProfilerConfig

A, R, REF, M = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "ref", "model"))
TURNS, SCORER, JUDGE, RAY = f"{R}.multi_turn", "reward.reward_model", "reward.judge", "ray_kwargs.ray_init"
SAMPLING = ("sync", ONE_STEP_OFF, ASYNC, ITERATE)
"""The schedules of this package that train on sampled responses; one of the user's own may read whatever it likes."""

Rule = tuple[bool, str, str]
"""Where it is true, these keys have no effect, for this reason. Keys are written `GROUP: NAME NAME; GROUP: NAME`; a name that
ends in a star stands for all that begin so."""

_ANSWERS = "data: response_key messages_key tools_key enable_thinking_key"
_PAIRS = "data: chosen_key rejected_key"
_SOURCE = "data: reward_fn_key data_source ground_truth_key extra_info_key"
_LENGTHS = "data: max_prompt_length max_response_length"
_OF_PROMPTS = "data: retire_*"
_OF_ROLLOUTS = "trainer: save_rollouts log_token_groups"
_CRITIC = "critic: *; trainer: critic_warmup"
_ADVANTAGES = (
    "algorithm: adv_* norm_adv_by_std_in_grpo gamma lam reward_parts use_kl_in_reward kl_* rollout_correction.* mask_truncated"
)
_OFFLOADS = (
    f"{A}: fsdp_config.param_offload fsdp_config.optimizer_offload fsdp_config.offload_policy; {REF}: fsdp_config.param_offload "
    f"fsdp_config.offload_policy; critic: fsdp.param_offload fsdp.optimizer_offload fsdp.offload_policy "
    f"model.enable_activation_offload; {M}: enable_activation_offload flash_attention; {SCORER}: param_offload "
    "train.optimizer_offload"
)

_BY_TOKEN = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
ESTIMATES = (*_BY_TOKEN, *(f"{name}+" for name in _BY_TOKEN), "k3_unbiased")
"""The distances to a teacher by the sampled token: the names of KL estimators."""

HARMLESS = (
    f"{REF}: *; {R}: log_prob_* val_kwargs.* checkpoint_engine.* gpu_memory_utilization kv_cache_memory_bytes kv_cache_gib "
    f"free_cache_engine enforce_eager enable_prefix_caching cpu_threads engine_kwargs; {A}: ppo_micro_batch_size_per_gpu "
    f"clip_ratio_c fsdp_config.fsdp_size; critic: ppo_micro_batch_size_per_gpu fsdp.fsdp_size; {RAY}: num_cpus "
    "object_store_memory; trainer: val_before_train log_val_generations; reward: overlong_buffer.* audit audit_share; global_profiler: tool; "
    f"{_OFFLOADS}"
)
"""Keys that are set by habit, and change nothing that is learned where another key has switched them off in plain sight."""


def problems(config: Config, machine: Machine) -> Iterator[str]:
    """Yield a line for each key that was set, has no effect in this run, and may have been meant to change what is learned."""
    for key, why in _set_and_unread(config, unread(config, machine)).items():
        if key not in _keys(HARMLESS):
            default = show(leaves()[key].default)
            yield f"{_given(config, key)}: has no effect in this run: {why}; leave it out, or set it to {default} where the recipe has it"


def notes(config: Config, machine: Machine, *, reference: str, old_logprobs: bool) -> Iterator[str]:
    """Yield a line for each harmless key that was set and has no effect in this run.

    `reference` is who computes the reference's log-probs: its own ranks, the actor's, or nobody; `old_logprobs`: the actor makes
    a pass for old log-probs.
    """
    rules = [
        *unread(config, machine),
        (reference == "actor", f"{REF}: fsdp_config.* ulysses_*", "the reference is the base model in the actor's ranks"),
        (reference == "nobody", f"{REF}: *", "no reference runs"),
        (
            not old_logprobs,
            f"{R}: log_prob_*",
            "no pass computes old log-probs: a step has one update, for which they are the engine's",
        ),
    ]
    for key, why in _set_and_unread(config, rules).items():
        if key in _keys(HARMLESS):
            yield f"{_given(config, key)}: has no effect in this run: {why}"
    rollout = config.actor_rollout_ref.rollout
    if rollout.name in rollout.engine_kwargs and (others := sorted(set(rollout.engine_kwargs) - {rollout.name})):
        yield f"{R}.engine_kwargs.{','.join(others)}: has no effect in this run: the engine is {rollout.name}"


def as_read(config: Config, machine: Machine) -> Config:
    """Return the configuration as the run reads it: every key without an effect has its default."""
    for key in _set_and_unread(config, unread(config, machine)):
        config = _replaced(config, key, leaves()[key].default)
    return config


def of_keys(config: Config, keys: str, why: str) -> list[str]:
    """Return the refusals of those of the keys that were set, which are known to have no effect for the reason given."""
    found = _set_and_unread(config, [(True, keys, why)])
    return [f"{_given(config, key)}: has no effect in this run: {why}; leave it out" for key in found]


def unread(config: Config, machine: Machine) -> list[Rule]:
    """Return the rules for keys that nothing in this run reads. The first one that holds for a key is the one that is told."""
    return [
        *(_of_reward_model(config) if derived.trains_only_reward_model(config) else _of_schedule(config)),
        *_of_teachers(config),
        *_of_algorithm(config),
        *_of_data(config),
        *_of_sampling(config, machine),
        *_of_rewards(config),
        *_of_sizes(config, machine),
        *_of_run(config, machine),
    ]


def _of_reward_model(config: Config) -> list[Rule]:
    """The schedule that trains a reward model and no policy."""
    loss = config.reward.reward_model.train.loss
    unread_columns = f"{SCORER}: step_separator" if loss == "bradley_terry" else _PAIRS
    return [
        (True, _all_but_reward_models(), f"trainer.schedule={REWARD_MODEL} trains no policy"),
        (True, unread_columns, f"{SCORER}.train.loss={loss} does not read it"),
        (config.data.max_length is not None, _LENGTHS, "data.max_length is the longest sequence"),
    ]


@cache
def _all_but_reward_models() -> str:
    """Return the keys that the training of a reward model does not read."""
    scorer = "train.* model_path tokenizer_path trust_remote_code step_separator max_token_len_per_gpu dtype param_offload"
    read = _keys(f"{SCORER}: {scorer}; {A}: checkpoint.*; data: *; trainer: *; ray_kwargs: *")
    unread_data = f"{_ANSWERS}; {_SOURCE}; {_OF_PROMPTS}; data: truncation gen_batch_size val_prompt_files"
    unread_here = _keys(f"{unread_data}; {_OF_ROLLOUTS}; trainer: iterate.* asynchronous.* critic_warmup")
    names = (key.partition(".") for key in leaves() if key not in read or key in unread_here)
    return "; ".join(f"{group}: {name}" for group, _, name in names)


def _of_schedule(config: Config) -> list[Rule]:
    """What is trained on, and when it is sampled."""
    schedule, loss, data = config.trainer.schedule, config.actor_rollout_ref.actor.policy_loss.loss_mode, config.data
    offline, collects, pairs = derived.is_offline(config), derived.collects(config), derived.trains_pairs(config)
    of_training = (not derived.trains_reward_model(config), f"{SCORER}: train.*", f"it is of trainer.schedule={REWARD_MODEL}")
    if not offline and schedule not in SAMPLING:
        return [of_training]
    own, iterate, is_async = config.trainer.asynchronous, config.trainer.iterate, not offline and schedule == ASYNC
    of_rows = f"{_ANSWERS}; {_PAIRS}; data: val_prompt_files max_length"
    fixed = "samples before training" if collects else "trains on the answers in the data"
    fixed = f"data.responses={data.responses} {fixed}"
    of_updates = f"{A}: kl_loss_* ppo_epochs shuffle data_loader_seed; {R}: log_prob_*"
    of_policy = (
        f"{_CRITIC}; {REF}: *; {of_updates}; {_OF_PROMPTS}; {_OF_ROLLOUTS}; {_ADVANTAGES}; algorithm: filter_groups.* replay.*"
    )
    of_samples = f"{R}: n temperature top_p top_k min_p ignore_eos; data: gen_batch_size"
    registered, silent = offline and ":" not in loss, offline and not collects and not derived.samples_answers(config)
    return [
        of_training,
        (not offline, of_rows, "it is of data.responses=rows and initial_policy"),
        (not collects, "algorithm: rejection.*", "it is of data.responses=initial_policy"),
        (pairs, "algorithm: rejection.*", f"loss_mode={loss} compares the best with the worst response, however good"),
        (offline or schedule != ITERATE, "trainer: iterate.*", f"it is of trainer.schedule={ITERATE}"),
        (iterate.reward_model_steps == 0, "trainer: iterate.replay_*", "iterate.reward_model_steps=0 trains no reward model"),
        (iterate.replay_share == 0, "trainer: iterate.replay_pairs", "trainer.iterate.replay_share=0 replays none"),
        (not is_async, "trainer: asynchronous.*", f"it is of trainer.schedule={ASYNC}"),
        (
            own.max_staleness == 0,
            "trainer: asynchronous.partial_rollout asynchronous.keep_cache",
            "with trainer.asynchronous.max_staleness=0 all responses end first",
        ),
        (not own.partial_rollout, "trainer: asynchronous.keep_cache", "partial_rollout=false lets responses end first"),
        (offline, of_policy, fixed),
        (offline and not collects, of_samples, fixed),
        (loss in derived.LABEL_LOSSES, _PAIRS, f"loss_mode={loss} reads the columns completion and label"),
        (registered and pairs, _ANSWERS, f"loss_mode={loss} reads rows with pairs"),
        (registered and not pairs, _PAIRS, f"loss_mode={loss} reads rows with answers to learn"),
        (silent, f"{R}: *; reward: *; {_SOURCE}", "needs data.val_prompt_files: nothing else is sampled and scored"),
        (silent and data.max_length is not None, _LENGTHS, "data.max_length is the longest row"),
    ]


def _of_teachers(config: Config) -> list[Rule]:
    """Distillation, and what a teacher takes the place of."""
    own, loss, enabled = config.distillation.distillation_loss, "distillation.distillation_loss", config.distillation.enabled
    alone, known = enabled and not own.use_task_rewards, ":" not in own.loss_mode
    samples_alone = alone and not derived.is_offline(config)
    of_rewards = "algorithm: adv_* norm_adv_by_std_in_grpo gamma lam reward_parts use_kl_in_reward kl_*"
    of_loss, why = f"{A}: clip_ratio clip_ratio_* policy_loss.*", f"{loss}.use_task_rewards=false learns from teachers alone"
    return [
        (not enabled, "distillation: *", "needs distillation.enabled=true"),
        (alone, f"{loss}: distillation_loss_coef", why),
        (samples_alone, f"{of_rewards}; {_CRITIC}", why),
        (samples_alone and not own.use_policy_gradient, of_loss, why),
        (not own.use_policy_gradient, f"{loss}: discount", f"needs {loss}.use_policy_gradient=true"),
        (own.loss_mode in ESTIMATES, f"{loss}: topk", f"loss_mode={own.loss_mode} looks at the sampled token alone"),
        (known and own.loss_mode != "jsd", f"{loss}: jsd_beta", f"needs {loss}.loss_mode=jsd"),
        (not config.distillation.nnodes, "distillation: n_gpus_per_node", "needs distillation.nnodes above 0"),
    ]


def _of_algorithm(config: Config) -> list[Rule]:
    """Advantages, loss, KL, groups, optimizer and adapters."""
    actor, algorithm, model = config.actor_rollout_ref.actor, config.algorithm, config.actor_rollout_ref.model
    loss, groups, kl = actor.policy_loss.loss_mode, algorithm.filter_groups, algorithm.kl_ctrl
    pairs, in_reward, in_loss = derived.trains_pairs(config), algorithm.use_kl_in_reward, actor.use_kl_loss
    no_critic = not pairs and not derived.may_have_critic(config)
    of_critic = _CRITIC.replace("*", "model.* optim.* fsdp.* profiler.* ppo_* use_dynamic_bsz ulysses_* cliprange_value")
    of_critic += "" if config.critic.enable is False else "; critic: enable"
    unneeded, refill = f"algorithm.adv_estimator={algorithm.adv_estimator} needs no critic", groups.enable and groups.refill
    rules = [
        (pairs, f"{_ADVANTAGES}; {_CRITIC}; algorithm: replay.*", f"loss_mode={loss} compares pairs and reads no advantages"),
        (
            refill and derived.overlaps(config),
            "algorithm: replay.*",
            f"algorithm.filter_groups.refill=true fills a batch of trainer.schedule={config.trainer.schedule} with new groups",
        ),
        (algorithm.replay.max_age == 0, "algorithm: replay.max_success replay.share", "needs algorithm.replay.max_age above 0"),
        (pairs, f"{A}: kl_loss_*", f"loss_mode={loss} has the reference in it and no KL term"),
        (no_critic, of_critic, unneeded),
        (not in_loss and actor.kl_loss_coef > 0, f"{A}: kl_loss_coef", f"needs {A}.use_kl_loss=true"),
        (
            not derived.has_kl_in_loss(config),
            f"{A}: kl_loss_type kl_loss_options",
            f"needs {A}.use_kl_loss=true, with a kl_loss_coef above 0",
        ),
        (not in_reward, "algorithm: kl_penalty kl_penalty_options kl_ctrl.type", "needs algorithm.use_kl_in_reward=true"),
        (not in_reward and kl.kl_coef > 0, "algorithm: kl_ctrl.kl_coef", "needs algorithm.use_kl_in_reward=true"),
        (kl.type != "adaptive", "algorithm: kl_ctrl.horizon kl_ctrl.target_kl", "needs algorithm.kl_ctrl.type=adaptive"),
        (
            actor.clip_ratio_low is not None and actor.clip_ratio_high is not None,
            f"{A}: clip_ratio",
            f"{A}.clip_ratio_low and clip_ratio_high are both there",
        ),
        (loss in WITHOUT_DUAL_CLIP, f"{A}: clip_ratio_c", f"the loss {loss} clips no second time"),
        (not actor.adaptive_entropy.enable, f"{A}: adaptive_entropy.*", f"needs {A}.adaptive_entropy.enable=true"),
        (not actor.shuffle, f"{A}: data_loader_seed", f"needs {A}.shuffle=true"),
        (
            not groups.enable,
            "algorithm: filter_groups.metric filter_groups.refill",
            "needs algorithm.filter_groups.enable=true",
        ),
        (not refill, "algorithm: filter_groups.max_num_gen_batches", "needs algorithm.filter_groups.enable=true, with refill"),
        (
            not refill and not derived.collects(config),
            "data: gen_batch_size",
            "needs algorithm.filter_groups.enable=true, with refill",
        ),
        (
            model.lora_rank == 0,
            f"{M}: lora_alpha target_modules exclude_modules lora_adapter_path; {R}: lora_sync",
            f"needs {M}.lora_rank above 0",
        ),
    ]
    for key in (f"{A}.optim", "critic.optim", f"{SCORER}.train.optim"):
        own = value_of(config, key)
        steps = f"{key}.lr_warmup_steps={own.lr_warmup_steps} is there; -1 takes the ratio"
        is_constant = own.lr_scheduler_type == "constant"
        rules.append((is_constant, f"{key}: min_lr_ratio", f"needs {key}.lr_scheduler_type=linear or cosine"))
        rules.append((own.lr_warmup_steps >= 0, f"{key}: lr_warmup_steps_ratio", steps))
    for key in (M, "critic.model"):
        needed = f"needs {key}.enable_gradient_checkpointing=true: it moves the inputs of layers that are recomputed"
        rules.append((not value_of(config, key).enable_gradient_checkpointing, f"{key}: enable_activation_offload", needed))
    return rules


def _of_data(config: Config) -> list[Rule]:
    data = config.data
    resumes = config.trainer.resume_mode != "disable"
    return [
        (not data.shuffle, "data: seed", "needs data.shuffle=true"),
        (data.retire_above is None, "data: retire_metric retire_score", "needs data.retire_above"),
        (data.data_source is not None, "data: reward_fn_key", "data.data_source gives it for all rows"),
        (not resumes, "data: allow_change", "with trainer.resume_mode=disable nothing is resumed"),
        (not data.val_files, "data: val_max_samples", "needs data.val_files"),
        (not (data.val_files or data.val_prompt_files), "trainer: val_before_train", "there is nothing to validate on"),
    ]


def _of_sampling(config: Config, machine: Machine) -> list[Rule]:
    """The engine, validation by sampling, and episodes."""
    rollout, values, turns = (
        config.actor_rollout_ref.rollout,
        config.actor_rollout_ref.rollout.val_kwargs,
        config.actor_rollout_ref.rollout.multi_turn,
    )
    engine, colocated, truncation = rollout.name, derived.is_colocated(config), turns.truncation
    is_float32 = rollout.dtype == "float32" or (rollout.dtype == "auto" and machine.device == "cpu")
    prompts = "val_prompt_files" if derived.is_offline(config) else "val_files"
    validated, of_gpus = bool(getattr(config.data, prompts)), "gpu_memory_utilization free_cache_engine kv_cache_memory_bytes"
    greedy = f"{R}: val_kwargs.temperature val_kwargs.top_p val_kwargs.top_k"
    of_tools = "format max_parallel_calls max_tool_response_length tool_response_truncate_side environment.tool_timeout_s"
    shared = f"with {R}.nnodes=0 engines share the actor's devices; {R}.nnodes gives them their own"
    return [
        (
            engine == "hf",
            f"{R}: {of_gpus} kv_cache_gib enforce_eager enable_prefix_caching",
            f"needs {R}.name=vllm, and it is hf",
        ),
        (engine != "hf", f"{R}: hf.*", f"needs {R}.name=hf, and it is {engine}"),
        (engine != "vllm", f"{R}: fp32_lm_head quantization", f"needs {R}.name=vllm, and it is {engine}"),
        (is_float32, f"{R}: fp32_lm_head", "everything in the engine is float32"),
        (engine not in rollout.engine_kwargs, f"{R}: engine_kwargs", f"it names engines other than {R}.name={engine}"),
        (machine.device == "cpu", f"{R}: {of_gpus}", "it is for GPUs"),
        (machine.device != "cpu", f"{R}: kv_cache_gib cpu_threads", "it is for CPUs"),
        (not colocated, f"{R}: free_cache_engine", "engines have devices of their own, and keep their memory"),
        (colocated, f"{R}: n_gpus_per_node", shared),
        (
            config.trainer.recover == "off" or config.trainer.val_only,
            f"{R}: min_replicas max_replicas",
            "the number of engines is fixed with trainer.recover=off and with trainer.val_only=true",
        ),
        (not validated, f"{R}: val_kwargs.*", f"needs data.{prompts}: only validation reads it"),
        (not values.do_sample, greedy, f"validation is greedy without {R}.val_kwargs.do_sample=true"),
        (not values.temperature, f"{greedy} val_kwargs.do_sample", "validation is greedy at temperature 0"),
        (not turns.enable, f"{TURNS}: *", f"needs {TURNS}.enable=true"),
        (not has_tools(config), f"{TURNS}: {of_tools}", f"needs {TURNS}.tools or tool_config_path"),
        (turns.environment.name is None, f"{TURNS}: environment.options", f"needs {TURNS}.environment.name"),
        (
            turns.environment.reward_weight == 0,
            f"{TURNS}: turn_discount",
            f"needs {TURNS}.environment.reward_weight other than 0",
        ),
        (
            "punish" not in (truncation.turns, truncation.tokens, truncation.time),
            f"{TURNS}: truncation.penalty",
            f"needs {TURNS}.truncation.turns, tokens or time =punish",
        ),
        (
            turns.max_assistant_turns is None and turns.max_user_turns is None,
            f"{TURNS}: truncation.turns",
            f"needs {TURNS}.max_assistant_turns or max_user_turns",
        ),
    ]


def _of_rewards(config: Config) -> list[Rule]:
    reward, scorer, custom = config.reward, config.reward.reward_model, "reward.custom_reward_function"
    buffer, scores = reward.overlong_buffer, scorer.enable or derived.trains_only_reward_model(config)
    by_model = derived.is_iterated(config) or derived.scores_steps_by_model(config)
    has_rubric = reward.judge.rubric is not None
    # Without `judge` among the audits a judge would become a part of the reward.
    audits = "judge" in reward.audit or not (config.trainer.val_only or derived.is_offline(config))
    pool = f"it shares the actor's devices; {SCORER}.enable_resource_pool=true gives it its own"
    return [
        (reward.custom_reward_function.path is None, f"{custom}: name reward_kwargs", f"needs {custom}.path"),
        (not audits, "reward: audit audit_share", "no policy is trained on responses that it samples"),
        (not reward.audit, "reward: audit_share", "needs reward.audit"),
        ("judge" in reward.audit, f"{JUDGE}: weight", "the judge is in reward.audit, and no part of the reward"),
        (reward.on_failure != "value", "reward: failure_value", "needs reward.on_failure=value"),
        (buffer.len is None, "reward: overlong_buffer.*", "there is no reward.overlong_buffer.len"),
        (
            not buffer.enable,
            "reward: overlong_buffer.len overlong_buffer.penalty_factor",
            "reward.overlong_buffer.enable=false",
        ),
        (not scores, f"{SCORER}: *", f"needs {SCORER}.enable=true"),
        (not scorer.enable_resource_pool, f"{SCORER}: nnodes n_gpus_per_node", pool),
        (scorer.train.loss != "bradley_terry", f"{SCORER}: train.center_coef", f"needs {SCORER}.train.loss=bradley_terry"),
        (reward.judge.base_url is None, f"{JUDGE}: *", f"needs {JUDGE}.base_url"),
        (not has_rubric, f"{JUDGE}: rubric_calls rubric_aggregation rubric_pass", f"needs {JUDGE}.rubric"),
        (has_rubric, f"{JUDGE}: parser", f"the marks of {JUDGE}.rubric are read from a JSON object"),
        (reward.judge.rubric_aggregation != "all", f"{JUDGE}: rubric_pass", f"needs {JUDGE}.rubric_aggregation=all"),
        (by_model, f"{JUDGE}: *", "the reward is the reward model's score alone"),
    ]


def _of_sizes(config: Config, machine: Machine) -> list[Rule]:
    """Passes that are cut otherwise, groups of more ranks than there are (verl's commands say 8 wherever they run), offloads."""
    update, most = derived.update_rule(config), config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu
    own = {
        f"{REF}: log_prob": derived.logprob_rule(config, "ref"),
        f"{R}: log_prob": derived.logprob_rule(config, "rollout"),
        "critic: ppo": derived.critic_rule(config),
    }
    by_rollouts, by_tokens = "its passes are cut by rollouts", "its passes are cut by tokens (use_dynamic_bsz=true)"
    passes, ranks = (update, *own.values()), machine.world_size(config)
    rules = [
        (
            all(rule.max_tokens != most * rule.sequence_ranks for rule in passes),
            f"{A}: ppo_max_token_len_per_gpu",
            "micro-batches are cut by rollouts",
        ),
        (all(rule.max_rollouts is None for rule in passes), f"{A}: ppo_micro_batch_size_per_gpu", by_tokens),
    ]
    for key, rule in own.items():
        rules.append((rule.max_tokens is None, f"{key}_max_token_len_per_gpu", by_rollouts))
        rules.append((rule.max_tokens is not None, f"{key}_micro_batch_size_per_gpu", by_tokens))
    rules.append((machine.device == "cpu", _OFFLOADS, "it is for GPUs"))
    for key in (f"{A}.fsdp_config", f"{REF}.fsdp_config", "critic.fsdp"):
        moved = "param_offload" if key.startswith(REF) else "param_offload optimizer_offload"
        keeps = f"{key}.offload_policy=true keeps everything in host memory all the time"
        rules.append((value_of(config, key).offload_policy, f"{key}: {moved}", keeps))
        is_larger = value_of(config, key).fsdp_size > ranks
        rules.append(
            (is_larger, f"{key}: fsdp_size", f"there are {ranks} ranks, and a larger group is all of them, as in verl")
        )
    return rules


def _of_run(config: Config, machine: Machine) -> list[Rule]:
    """Checkpoints, recovery, profiles and Ray."""
    trainer, profiler, profilers = config.trainer, config.global_profiler, profilers_of(config)
    is_local = config.ray_kwargs.ray_init.address is None and not machine.cluster
    of_cluster = f"needs {RAY}.address; a local cluster has one node, and asks for a token"
    return [
        (
            trainer.save_freq <= 0,
            f"{A}: checkpoint.*; trainer: on_save_error max_actor_ckpt_to_keep",
            "needs trainer.save_freq",
        ),
        (trainer.metrics_port is None, "trainer: metrics_host", "needs trainer.metrics_port"),
        (trainer.resume_mode != "resume_path", "trainer: resume_from_path", "needs trainer.resume_mode=resume_path"),
        (trainer.val_only, "trainer: stop_on", "nothing is trained with trainer.val_only=true"),
        (
            trainer.recover == "off",
            "trainer: max_restarts restart_window_s",
            "needs trainer.recover=auto: ranks are started again",
        ),
        (trainer.on_nonfinite != "skip", "trainer: max_nonfinite_steps", "needs trainer.on_nonfinite=skip"),
        (
            not {"wandb", "mlflow"} & set(trainer.logger),
            "trainer: log_val_generations",
            "neither wandb nor mlflow is among trainer.logger",
        ),
        (profiler.tool is None, "global_profiler: steps", "needs global_profiler.tool"),
        (
            profiler.tool == "torch" and profiler.steps is None,
            "global_profiler: tool",
            "no step is named in global_profiler.steps",
        ),
        (
            profiler.tool != "torch_memory",
            "global_profiler: global_tool_config.*",
            "needs global_profiler.tool=torch_memory",
        ),
        (
            not any(own.enable for own in profilers.values()),
            "global_profiler: tool",
            f"no role is profiled: {A}.profiler.enable=true",
        ),
        *((not own.enable, f"{key}: all_ranks ranks", f"needs {key}.enable=true") for key, own in profilers.items()),
        *((own.all_ranks, f"{key}: ranks", f"{key}.all_ranks=true names all of them") for key, own in profilers.items()),
        *((profiler.tool is None, f"{key}: enable", "needs global_profiler.tool") for key in profilers),
        (not is_local, f"{RAY}: num_cpus object_store_memory", "it is for a local cluster"),
        (is_local, f"{RAY}: wait_for_nodes_s allow_insecure", of_cluster),
    ]


def has_tools(config: Config) -> bool:
    """Return whether turns may call tools."""
    own = config.actor_rollout_ref.rollout.multi_turn
    return bool(own.tools) or own.tool_config_path is not None


def profilers_of(config: Config) -> dict[str, ProfilerConfig]:
    """Return the profilers of all roles that have one, by their key."""
    return {key: value_of(config, key) for key in (f"{A}.profiler", f"{REF}.profiler", "critic.profiler")}


@cache
def _keys(text: str) -> frozenset[str]:
    """Return the keys of the schema that a rule names."""
    names = [f"{group}.{name}" for part in text.split("; ") for group, rest in [part.split(": ")] for name in rest.split()]
    starts = tuple(name[:-1] for name in names if name.endswith("*"))
    return frozenset(key for key in leaves() if key in names or key.startswith(starts))


def _set_and_unread(config: Config, rules: Iterable[Rule]) -> dict[str, str]:
    """Return the keys that were set to something other than their default and that nothing reads, with the reason."""
    were_set = [key for key, leaf in leaves().items() if value_of(config, key) != leaf.default]
    found: dict[str, str] = {}
    for _, keys, why in filter(lambda rule: rule[0], rules):
        found |= {key: why for key in were_set if key not in found and key in _keys(keys)}
    return found


def _given(config: Config, key: str) -> str:
    return f"{key}={show(value_of(config, key))}"


def _replaced(root: Any, key: str, value: Any) -> Any:
    head, _, rest = key.partition(".")
    return dataclasses.replace(root, **{head: _replaced(getattr(root, head), rest, value) if rest else value})
