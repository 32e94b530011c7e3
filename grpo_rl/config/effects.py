"""The one mechanism against settings that do nothing: which keys a run does not read, and what each of them needs.

`NEEDS` says it of most keys in one line each; what follows from several keys together is in the rules below it. `as_read` is the
configuration without the keys that nothing reads, and the plan is made of it: no process can see what is said to have no
effect. A key that was set and that `as_read` has not kept is refused; one that bears on speed, memory, processes or logs only
is noted in the plan, for people set these by habit (verl's commands give sizes to passes that do not exist).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache

from grpo_rl.config import derived
from grpo_rl.config.convert import show
from grpo_rl.config.derived import REWARD_MODEL, Machine
from grpo_rl.config.function_options import WITHOUT_DUAL_CLIP
from grpo_rl.config.schema.fields import leaves, replaced, value_of
from grpo_rl.config.schema.tree import Config

A, R, REF, M = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "ref", "model"))
TURNS, SCORER, JUDGE, RAY = f"{R}.multi_turn", "reward.reward_model", "reward.judge", "ray_kwargs.ray_init"
OVERLONG, DISTANCE = "reward.overlong_buffer", "distillation.distillation_loss"

Rule = tuple[bool, str, str]
"""Where it is true, these keys have no effect, for this reason. Keys are written `GROUP: NAME NAME; GROUP: NAME`; a name that
ends in a star stands for all that begin so."""

_ANSWERS = "data: response_key messages_key tools_key enable_thinking_key"
_PAIRS = "data: chosen_key rejected_key"
_SOURCE = "data: reward_fn_key data_source ground_truth_key extra_info_key"
_LENGTHS = "data: max_prompt_length max_response_length"
_OF_RUNS = "data: retire_*; trainer: save_rollouts log_token_groups"
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
    f"free_cache_engine enforce_eager use_torch_compile separate_process enable_prefix_caching cpu_threads engine_kwargs; {A}: "
    f"ppo_micro_batch_size_per_gpu clip_ratio_c fsdp_config.fsdp_size; critic: model.* ppo_micro_batch_size_per_gpu "
    f"fsdp.fsdp_size; {RAY}: num_cpus "
    "object_store_memory; trainer: val_before_train log_val_generations; reward: overlong_buffer.* audit audit_share; "
    f"global_profiler: tool save_path; trainer: total_epochs; "
    f"{_OFFLOADS}"
)
"""Keys that are set by habit, and change nothing that is learned where another key has switched them off in plain sight."""

NEEDS = f"""
data: seed train_weights                 | data.shuffle=true
data: train_weights                      | data.responses=policy or rows | what the initial policy sampled is one file
data: retire_metric retire_score         | data.retire_above
data: reward_fn_key                      | data.data_source=null | data.data_source gives it for all rows
data: allow_change                       | trainer.resume_mode=auto or resume_path | with trainer.resume_mode=disable nothing is resumed
data: val_max_samples                    | data.val_files
data: gen_batch_size                     | algorithm.filter_groups.enable or data.responses=initial_policy
data: gen_batch_size                     | algorithm.filter_groups.refill or data.responses=initial_policy
{M}: lora_alpha target_modules exclude_modules lora_adapter_path; {R}: lora_sync | {M}.lora_rank above 0
{M}: enable_activation_offload           | {M}.enable_gradient_checkpointing=true or null
critic.model: enable_activation_offload  | critic.model.enable_gradient_checkpointing=true
{A}: kl_loss_type kl_loss_options        | {A}.use_kl_loss=true
{A}: kl_loss_type kl_loss_options        | {A}.kl_loss_coef above 0
{A}: adaptive_entropy.*                  | {A}.adaptive_entropy.enable=true
{A}: data_loader_seed                    | {A}.shuffle=true
{A}.optim: min_lr_ratio                  | {A}.optim.lr_scheduler_type=linear or cosine
{A}.optim: lr_warmup_steps_ratio         | {A}.optim.lr_warmup_steps=-1
{A}: checkpoint.*; trainer: on_save_error | trainer.save_freq above 0 or trainer.keep_best=true
trainer: max_actor_ckpt_to_keep          | trainer.save_freq above 0 or trainer.save_at_end=true or trainer.keep_best=true
trainer: keep_best                       | trainer.test_freq above 0 | only validations while training are compared
trainer: export_dtype                    | trainer.export_at_end=true
trainer: save_at_end                     | trainer.save_freq=-1
{A}: profiler.all_ranks profiler.ranks   | {A}.profiler.enable=true
{A}: profiler.ranks                      | {A}.profiler.all_ranks=false
{A}: profiler.enable                     | global_profiler.tool
{REF}: profiler.all_ranks profiler.ranks | {REF}.profiler.enable=true
{REF}: profiler.ranks                    | {REF}.profiler.all_ranks=false
{REF}: profiler.enable                   | global_profiler.tool
critic: profiler.all_ranks profiler.ranks | critic.profiler.enable=true
critic: profiler.ranks                   | critic.profiler.all_ranks=false
critic: profiler.enable                  | global_profiler.tool
critic.optim: min_lr_ratio               | critic.optim.lr_scheduler_type=linear or cosine
critic.optim: lr_warmup_steps_ratio      | critic.optim.lr_warmup_steps=-1
algorithm: kl_penalty kl_penalty_options kl_ctrl.type | algorithm.use_kl_in_reward=true
algorithm: kl_ctrl.horizon kl_ctrl.target_kl | algorithm.kl_ctrl.type=adaptive
algorithm: replay.max_success replay.share | algorithm.replay.max_age above 0
algorithm.rollout_correction: rollout_is_threshold rollout_is_batch_normalize | algorithm.rollout_correction.rollout_is
algorithm: rejection.*                   | data.responses=initial_policy
algorithm: filter_groups.*               | algorithm.filter_groups.enable=true
algorithm: filter_groups.max_num_gen_batches | algorithm.filter_groups.refill=true
distillation: *                          | distillation.enabled=true
distillation: n_gpus_per_node            | distillation.nnodes above 0
{DISTANCE}: discount                     | {DISTANCE}.use_policy_gradient=true
{DISTANCE}: jsd_beta                     | {DISTANCE}.loss_mode=jsd
{R}: gpu_memory_utilization free_cache_engine kv_cache_memory_bytes kv_cache_gib enforce_eager use_torch_compile separate_process enable_prefix_caching | {R}.name=vllm
{R}: fp32_lm_head quantization           | {R}.name=vllm
{R}: separate_process                    | {R}.tensor_model_parallel_size=1 | vLLM's workers have processes of their own
{R}: quantization                        | trainer.device=cuda | it needs a GPU of compute capability 8.9 or newer
{R}: hf.*                                | {R}.name=hf
{R}: gpu_memory_utilization free_cache_engine kv_cache_memory_bytes use_torch_compile | trainer.device=cuda | it is for GPUs
{R}: use_torch_compile                   | {R}.enforce_eager=false or null | {R}.enforce_eager=true compiles nothing
{R}: kv_cache_gib cpu_threads            | trainer.device=cpu | it is for CPUs
{R}: free_cache_engine                   | {R}.nnodes=0 | engines have devices of their own, and keep their memory
{R}: n_gpus_per_node                     | {R}.nnodes above 0 | with {R}.nnodes=0 engines share the actor's devices; {R}.nnodes gives them their own
{R}: min_replicas max_replicas           | trainer.recover=auto
{R}: min_replicas max_replicas; trainer: stop_on | trainer.val_only=false
{R}: val_kwargs.temperature val_kwargs.top_p val_kwargs.top_k | {R}.val_kwargs.do_sample=true | validation is greedy without {R}.val_kwargs.do_sample=true
{R}: val_kwargs.temperature val_kwargs.top_p val_kwargs.top_k val_kwargs.do_sample | {R}.val_kwargs.temperature above 0 | validation is greedy at temperature 0
{TURNS}: *                               | {TURNS}.enable=true
{TURNS}: format max_parallel_calls max_tool_response_length tool_response_truncate_side environment.tool_timeout_s | {TURNS}.tools or {TURNS}.tool_config_path
{TURNS}: environment.options             | {TURNS}.environment.name
{TURNS}: turn_discount                   | {TURNS}.environment.reward_weight
{TURNS}: truncation.penalty              | {TURNS}.truncation.turns=punish or {TURNS}.truncation.tokens=punish or {TURNS}.truncation.time=punish
{TURNS}: truncation.turns                | {TURNS}.max_assistant_turns or {TURNS}.max_user_turns
reward.custom_reward_function: name reward_kwargs | reward.custom_reward_function.path
reward: timeout_s num_workers memory_limit_gb function_kwargs batched | reward.functions or reward.audit or reward.custom_reward_function.path
reward: audit_share                      | reward.audit
reward: failure_value                    | reward.on_failure=value
reward: overlong_buffer.*                | {OVERLONG}.len
reward: overlong_buffer.*                | {OVERLONG}.enable=true | {OVERLONG}.enable=false
{SCORER}: nnodes n_gpus_per_node         | {SCORER}.enable_resource_pool=true
{SCORER}: train.center_coef              | {SCORER}.train.loss=bradley_terry
{SCORER}.train.optim: min_lr_ratio       | {SCORER}.train.optim.lr_scheduler_type=linear or cosine
{SCORER}.train.optim: lr_warmup_steps_ratio | {SCORER}.train.optim.lr_warmup_steps=-1
{JUDGE}: *                               | {JUDGE}.base_url
{JUDGE}: rubric_*                        | {JUDGE}.rubric
{JUDGE}: rubric_pass                     | {JUDGE}.rubric_aggregation=all
{JUDGE}: parser                          | {JUDGE}.rubric=null | the marks of {JUDGE}.rubric are read from a JSON object
trainer: iterate.*                       | trainer.schedule=iterate
trainer: iterate.replay_*                | trainer.iterate.reward_model_steps above 0
trainer: iterate.replay_pairs            | trainer.iterate.replay_share above 0
trainer: asynchronous.*                  | trainer.schedule=async
trainer: asynchronous.partial_rollout asynchronous.keep_cache | trainer.asynchronous.max_staleness above 0
trainer: asynchronous.keep_cache         | trainer.asynchronous.partial_rollout=true
trainer: val_before_train test_freq      | data.val_files or data.val_prompt_files | there is nothing to validate on, such as data.val_files
trainer: metrics_host                    | trainer.metrics_port
trainer: resume_from_path                | trainer.resume_mode=resume_path
trainer: total_epochs                    | trainer.total_training_steps=null | trainer.total_training_steps says when it ends
trainer: max_restarts restart_window_s   | trainer.recover=auto
trainer: max_nonfinite_steps             | trainer.on_nonfinite=skip
trainer: log_val_generations             | trainer.logger=wandb or mlflow
global_profiler: steps save_path         | global_profiler.tool
global_profiler: tool                    | global_profiler.steps
global_profiler: tool                    | {A}.profiler.enable or {REF}.profiler.enable or critic.profiler.enable | no role is profiled: {A}.profiler.enable=true
{_OFFLOADS}                              | trainer.device=cuda | it is for GPUs
{A}: fsdp_config.param_offload fsdp_config.optimizer_offload | {A}.fsdp_config.offload_policy=false | {A}.fsdp_config.offload_policy=true keeps everything in host memory all the time
{REF}: fsdp_config.param_offload         | {REF}.fsdp_config.offload_policy=false | {REF}.fsdp_config.offload_policy=true keeps everything in host memory all the time
critic: fsdp.param_offload fsdp.optimizer_offload | critic.fsdp.offload_policy=false | critic.fsdp.offload_policy=true keeps everything in host memory all the time
"""
"""Keys, what they need to be read, and the reason where the need alone does not say it. A need is `KEY=VALUE`, `KEY above 0`, or
`KEY`, which is set and neither false nor 0; with ` or ` between several, of which a VALUE alone is another one of the key before."""


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
    unread_keys = _set_and_unread(config, unread(config, machine))
    run: Config = replaced(config, {key: leaves()[key].default for key in unread_keys})
    return run


def of_keys(config: Config, keys: str, why: str) -> list[str]:
    """Return the refusals of those of the keys that were set, which are known to have no effect for the reason given."""
    found = _set_and_unread(config, [(True, keys, why)])
    return [f"{_given(config, key)}: has no effect in this run: {why}; leave it out" for key in found]


def unread(config: Config, machine: Machine) -> list[Rule]:
    """Return the rules for keys that nothing in this run reads. The first one that holds for a key is the one that is told."""
    own = _of_reward_model(config) if derived.trains_only_reward_model(config) else _of_schedule(config)
    rules = [*own, *_of_learning(config), *_of_sampling_and_rewards(config, machine), *_of_sizes(config, machine)]
    facts = replaced(config, {"trainer.device": machine.device})
    for row in NEEDS.strip().splitlines():
        keys, needed, *why = (part.strip() for part in row.split("|"))
        rules.append((not _is_met(facts, needed), keys, why[0] if why else f"needs {needed}"))
    return rules


def _is_met(config: Config, needed: str) -> bool:
    """Return whether one of the conditions of a need holds."""
    key = ""
    for condition in needed.split(" or "):
        wanted = condition
        if "." in condition:
            key, _, wanted = condition.partition("=")
        name, above, _ = key.partition(" above ")
        value = value_of(config, name)
        if not wanted:
            holds = value > 0 if above else bool(value)
        elif isinstance(value, list):
            holds = wanted in value
        else:
            # A function of the user's own, `file.py:name`, may read whatever it likes.
            holds = wanted == show(value) or (":" in str(value) and wanted != "null")
        if holds:
            return True
    return False


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
    unread_data = f"{_ANSWERS}; {_SOURCE}; {_OF_RUNS}; data: truncation gen_batch_size val_prompt_files"
    unread_here = _keys(f"{unread_data}; trainer: iterate.* asynchronous.* critic_warmup val_only; data: responses")
    names = (key.partition(".") for key in leaves() if key not in read or key in unread_here)
    return "; ".join(f"{group}: {name}" for group, _, name in names)


def _of_schedule(config: Config) -> list[Rule]:
    """What is trained on, and when it is sampled."""
    loss, data = config.actor_rollout_ref.actor.policy_loss.loss_mode, config.data
    offline, collects, pairs = derived.is_offline(config), derived.collects(config), derived.trains_pairs(config)
    of_training = (not derived.trains_reward_model(config), f"{SCORER}: train.*", f"it is of trainer.schedule={REWARD_MODEL}")
    if not offline and ":" in config.trainer.schedule:
        return [of_training]
    of_rows = f"{_ANSWERS}; {_PAIRS}; data: val_prompt_files max_length"
    fixed = "samples before training" if collects else "trains on the answers in the data"
    fixed = f"data.responses={data.responses} {fixed}"
    of_updates = f"{A}: kl_loss_* ppo_epochs shuffle data_loader_seed; {R}: log_prob_*"
    of_policy = f"{_CRITIC}; {REF}: *; {of_updates}; {_OF_RUNS}; {_ADVANTAGES}; algorithm: filter_groups.* replay.*; trainer: schedule val_only"
    of_samples = f"{R}: n temperature top_p top_k min_p ignore_eos; data: gen_batch_size"
    mini = config.actor_rollout_ref.actor.ppo_mini_batch_size
    registered, silent = offline and ":" not in loss, offline and not collects and not derived.samples_answers(config)
    return [
        of_training,
        (not offline, of_rows, "it is of data.responses=rows and initial_policy"),
        (
            pairs and collects,
            "algorithm: rejection.*",
            f"loss_mode={loss} compares the best with the worst response, however good",
        ),
        (offline, of_policy, fixed),
        (offline and not collects, of_samples, fixed),
        (offline and mini != data.train_batch_size, f"{A}: ppo_mini_batch_size", f"{fixed}, one optimizer step on each batch"),
        (loss in derived.LABEL_LOSSES, _PAIRS, f"loss_mode={loss} reads the columns completion and label"),
        (registered and pairs, _ANSWERS, f"loss_mode={loss} reads rows with pairs"),
        (registered and not pairs, _PAIRS, f"loss_mode={loss} reads rows with answers to learn"),
        (silent, f"{R}: *; reward: *; {_SOURCE}", "needs data.val_prompt_files: nothing else is sampled and scored"),
        (silent and data.max_length is not None, _LENGTHS, "data.max_length is the longest row"),
    ]


def _of_learning(config: Config) -> list[Rule]:
    """Teachers and what they take the place of, advantages, loss, KL and groups."""
    actor, algorithm, teacher = config.actor_rollout_ref.actor, config.algorithm, config.distillation.distillation_loss
    loss, groups, pairs = actor.policy_loss.loss_mode, algorithm.filter_groups, derived.trains_pairs(config)
    alone = derived.learns_from_teachers_alone(config)
    samples_alone, why = (
        alone and not derived.is_offline(config),
        f"{DISTANCE}.use_task_rewards=false learns from teachers alone",
    )
    of_rewards = "algorithm: adv_* norm_adv_by_std_in_grpo gamma lam reward_parts use_kl_in_reward kl_*"
    no_critic = not pairs and not derived.may_have_critic(config)
    of_critic = _CRITIC.replace("*", "model.* optim.* fsdp.* profiler.* ppo_* use_dynamic_bsz ulysses_* cliprange_value")
    of_critic += "" if config.critic.enable is False else "; critic: enable"
    return [
        (alone, f"{DISTANCE}: distillation_loss_coef", why),
        (samples_alone, f"{of_rewards}; {_CRITIC}", why),
        (samples_alone and not teacher.use_policy_gradient, f"{A}: clip_ratio clip_ratio_* policy_loss.*", why),
        (
            teacher.loss_mode in ESTIMATES,
            f"{DISTANCE}: topk",
            f"loss_mode={teacher.loss_mode} looks at the sampled token alone",
        ),
        (pairs, f"{_ADVANTAGES}; {_CRITIC}; algorithm: replay.*", f"loss_mode={loss} compares pairs and reads no advantages"),
        (
            groups.enable and groups.refill and derived.overlaps(config),
            "algorithm: replay.*",
            f"algorithm.filter_groups.refill=true fills a batch of trainer.schedule={config.trainer.schedule} with new groups",
        ),
        (pairs, f"{A}: kl_loss_*", f"loss_mode={loss} has the reference in it and no KL term"),
        (no_critic, of_critic, f"algorithm.adv_estimator={algorithm.adv_estimator} needs no critic"),
        # A weight of 0 switches off what is off.
        (not actor.use_kl_loss and actor.kl_loss_coef > 0, f"{A}: kl_loss_coef", f"needs {A}.use_kl_loss=true"),
        (
            not algorithm.use_kl_in_reward and algorithm.kl_ctrl.kl_coef > 0,
            "algorithm: kl_ctrl.kl_coef",
            "needs algorithm.use_kl_in_reward=true",
        ),
        (
            actor.clip_ratio_low is not None and actor.clip_ratio_high is not None,
            f"{A}: clip_ratio",
            f"{A}.clip_ratio_low and clip_ratio_high are both there",
        ),
        (loss in WITHOUT_DUAL_CLIP, f"{A}: clip_ratio_c", f"the loss {loss} clips no second time"),
    ]


def _of_sampling_and_rewards(config: Config, machine: Machine) -> list[Rule]:
    """The engine, validation by sampling, what scores responses, and Ray."""
    rollout, reward, engine = config.actor_rollout_ref.rollout, config.reward, config.actor_rollout_ref.rollout.name
    is_float32 = rollout.dtype == "float32" or (rollout.dtype == "auto" and machine.device == "cpu")
    prompts = "val_prompt_files" if derived.is_offline(config) else "val_files"
    # Without `judge` among the audits a judge would become a part of the reward.
    audits = "judge" in reward.audit or not (config.trainer.val_only or derived.is_offline(config))
    scores = reward.reward_model.enable or derived.trains_only_reward_model(config)
    by_model = derived.is_iterated(config) or derived.scores_steps_by_model(config)
    on_gpus = config.actor_rollout_ref.model.lm_head_precision in ("tf32", "bfloat16")
    is_local = config.ray_kwargs.ray_init.address is None and not machine.cluster
    of_cluster = f"needs {RAY}.address; a local cluster has one node"
    return [
        (on_gpus and machine.device == "cpu", f"{M}: lm_head_precision", "it is faster on GPUs only, and this run has none"),
        (is_float32, f"{R}: fp32_lm_head", "everything in the engine is float32"),
        (engine not in rollout.engine_kwargs, f"{R}: engine_kwargs", f"it names engines other than {R}.name={engine}"),
        (not getattr(config.data, prompts), f"{R}: val_kwargs.*", f"needs data.{prompts}: only validation reads it"),
        (not audits, "reward: audit audit_share", "no policy is trained on responses that it samples"),
        ("judge" in reward.audit, f"{JUDGE}: weight", "the judge is in reward.audit, and no part of the reward"),
        (not scores, f"{SCORER}: *", f"needs {SCORER}.enable=true"),
        (by_model and reward.judge.base_url is not None, f"{JUDGE}: *", "the reward is the reward model's score alone"),
        (not is_local, f"{RAY}: num_cpus object_store_memory", "it is for a local cluster"),
        (is_local, f"{RAY}: wait_for_nodes_s", of_cluster),
    ]


def _of_sizes(config: Config, machine: Machine) -> list[Rule]:
    """Passes that are cut otherwise, groups of more ranks than there are (verl's commands say 8 wherever they run)."""
    update, most = derived.pass_rule(config, "actor"), config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu
    own = {
        f"{REF}: log_prob": derived.pass_rule(config, "ref"),
        f"{R}: log_prob": derived.pass_rule(config, "old"),
        "critic: ppo": derived.pass_rule(config, "critic"),
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
    for key in (f"{A}.fsdp_config", f"{REF}.fsdp_config", "critic.fsdp"):
        is_larger, why = (
            value_of(config, key).fsdp_size > ranks,
            f"there are {ranks} ranks, and a larger group is all of them, as in verl",
        )
        rules.append((is_larger, f"{key}: fsdp_size", why))
    return rules


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
