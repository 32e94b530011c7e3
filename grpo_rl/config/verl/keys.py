"""The keys of verl that are not in the schema, each with the values that are right here or what to use instead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a key: the values that are right here, and the reason or replacement for all others."""

    advice: str
    accepts: tuple[Any, ...] = ()
    hint: bool = False
    """The key bears on speed, memory, logs or processes and never on what is learned: other values are taken with a note."""


def _hint(advice: str, *accepts: Any) -> Answer:
    """Return the answer to a key that changes nothing that is learned."""
    return Answer(advice, accepts, hint=True)


def _switch(group: str, advice: str, name: str = "enable", *, hint: bool = False) -> dict[str, Answer]:
    """Return the answers for a group of keys that may be switched off, and no more; with `hint` it may be on, too."""
    return {group: Answer(advice, hint=hint), f"{group}.{name}": Answer(advice, (False,), hint)}


_A, _R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_M, _REF = "actor_rollout_ref.model", "actor_rollout_ref.ref"

_ANY_BOOL = (True, False)
_LORA_OF = f"LoRA is {_M}.lora_rank, lora_alpha, target_modules and exclude_modules"
_NO_LORA = "the critic is trained whole, without LoRA"
_NO_QLORA = "LoRA over quantized weights (QLoRA) is not here; the base model is read in float32"
_MODEL_REWARD = "use reward.reward_model"
_SCORES_DIRECTLY = "the reward model computes its scores in a worker set of its own, without a server"
_TURNS = "actor_rollout_ref.rollout.multi_turn"
_ENVIRONMENT = f"use {_TURNS}.environment.name, with its options"
_OWN_LOOP = (
    f"what a loop of your own does between turns is written as an environment, {_TURNS}.environment.name=file.py:Class; a loop that asks "
    f"a server itself runs with environment.name=endpoint (docs/agents.md)"
)
_NO_IMAGES = "prompts are text only"
_PROFILERS = "the tools are torch (traces) and torch_memory (histories of a GPU's memory), with torch's defaults"
_NO_QUANTIZATION = "training is not quantized; engines are by actor_rollout_ref.rollout.quantization=fp8"
_ONE_SCHEDULE = "schedules are chosen by trainer.schedule: sync, one_step_off, async"
_PACKED = "sequences are always packed without padding"
_HEAD = "the LM head always runs in chunks, only where a token is trained, so full logits never exist"
_FUSED = "fused kernels are torch's own, torch.nn.functional.linear_cross_entropy"
_SANDBOX = (
    "the reward `code` takes reward.function_kwargs={code: {sandbox_url: ..., max_concurrent: ..., memory_mb: ...}}, or, without "
    "sandbox_url, runs programs in a sandbox of its own"
)
_WORKERS_OF_REWARDS = "rewards are functions in reward.functions, run by reward.num_workers processes; one that takes lists (verl's batch) is named in reward.batched"
_REPLAY_FILES = "the experts of a pass stay in memory until the update, and go to no file"
_OWN_ROUTING = "only the actor's experts are taken again: actor_rollout_ref.actor.router_replay.mode"
_FSDP_ONLY = "the actor runs FSDP2; this belongs to another backend"

# Keys that only some part of FSDP takes, under the actor as under the reference.
_FSDP: dict[str, Answer] = {
    "model_dtype": Answer("master weights are always float32; the compute type is fsdp_config.dtype", ("fp32", "float32")),
    "mixed_precision": Answer("use fsdp_config.dtype (float32 master weights and gradients are fixed)"),
    "use_orig_params": _hint("FSDP2 always keeps the original parameters", *_ANY_BOOL),
    "wrap_policy": _hint("each decoder layer is one unit of sharding; leave it out"),
    "wrap_policy.min_num_params": _hint("each decoder layer is one unit of sharding", 0),
    "grad_offload": _hint("gradients live only during the update; use fsdp_config.optimizer_offload", False),
    "seed": Answer("use trainer.seed"),
    "full_determinism": Answer("use trainer.deterministic", (False,)),
    "strategy": Answer("use actor_rollout_ref.actor.strategy", ("fsdp", "fsdp2")),
    "forward_only": _hint("the reference is never trained, the actor always is"),
    "ulysses_sequence_parallel_size": Answer("use actor.ulysses_sequence_parallel_size, or ref's, or the critic's", (1,)),
    "entropy_from_logits_with_chunking": _hint(_HEAD, *_ANY_BOOL),
    "entropy_from_logits_chunk_size": _hint(_HEAD),
    "entropy_checkpointing": _hint(_HEAD, *_ANY_BOOL),
    "use_no_sync_for_gradient_accumulation": _hint("gradients are reduced once per optimizer step where that pays", *_ANY_BOOL),
    "pad_to_length": _hint(_PACKED, False),
    "pad_to_length_bucket": _hint(_PACKED),
    **_switch("qat", _NO_QUANTIZATION),
    "turbo_config": Answer(_FSDP_ONLY),
}

_REFERENCE_FSDP: dict[str, Answer] = {
    "reshard_after_forward": _hint("the reference frees every layer after its forward pass", True),
    "optimizer_offload": _hint("the reference has no optimizer", False),
}

# Keys that the actor and the reference share.
_BOTH: dict[str, Answer] = {
    "rollout_n": Answer("use actor_rollout_ref.rollout.n"),
    "use_torch_compile": _hint("use fsdp_config.use_torch_compile; the head is not compiled", False),
    "use_remove_padding": _hint(_PACKED, True),
    "pad_to_length": _hint(_PACKED, False),
    "entropy_from_logits_with_chunking": _hint(_HEAD, *_ANY_BOOL),
    "entropy_from_logits_chunk_size": _hint(_HEAD),
    "entropy_checkpointing": _hint(_HEAD, *_ANY_BOOL),
    "profiler.tool": _hint("use global_profiler.tool"),
    "profiler.save_path": _hint("use global_profiler.save_path"),
    "profiler.tool_config": _hint(
        "a trace has CPU, GPU, memory and shapes; a history of memory is global_profiler.global_tool_config"
    ),
    "megatron": Answer(_FSDP_ONLY),
    "veomni": Answer(_FSDP_ONLY),
    "torchtitan": Answer(_FSDP_ONLY),
    "router_replay.record_file": Answer(_REPLAY_FILES),
    "router_replay.replay_file": Answer(_REPLAY_FILES),
}

_ACTOR: dict[str, Answer] = {
    "ppo_micro_batch_size": Answer(f"use {_A}.ppo_micro_batch_size_per_gpu, which counts rollouts on one rank"),
    "grad_clip": Answer(f"use {_A}.optim.clip_grad; verl reads grad_clip nowhere"),
    "tau_pos": Answer(f"use {_A}.policy_loss.tau_pos"),
    "tau_neg": Answer(f"use {_A}.policy_loss.tau_neg"),
    "freeze_vision_tower": _hint(_NO_IMAGES, False),
    "calculate_entropy": _hint("the entropy is computed where entropy_coeff is not 0", False),
    "calculate_sum_pi_squared": Answer("no estimator here reads it", (False,)),
    "use_rollout_log_probs": Answer("use algorithm.rollout_correction.bypass_mode", (False,)),
    "use_fused_kernels": Answer(f"use {_M}.use_fused_kernels"),
    **_switch("qat", _NO_QUANTIZATION),
    "checkpoint.load_contents": Answer("resuming loads all that save_contents has saved; leave it out"),
    "checkpoint.strict": Answer("a checkpoint is always loaded strictly", (True,)),
    "optim.optimizer": Answer("the optimizer is AdamW", ("AdamW", "adamw")),
    "optim.optimizer_impl": _hint("the optimizer is torch's AdamW", "torch.optim"),
    "optim.total_training_steps": Answer("optimizer steps are counted from trainer.total_training_steps", (-1,)),
    "optim.num_cycles": Answer("cosine is half a period", (0.5,)),
    "optim.zero_indexed_step": Answer("the first optimizer step is step 1 of the warm-up"),
    "optim.warmup_style": Answer(f"use {_A}.optim.lr_scheduler_type"),
    "optim.override_optimizer_config": Answer("AdamW's settings are optim.lr, betas, eps and weight_decay"),
}

_REFERENCE: dict[str, Answer] = {
    "router_replay.mode": Answer(_OWN_ROUTING, ("disabled",)),
    "strategy": Answer(f"as {_A}.strategy: FSDP2", ("fsdp", "fsdp2")),
    "log_prob_micro_batch_size": Answer(f"use {_REF}.log_prob_micro_batch_size_per_gpu, which counts rollouts on one rank"),
    "model": Answer(f"the reference is the policy before training: {_M}.path"),
}

_ROLLOUT: dict[str, Answer] = {
    "mode": _hint("requests always go to the replicas one by one, by load", "async"),
    "do_sample": Answer("training needs samples; greedy is for val_kwargs", (True,)),
    "full_determinism": Answer(
        "use trainer.deterministic; every response has its own seed, derived from rollout.seed", (False,)
    ),
    "prompt_length": Answer("use data.max_prompt_length"),
    "response_length": Answer("use data.max_response_length"),
    "cudagraph_capture_sizes": _hint(f"use +{_R}.engine_kwargs.vllm.cudagraph_capture_sizes"),
    "data_parallel_size": Answer(f"an engine is one replica; their number is {_R}.num_replicas", (1,)),
    "expert_parallel_size": Answer("experts are not spread over devices", (1,)),
    "pipeline_model_parallel_size": Answer("an engine is split by tensor_model_parallel_size only", (1,)),
    "enable_chunked_prefill": _hint("the engine always reads prompts in parts where one pass is too small for them", True),
    "logprobs_mode": Answer("log-probs are taken after temperature, as the trainer's are", ("processed_logprobs",)),
    "scheduling_policy": _hint("first come, first served", "fcfs"),
    "load_format": _hint(
        "engines get the actor's weights before the first response", "dummy", "dummy_dtensor", "auto", "safetensors"
    ),
    "layered_summon": _hint("weights travel in buckets: checkpoint_engine.update_weights_bucket_megabytes", False),
    "log_prob_micro_batch_size": Answer(f"use {_R}.log_prob_micro_batch_size_per_gpu, which counts rollouts on one rank"),
    "disable_log_stats": _hint("the engine's log goes to a file of the run", True),
    "over_sample_rate": Answer("exactly n responses per prompt are sampled", (0,)),
    "multi_stage_wake_up": _hint("the engine decides how it wakes up", *_ANY_BOOL),
    "router_config_path": _hint("requests go to the replica with the least work"),
    "multi_turn.function_tool_path": Answer(f"use {_TURNS}.tools or tool_config_path"),
    "multi_turn.use_inference_chat_template": _hint("turns stay as they were sampled, whatever the template drops", *_ANY_BOOL),
    "multi_turn.tokenization_sanity_check_mode": _hint(
        "turns are never tokenized again; the template is checked once, at the start", "strict", "ignore_strippable", "disable"
    ),
    "update_weights_bucket_megabytes": Answer(f"use {_R}.checkpoint_engine.update_weights_bucket_megabytes"),
    "multi_turn.num_repeat_rollouts": Answer("use actor_rollout_ref.rollout.n"),
    "calculate_log_probs": _hint("the engine's log-probs are always compared with the trainer's", True),
    "agent": Answer(f"there are no agent loops; episodes of several turns are {_TURNS}"),
    "agent.num_workers": _hint("the controller sends requests to the replicas itself"),
    "agent.default_agent_loop": Answer(
        f"single responses, or, with {_TURNS}.enable=true, episodes with tools and an environment; {_OWN_LOOP}",
        ("single_turn_agent", "tool_agent"),
    ),
    "agent.agent_loop_config_path": Answer(_OWN_LOOP),
    "agent.custom_async_server.path": Answer(
        "requests go to the engines of rollout.name; an engine of your own is rollout.name=file.py:Class"
    ),
    "agent.custom_async_server.name": Answer("an engine of your own is rollout.name=file.py:Class"),
    "checkpoint_engine.engine_kwargs": Answer("the ways weights can travel are the values of checkpoint_engine.backend"),
    "checkpoint_engine.custom_backend_module": Answer(
        "the ways weights can travel are the values of checkpoint_engine.backend"
    ),
    "trace": _hint("every response is in <run>/rollouts, see trainer.save_rollouts"),
    "skip_tokenizer_init": _hint("engines take and return token ids", True),
    "enable_rollout_routing_replay": Answer(
        "engines do not report experts; actor_rollout_ref.actor.router_replay.mode=R2 replays those of the trainer", (False,)
    ),
    "moe_load_balance_metrics_interval": _hint("the trainer's metrics actor/router/* are there in every step", 0),
    **_switch("profiler", "engines are not traced: use vLLM's own profiler, or the run's timeline", hint=True),
    **_switch("prometheus", "metrics go to the sinks of trainer.logger", hint=True),
    "quantization_config_file": Answer(_NO_QUANTIZATION),
    **_switch("mtp", "there is no speculative decoding"),
    **_switch("qat", _NO_QUANTIZATION),
    **_switch("disaggregation", "prefill and decoding run in the same engine", "enabled"),
}

_MODEL: dict[str, Answer] = {
    "enable_activation_offloading": Answer(f"use {_M}.enable_activation_offload; verl reads this one nowhere"),
    "hf_config_path": Answer(f"the config lies in {_M}.path; change it with {_M}.override_config"),
    "use_shm": _hint("the model is read where it lies", False),
    "custom_chat_template": Answer("use data.chat_template"),
    "external_lib": Answer("install the library; a model's own code runs with trust_remote_code=true"),
    "use_remove_padding": _hint(_PACKED, True),
    "use_liger": _hint("there are no Liger kernels", False),
    "fused_kernel_options": _hint(_FUSED),
    "fused_kernel_options.impl_backend": _hint(_FUSED, "torch"),
    "lora": Answer(_LORA_OF),
    "lora.rank": Answer(f"use {_M}.lora_rank", (0,)),
    "load_in_4bit": Answer(_NO_QLORA, (False,)),
    "load_in_8bit": Answer(_NO_QLORA, (False,)),
    "quantization_config": Answer(_NO_QLORA),
    "use_qlora": Answer(_NO_QLORA, (False,)),
    **_switch("tiled_mlp", "the MLP is not cut into tiles; lower ppo_max_token_len_per_gpu", "enabled", hint=True),
    **_switch("mtp", "there is no speculative decoding"),
}

_CRITIC_MODEL: dict[str, Answer] = {
    **_MODEL,
    "lora_rank": Answer(_NO_LORA, (0,)),
    **{name: Answer(_NO_LORA) for name in ("lora_alpha", "lora", "lora_adapter_path", "target_modules", "exclude_modules")},
    "lora.rank": Answer(_NO_LORA, (0,)),
}

_DATA: dict[str, Answer] = {
    "tokenizer": Answer(f"use {_M}.tokenizer_path"),
    "use_shm": _hint("files are read where they lie", False),
    "val_batch_size": _hint("all validation prompts go to the engines at once; leave it out"),
    "tool_config_path": Answer(f"use {_TURNS}.tool_config_path"),
    "function_tool_path": Answer(f"use {_TURNS}.tools or tool_config_path"),
    "return_raw_input_ids": _hint("rollouts always hold token ids and text", *_ANY_BOOL),
    "return_raw_chat": _hint("rollouts always hold token ids and text", *_ANY_BOOL),
    "return_full_prompt": _hint("rollouts always hold token ids and text", *_ANY_BOOL),
    "return_multi_modal_inputs": _hint(_NO_IMAGES, *_ANY_BOOL),
    "dataloader_num_workers": _hint("rows are tokenized by the controller; leave it out"),
    "filter_overlong_prompts_workers": _hint("rows are tokenized by the controller; leave it out"),
    "image_key": Answer(_NO_IMAGES),
    "video_key": Answer(_NO_IMAGES),
    "audio_key": Answer(_NO_IMAGES),
    "image_patch_size": Answer(_NO_IMAGES),
    "mm_processor_kwargs": Answer(_NO_IMAGES),
    "validation_shuffle": _hint("validation rows keep their order", False),
    "trust_remote_code": Answer(f"use {_M}.trust_remote_code", (False,)),
    "sampler": Answer("the order is data.shuffle and data.seed, data.curriculum, data.train_weights"),
    "datagen": Answer("generated data are tasks: data.train_files=task:NAME"),
}

_ALGORITHM: dict[str, Answer] = {
    "rollout_correction.loss_type": Answer(
        f"the loss is {_A}.policy_loss.loss_mode, with bypass_mode as without", ("ppo_clip",)
    ),
    "filter_groups.max_inflight_gen_batches": Answer("one batch of prompts is sampled after the other", (1,)),
    "use_pf_ppo": Answer("there is no preference-feedback reweighting", (False,)),
    "pf_ppo": Answer("there is no preference-feedback reweighting"),
}

_AS_UPDATE = "values are computed in the micro-batches of the critic's update"
_OF_ACTOR = "the critic's model is loaded as the actor's: set it in actor_rollout_ref.model"

_CRITIC: dict[str, Answer] = {
    "router_replay.mode": Answer(_OWN_ROUTING, ("disabled",)),
    "strategy": Answer("as actor_rollout_ref.actor.strategy: FSDP2", ("fsdp", "fsdp2")),
    "ppo_micro_batch_size": Answer("use critic.ppo_micro_batch_size_per_gpu, which counts rollouts on one rank"),
    "forward_micro_batch_size": _hint(_AS_UPDATE),
    "forward_micro_batch_size_per_gpu": _hint(f"{_AS_UPDATE}: critic.ppo_micro_batch_size_per_gpu"),
    "forward_max_token_len_per_gpu": _hint(f"{_AS_UPDATE}: critic.ppo_max_token_len_per_gpu"),
    "shuffle": Answer("the critic's mini-batches keep the order of the prompts", (False,)),
    "data_loader_seed": Answer("the critic's mini-batches keep the order of the prompts"),
    "loss_agg_mode": Answer("the value loss is averaged over all trained tokens", ("token-mean",)),
    "loss_scale_factor": Answer("the value loss is averaged over all trained tokens"),
    "grad_clip": Answer("use critic.optim.clip_grad; verl reads grad_clip nowhere"),
    "checkpoint.save_contents": Answer("the critic is saved with the actor, as a whole"),
    "optim.warmup_style": Answer("use critic.optim.lr_scheduler_type"),
    "model.fsdp_config": Answer("use critic.fsdp"),
    "model.tokenizer_path": Answer("the critic reads the actor's tokens: actor_rollout_ref.model.tokenizer_path"),
    "model.override_config": Answer(_OF_ACTOR),
    "model.trust_remote_code": Answer(_OF_ACTOR, (False,)),
}

_REWARD: dict[str, Answer] = {
    "reward_manager": Answer(_WORKERS_OF_REWARDS),
    "reward_manager.name": Answer(_WORKERS_OF_REWARDS, ("naive", "remote")),
    "reward_manager.source": Answer(_WORKERS_OF_REWARDS, ("register",)),
    "reward_model.rollout": Answer(_SCORES_DIRECTLY),
    "reward_kwargs": Answer("use reward.custom_reward_function.reward_kwargs, and reward.overlong_buffer"),
    "sandbox_fusion": Answer(_SANDBOX),
}

_TRAINER: dict[str, Answer] = {
    "balance_batch": _hint("rollouts are always dealt to the ranks by their tokens", True),
    "rollout_data_dir": _hint("every response is in <run>/rollouts, see trainer.save_rollouts"),
    "validation_data_dir": _hint("every response is in <run>/rollouts, see trainer.save_rollouts"),
    "esi_redundant_time": _hint("there is no saving ahead of a machine's end; use trainer.save_freq", 0),
    "checkpoint_callback_class": Answer("there are no callbacks; checkpoints are folders, see trainer.save_freq"),
    "default_hdfs_dir": Answer("checkpoints go to trainer.default_local_dir"),
    "del_local_ckpt_after_load": _hint("checkpoints are removed by trainer.max_actor_ckpt_to_keep", False),
    "remove_previous_ckpt_in_save": _hint("use trainer.max_actor_ckpt_to_keep", False),
    "max_critic_ckpt_to_keep": _hint("a checkpoint holds actor and critic: use trainer.max_actor_ckpt_to_keep"),
    "ray_wait_register_center_timeout": _hint("use trainer.start_timeout_s"),
    "use_v1": _hint(_ONE_SCHEDULE, *_ANY_BOOL),
    "use_legacy_worker_impl": _hint(_ONE_SCHEDULE),
    "v1": Answer(_ONE_SCHEDULE),
    "v1.trainer_mode": Answer(_ONE_SCHEDULE, ("sync",)),
    "profile_steps": _hint("use global_profiler.steps"),
}

_ENGINES_APART = "engines have devices of their own where actor_rollout_ref.rollout.nnodes and n_gpus_per_node say how many"
_ASYNC: dict[str, Answer] = {
    "async_training": Answer("use trainer.schedule=async with trainer.asynchronous.*, or trainer.schedule=one_step_off"),
    "async_training.staleness_threshold": Answer(
        "use trainer.schedule=async with trainer.asynchronous.max_staleness, in versions (training steps) of every token: 0 for 0, "
        "1 for shares up to 1"
    ),
    "async_training.trigger_parameter_sync_step": Answer("use trainer.asynchronous.sync_every, in training steps"),
    "async_training.require_batches": Answer("a step trains on data.train_batch_size prompts"),
    "async_training.partial_rollout": Answer("use trainer.asynchronous.partial_rollout"),
    "async_training.use_rollout_log_probs": Answer("use algorithm.rollout_correction.bypass_mode"),
    "async_training.compute_prox_log_prob": Answer(
        "use algorithm.rollout_correction.rollout_is=token: the ratio is then taken against the actor's log-probs, weighed by theirs "
        "to the engine's"
    ),
    "rollout": Answer(_ENGINES_APART),
    "rollout.nnodes": Answer("use actor_rollout_ref.rollout.nnodes"),
    "rollout.n_gpus_per_node": Answer("use actor_rollout_ref.rollout.n_gpus_per_node"),
    "rollout.n": Answer("use actor_rollout_ref.rollout.n"),
    "rollout.total_rollout_steps": Answer("use trainer.total_training_steps, of data.train_batch_size prompts each"),
    "rollout.total_epochs": Answer("use trainer.total_epochs"),
    "rollout.test_freq": Answer("use trainer.test_freq"),
}

_TOP: dict[str, Answer] = {
    **_ASYNC,
    "actor_rollout_ref.hybrid_engine": Answer(
        "engines share the actor's devices unless actor_rollout_ref.rollout.nnodes is set", (True,)
    ),
    "actor_rollout_ref.nccl_timeout": _hint("use trainer.step_timeout_s"),
    "model_engine": Answer(_FSDP_ONLY, ("dp",)),
    "custom_reward_function": Answer("use reward.custom_reward_function"),
    "custom_reward_function.path": Answer("use reward.custom_reward_function.path; verl reads this one nowhere"),
    "custom_reward_function.name": Answer("use reward.custom_reward_function.name"),
    **_switch("reward_model", _MODEL_REWARD),
    "reward_model.enable_resource_pool": Answer("use reward.reward_model.enable_resource_pool", (False,)),
    "reward_model.n_gpus_per_node": Answer("use reward.reward_model.n_gpus_per_node"),
    "reward_model.nnodes": Answer("use reward.reward_model.nnodes"),
    "reward_model.model": Answer("use reward.reward_model.model_path"),
    "reward_model.model.path": Answer("use reward.reward_model.model_path"),
    "reward_model.model.input_tokenizer": Answer("use reward.reward_model.rerender"),
    "reward_model.model.trust_remote_code": Answer("use reward.reward_model.trust_remote_code", (False,)),
    "reward_model.model.fsdp_config": Answer("use reward.reward_model.dtype and param_offload"),
    "reward_model.micro_batch_size": Answer("use reward.reward_model.max_token_len_per_gpu"),
    "reward_model.micro_batch_size_per_gpu": Answer("use reward.reward_model.max_token_len_per_gpu"),
    "reward_model.forward_max_token_len_per_gpu": Answer("use reward.reward_model.max_token_len_per_gpu"),
    "reward_model.use_dynamic_bsz": Answer("forward passes are always cut by tokens", (True,)),
    "reward_model.strategy": Answer("the reward model runs FSDP2", ("fsdp", "fsdp2")),
    "reward_model.max_length": Answer("use reward.reward_model.max_token_len_per_gpu"),
    "reward_model.reward_manager": Answer(_WORKERS_OF_REWARDS, ("naive",)),
    "reward_model.launch_reward_fn_async": _hint("rewards always start when a response ends", True),
    **_switch("reward_model.overlong_buffer", "use reward.overlong_buffer.len and penalty_factor; null is off"),
    "sandbox_fusion": Answer(_SANDBOX),
    **_switch("distillation", "there is no distillation", "enabled"),
    **_switch("transfer_queue", "batches travel through Ray's object store", hint=True),
    "global_profiler.profile_continuous_steps": _hint("each step has files of its own", False),
    "global_profiler.global_tool_config.nsys": _hint(_PROFILERS),
    "global_profiler.global_tool_config.npu": _hint(_PROFILERS),
    "global_profiler.global_tool_config.torch": _hint(_PROFILERS),
    "global_profiler.global_tool_config.torch_memory.stack_depth": _hint(_PROFILERS),
    "global_profiler.global_tool_config.torch_memory.context": _hint(_PROFILERS),
    "global_profiler.global_tool_config.torch_memory.stacks": _hint(_PROFILERS),
    "global_profiler.global_tool_config.torch_memory.kw_args": _hint(_PROFILERS),
    "skip": Answer("rollouts are always sampled"),
    "skip.rollout.enable": Answer("rollouts are always sampled", (False,)),
    "ray_init": Answer("use ray_kwargs.ray_init"),
    "ray_kwargs.timeline_json_file": _hint("the run's timeline is <run>/timeline.jsonl"),
    "ray_kwargs.ray_init.runtime_env": Answer("give it to `ray job submit --runtime-env`"),
    "hydra": Answer("Hydra's own job settings are not used; runs lie in trainer.default_local_dir"),
}


_ROWS = "supervised training is data.responses=rows: "
_FIXED_SPLIT = "a prompt and its answer are columns, or paths with dots such as data.prompt_key=extra_info.question"

# Keys of verl's sft_trainer, whose model, optimizer and engine stand at the top.
_SFT: dict[str, Answer] = {
    "model": Answer(f"{_ROWS}use {_M}"),
    "model.partial_pretrain": Answer(f"{_ROWS}use {_M}.path"),
    "model.path": Answer(f"{_ROWS}use {_M}.path"),
    "model.enable_gradient_checkpointing": Answer(f"{_ROWS}use {_M}.enable_gradient_checkpointing"),
    "model.trust_remote_code": Answer(f"{_ROWS}use {_M}.trust_remote_code", (False,)),
    "model.strategy": Answer("the actor runs FSDP2", ("fsdp", "fsdp2")),
    "model.use_liger": _hint("there are no Liger kernels", False),
    "model.use_remove_padding": _hint(_PACKED, True),
    "model.external_lib": Answer("install the library; a model's own code runs with trust_remote_code=true"),
    "model.lora_rank": Answer(f"{_ROWS}use {_M}.lora_rank", (0,)),
    "model.lora_alpha": Answer(f"{_ROWS}use {_M}.lora_alpha"),
    "model.target_modules": Answer(f"{_ROWS}use {_M}.target_modules"),
    "model.use_shm": _hint("the model is read where it lies", False),
    "model.fsdp_config": Answer(f"{_ROWS}use {_A}.fsdp_config"),
    "model.fsdp_config.model_dtype": Answer("master weights are always float32", ("fp32", "float32")),
    "model.fsdp_config.cpu_offload": Answer(f"{_ROWS}use {_A}.fsdp_config.param_offload", (False,)),
    "model.fsdp_config.offload_params": Answer(f"{_ROWS}use {_A}.fsdp_config.param_offload", (False,)),
    "model.fsdp_config.wrap_policy": _hint("each decoder layer is one unit of sharding; leave it out"),
    "optim": Answer(f"{_ROWS}use {_A}.optim"),
    "optim.lr": Answer(f"{_ROWS}use {_A}.optim.lr"),
    "optim.betas": Answer(f"{_ROWS}use {_A}.optim.betas"),
    "optim.weight_decay": Answer(f"{_ROWS}use {_A}.optim.weight_decay"),
    "optim.clip_grad": Answer(f"{_ROWS}use {_A}.optim.clip_grad"),
    "optim.warmup_steps_ratio": Answer(f"{_ROWS}use {_A}.optim.lr_warmup_steps_ratio"),
    "optim.lr_warmup_steps_ratio": Answer(f"{_ROWS}use {_A}.optim.lr_warmup_steps_ratio"),
    "optim.lr_warmup_steps": Answer(f"{_ROWS}use {_A}.optim.lr_warmup_steps"),
    "optim.lr_scheduler": Answer(f"{_ROWS}use {_A}.optim.lr_scheduler_type"),
    "optim.lr_scheduler_type": Answer(f"{_ROWS}use {_A}.optim.lr_scheduler_type"),
    "optim.min_lr_ratio": Answer(f"{_ROWS}use {_A}.optim.min_lr_ratio"),
    "engine": Answer(f"{_ROWS}use {_A}.fsdp_config"),
    "checkpoint": Answer(f"{_ROWS}use {_A}.checkpoint.save_contents"),
    "ulysses_sequence_parallel_size": Answer(f"{_ROWS}use {_A}.ulysses_sequence_parallel_size", (1,)),
    "use_remove_padding": _hint(_PACKED, True),
    "data.micro_batch_size": Answer(f"{_ROWS}use {_A}.ppo_micro_batch_size_per_gpu, which counts rows on one rank"),
    "data.micro_batch_size_per_gpu": Answer(f"{_ROWS}use {_A}.ppo_micro_batch_size_per_gpu"),
    "data.use_dynamic_bsz": Answer(f"{_ROWS}use {_A}.use_dynamic_bsz"),
    "data.max_token_len_per_gpu": Answer(f"{_ROWS}use {_A}.ppo_max_token_len_per_gpu"),
    "data.balance_dp_token": _hint("rows are always dealt to the ranks by their tokens", *_ANY_BOOL),
    "data.pad_mode": _hint(_PACKED, "no_padding"),
    "data.num_workers": _hint("rows are tokenized by the controller; leave it out"),
    "data.prompt_dict_keys": Answer(_FIXED_SPLIT),
    "data.response_dict_keys": Answer(_FIXED_SPLIT),
    "data.ignore_input_ids_mismatch": Answer("what a template makes of the assistant's turns is always exact", (False,)),
    "data.multiturn": Answer("rows with data.messages_key are conversations"),
    "data.multiturn.enable": Answer(
        "rows with data.messages_key are conversations, others have a prompt and a response", _ANY_BOOL
    ),
    "data.multiturn.messages_key": Answer("use data.messages_key"),
    "data.multiturn.tools_key": Answer("use data.tools_key"),
    "data.multiturn.enable_thinking_key": Answer("use data.enable_thinking_key"),
    "trainer.max_ckpt_to_keep": Answer("use trainer.max_actor_ckpt_to_keep"),
    "trainer.checkpoint": Answer(f"use {_A}.checkpoint.save_contents"),
    "trainer.profile_interval": _hint("use global_profiler.steps"),
}


def _table() -> dict[str, Answer]:
    of_update = {name: answer for name, answer in _ACTOR.items() if name.startswith(("optim.", "checkpoint."))}
    groups = {
        f"{_A}.fsdp_config.": _FSDP,
        f"{_REF}.fsdp_config.": {**_FSDP, **_REFERENCE_FSDP},
        "critic.fsdp.": _FSDP,
        "critic.model.": {**_CRITIC_MODEL, "use_fused_kernels": _hint("a critic has no LM head", *_ANY_BOOL)},
        "critic.": {**_BOTH, **of_update, **_CRITIC},
        f"{_A}.": {**_BOTH, **_ACTOR},
        f"{_REF}.": {**_BOTH, **_REFERENCE},
        f"{_R}.": _ROLLOUT,
        f"{_M}.": _MODEL,
        "data.": _DATA,
        "algorithm.": _ALGORITHM,
        "reward.": _REWARD,
        "trainer.": _TRAINER,
        "": _TOP,
    }
    answers = {prefix + name: answer for prefix, group in groups.items() for name, answer in group.items()}
    return {**_SFT, **answers}


ANSWERS: dict[str, Answer] = _table()
