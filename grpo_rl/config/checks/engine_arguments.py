"""Arguments of an engine's constructor that `rollout.engine_kwargs` may pass, and those that it may not.

`engine_kwargs` reaches the engine past every other check. So it takes only what is listed here: settings of speed
and memory. What another key owns is refused with that key; what loads code, reaches the network or changes what is
sampled is refused with the reason. The test of this table compares it with the EngineArgs of the installed vLLM,
so a version with a new argument shows up there and has to be looked at first.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from grpo_rl.config.convert import show
from grpo_rl.config.schema.tree import Config

_KEY = "actor_rollout_ref.rollout.engine_kwargs"
_R, _M = "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_CPU_CACHE = f"{_R}.kv_cache_gib on CPUs, {_R}.gpu_memory_utilization on GPUs"
_CACHE_BYTES = f"{_R}.kv_cache_memory_bytes on GPUs, {_R}.kv_cache_gib on CPUs"

VLLM_OWNED: dict[str, str] = {
    "model": f"{_M}.path",
    "model_weights": f"{_M}.path",
    "hf_config_path": f"{_M}.path",
    "hf_overrides": f"{_M}.override_config",
    "tokenizer": f"{_M}.tokenizer_path",
    "trust_remote_code": f"{_M}.trust_remote_code",
    "dtype": f"{_R}.dtype",
    "seed": f"{_R}.seed",
    "max_model_len": f"{_R}.max_model_len",
    "max_num_seqs": f"{_R}.max_num_seqs",
    "max_num_batched_tokens": f"{_R}.max_num_batched_tokens",
    "enable_prefix_caching": f"{_R}.enable_prefix_caching",
    "enforce_eager": f"{_R}.enforce_eager",
    "tensor_parallel_size": f"{_R}.tensor_model_parallel_size",
    "quantization": f"{_R}.quantization",
    "gpu_memory_utilization": f"{_R}.gpu_memory_utilization",
    "kv_cache_memory_bytes": _CACHE_BYTES,
    "num_gpu_blocks_override": _CPU_CACHE,
    "enable_sleep_mode": f"{_R}.free_cache_engine",
    "weight_transfer_config": f"{_R}.checkpoint_engine",
    "nnodes": f"{_R}.nnodes",
    "node_rank": f"{_R}.nnodes",
    "data_parallel_size": f"{_R}.num_replicas",
}
"""Arguments that other keys own: the key to set instead."""

_LOADS_CODE = "it names or loads code"
_OF_WEIGHTS = "engines get the actor's weights over their own way of transfer, in the model's own form"
_NETWORK = "it opens or names an address, and engines of a run talk to the run alone"
_REPLICAS = "replicas are processes of the run, each with its own devices"
_SAMPLING = "it changes what is sampled, or the log-probs that the trainer compares with"
_PROGRAM = "the program sets it"
_NOT_TEXT = "prompts and responses are token ids of text only"
_NO_LORA = "engines get merged weights, not adapters; LoRA is actor_rollout_ref.model.lora_rank"
_FILES = "it names a file or a folder that an engine reads or writes"

VLLM_REFUSED: dict[str, str] = {
    name: reason
    for reason, names in {
        _LOADS_CODE: (
            "worker_cls worker_extension_cls scheduler_cls logits_processors io_processor_plugin reasoning_parser_plugin "
            "reasoning_parser reasoning_config model_impl model_class_overrides compilation_config additional_config "
            "kv_transfer_config ec_transfer_config ec_manager_config kernel_config attention_config distributed_executor_backend "
            "structured_outputs_config engram_config mamba_config diffusion_config watermark_config aux_output_config "
            "fault_tolerance_config ir_op_priority"
        ),
        _OF_WEIGHTS: (
            "load_format config_format revision code_revision tokenizer_revision tokenizer_mode model_loader_extra_config "
            "ignore_patterns pt_load_map_location safetensors_load_strategy safetensors_prefetch_block_size "
            "safetensors_prefetch_num_threads max_parallel_loading_workers quantization_config "
            "allow_deprecated_quantization runner convert pooler_config sleep_preserve_parameter_names cpu_offload_gb "
            "cpu_offload_params offload_backend offload_group_size offload_num_in_group offload_params offload_prefetch_step"
        ),
        _NETWORK: (
            "hf_token master_addr master_port data_parallel_address data_parallel_rpc_port otlp_traces_endpoint "
            "kv_events_config served_model_name"
        ),
        _REPLICAS: (
            "pipeline_parallel_size prefill_context_parallel_size decode_context_parallel_size dcp_comm_backend "
            "dcp_kv_cache_interleave_size dcp_q_replicate cp_kv_cache_interleave_size data_parallel_backend "
            "data_parallel_external_lb data_parallel_hybrid_lb data_parallel_multi_port_external_lb data_parallel_rank "
            "data_parallel_size_local data_parallel_start_rank disable_nccl_for_dp_synchronization dp_sync_interval "
            "elastic_ep_max_dp_size enable_elastic_ep enable_fault_tolerance enable_expert_parallel enable_eplb eplb_config "
            "enable_ep_weight_filter expert_placement_strategy device_ids ray_workers_use_nsight numa_bind numa_bind_cpus "
            "numa_bind_nodes _api_process_count _api_process_rank"
        ),
        _SAMPLING: (
            "generation_config override_generation_config logprobs_mode max_logprobs speculative_config spec_method spec_model "
            "spec_tokens per_request_spec_decode_metrics disable_sliding_window swa_bounded_replay watermark return_sampling_mask "
            "enable_return_routed_experts use_fp64_gumbel enable_batch_sharded_sampling"
        ),
        _PROGRAM: (
            "skip_tokenizer_init tokens_only disable_log_stats use_tqdm_on_load enable_cumem_allocator "
            "sleep_mode_offload_cudagraph shutdown_timeout max_num_queued_reqs max_num_queued_tokens max_num_active_seqs "
            "fail_on_environ_validation custom_histogram_buckets enable_chunked_prefill log_level aggregate_engine_logging scheduling_policy enable_trace_replay"
        ),
        _NOT_TEXT: (
            "allowed_local_media_path allowed_media_domains language_model_only limit_mm_per_prompt media_io_kwargs "
            "interleave_mm_strings enable_mm_embeds enable_mm_processor_stats enable_prompt_embeds disable_chunked_mm_input "
            "mm_device_do_normalize mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path "
            "mm_encoder_fp8_scale_save_margin mm_encoder_fp8_scale_save_path mm_encoder_only mm_encoder_tp_mode "
            "mm_hasher_algorithm mm_ipc_gpu_memory_gb mm_processor_cache_gb mm_processor_cache_type mm_processor_device "
            "mm_processor_kwargs mm_shm_cache_max_object_size_mb mm_tensor_ipc skip_mm_profiling video_pruning_method "
            "video_pruning_rate enable_shm_tensor_arena renderer_num_workers"
        ),
        _NO_LORA: (
            "enable_lora fully_sharded_loras default_mm_loras enable_mixed_moe_lora_format enable_moe_shared_loras "
            "enable_tower_connector_lora lora_dtype lora_target_modules max_cpu_loras max_lora_cls_labels max_lora_rank max_loras "
            "specialize_active_lora"
        ),
        _FILES: "download_dir log_config_file logging_config profiler_config collect_detailed_traces",
    }.items()
    for name in names.split()
}
"""Arguments that are refused, with the reason."""

VLLM_ALLOWED: tuple[str, ...] = tuple(
    [
        "all2all_backend",
        "async_scheduling",
        "attention_backend",
        "block_size",
        "cpu_distributed_timeout_seconds",
        "cudagraph_capture_sizes",
        "cudagraph_metrics",
        "dbo_decode_token_threshold",
        "dbo_prefill_token_threshold",
        "disable_cascade_attn",
        "disable_custom_all_reduce",
        "disable_hybrid_kv_cache_manager",
        "distributed_timeout_seconds",
        "enable_dbo",
        "enable_flashinfer_autotune",
        "enable_hc_sp",
        "enable_layerwise_nvtx_tracing",
        "enable_logging_iteration_details",
        "enable_mamba_cache_stochastic_rounding",
        "enable_mamba_shared_prefix_checkpoint",
        "enable_mfu_metrics",
        "enable_nccl_comm_suspend",
        "gdn_prefill_backend",
        "jit_monitor_mode",
        "jit_monitor_verbose",
        "kda_decode_backend",
        "kda_prefill_backend",
        "kv_cache_dtype",
        "kv_cache_dtype_skip_layers",
        "kv_cache_metrics",
        "kv_cache_metrics_sample",
        "kv_offloading_backend",
        "kv_offloading_size",
        "kv_sharing_fast_prefill",
        "linear_backend",
        "long_prefill_token_threshold",
        "long_prefill_token_threshold_adaptive",
        "mamba_backend",
        "mamba_block_size",
        "mamba_cache_dtype",
        "mamba_cache_mode",
        "mamba_cache_philox_rounds",
        "mamba_ssm_cache_dtype",
        "mamba_ssu_algorithm",
        "max_cudagraph_capture_size",
        "max_num_scheduled_tokens",
        "moe_backend",
        "optimization_level",
        "performance_mode",
        "prefill_schedule_interval",
        "prefix_cache_retention_interval",
        "prefix_caching_hash_algo",
        "prefix_match_unit",
        "replayssm_buffer_len",
        "scheduler_reserve_full_isl",
        "show_hidden_metrics_for_version",
        "sparse_indexer_topk_backend",
        "stream_interval",
        "ubatch_size",
        "use_replayssm",
    ]
)
"""Settings of speed and memory, handed on as they are."""

HF_ALLOWED: dict[str, tuple[str, ...]] = {
    # Any other text names kernels on the hub, which transformers would fetch and run.
    "attn_implementation": ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"),
}


def problems(config: Config) -> Iterator[str]:
    """Yield a line for each argument of the chosen engine that may not be passed, naming the key that owns it."""
    rollout = config.actor_rollout_ref.rollout
    given = rollout.engine_kwargs.get(rollout.name)
    if given is None:
        return
    if not isinstance(given, Mapping):
        yield f"{_KEY}.{rollout.name}={show(given)}: write its arguments by name, {{argument: value}}"
        return
    if rollout.name == "vllm":
        for name, value in given.items():
            yield from _vllm_argument(str(name), value)
    elif rollout.name == "hf":
        for name, value in given.items():
            yield from _hf_argument(str(name), value)


def _vllm_argument(name: str, value: Any) -> Iterator[str]:
    key = f"{_KEY}.vllm.{name}"
    # Values are not shown: an argument may hold a secret.
    if name in VLLM_OWNED:
        yield f"{key}: cannot be passed around the configuration; set {VLLM_OWNED[name]}"
    elif name in VLLM_REFUSED:
        yield f"{key}: cannot be passed: {VLLM_REFUSED[name]}"
    elif name not in VLLM_ALLOWED:
        near = difflib.get_close_matches(name[:200], (*VLLM_ALLOWED, *VLLM_OWNED), n=2, cutoff=0.6)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        yield f"{key}: is not among vLLM's settings of speed and memory that may be passed.{hint} They are {', '.join(VLLM_ALLOWED)}"
    elif not _is_plain(value):
        yield f"{key}: takes a number, a text, true or false, null, or a list of these"


def _hf_argument(name: str, value: Any) -> Iterator[str]:
    key = f"{_KEY}.hf.{name}"
    if name not in HF_ALLOWED:
        yield f"{key}: cannot be passed: the configuration owns how the model is loaded; only {', '.join(HF_ALLOWED)} may be"
    elif value not in HF_ALLOWED[name]:
        yield f"{key}={show(value)}: one of {', '.join(HF_ALLOWED[name])}"


def _is_plain(value: Any) -> bool:
    """Return whether the value is no mapping (vLLM makes whole configurations, which may name code, of those)."""
    if isinstance(value, list):
        return all(_is_plain(entry) for entry in value)
    return value is None or isinstance(value, bool | int | float | str)
