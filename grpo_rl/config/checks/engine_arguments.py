"""`rollout.engine_kwargs` reaches the engine past every other check, so only the settings of speed and memory
listed here pass. Others may load code, reach the network or change what is sampled; a new version's arguments
are refused until somebody has looked at them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_rl.config.convert import show
from grpo_rl.config.schema.tree import Config
from grpo_rl.errors import Problems, did_you_mean

_KEY = "actor_rollout_ref.rollout.engine_kwargs"
_R, _M = "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_CPU_CACHE = f"{_R}.kv_cache_gib on CPUs, {_R}.gpu_memory_utilization on GPUs"
_CACHE_BYTES = f"{_R}.kv_cache_memory_bytes on GPUs, {_R}.kv_cache_gib on CPUs"

_SAME_NAME = (
    "dtype seed max_model_len max_num_seqs max_num_batched_tokens enable_prefix_caching enforce_eager quantization "
    "gpu_memory_utilization nnodes"
)
VLLM_OWNED: dict[str, str] = {
    **{name: f"{_R}.{name}" for name in _SAME_NAME.split()},
    "model": f"{_M}.path",
    "model_weights": f"{_M}.path",
    "hf_config_path": f"{_M}.path",
    "hf_overrides": f"{_M}.override_config",
    "tokenizer": f"{_M}.tokenizer_path",
    "trust_remote_code": f"{_M}.trust_remote_code",
    "tensor_parallel_size": f"{_R}.tensor_model_parallel_size",
    "enable_sleep_mode": f"{_R}.free_cache_engine",
    "weight_transfer_config": f"{_R}.checkpoint_engine",
    "node_rank": f"{_R}.nnodes",
    "data_parallel_size": f"{_R}.num_replicas",
    "kv_cache_memory_bytes": _CACHE_BYTES,
    "num_gpu_blocks_override": _CPU_CACHE,
}
"""Arguments that other keys own, and the key to set."""

_ALLOWED = """
all2all_backend async_scheduling attention_backend block_size cpu_distributed_timeout_seconds cudagraph_capture_sizes
cudagraph_metrics dbo_decode_token_threshold dbo_prefill_token_threshold disable_cascade_attn disable_custom_all_reduce
disable_hybrid_kv_cache_manager distributed_timeout_seconds enable_dbo enable_flashinfer_autotune enable_hc_sp
enable_layerwise_nvtx_tracing enable_logging_iteration_details enable_mamba_cache_stochastic_rounding
enable_mamba_shared_prefix_checkpoint enable_mfu_metrics enable_nccl_comm_suspend gdn_prefill_backend jit_monitor_mode
jit_monitor_verbose kda_decode_backend kda_prefill_backend kv_cache_dtype kv_cache_dtype_skip_layers kv_cache_metrics
kv_cache_metrics_sample kv_offloading_backend kv_offloading_size kv_sharing_fast_prefill linear_backend
long_prefill_token_threshold long_prefill_token_threshold_adaptive mamba_backend mamba_block_size mamba_cache_dtype
mamba_cache_mode mamba_cache_philox_rounds mamba_ssm_cache_dtype mamba_ssu_algorithm max_cudagraph_capture_size
max_num_scheduled_tokens moe_backend optimization_level performance_mode prefill_schedule_interval
prefix_cache_retention_interval prefix_caching_hash_algo prefix_match_unit replayssm_buffer_len scheduler_reserve_full_isl
show_hidden_metrics_for_version sparse_indexer_topk_backend stream_interval ubatch_size use_replayssm
"""
VLLM_ALLOWED = _ALLOWED.split()

HF_ALLOWED: dict[str, tuple[str, ...]] = {
    # Other text names kernels on the hub, which transformers would fetch and run.
    "attn_implementation": ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"),
}


def problems(config: Config) -> Problems:
    """Yield a line for each argument of the chosen engine that may not pass."""
    rollout = config.rollout
    arguments = rollout.engine_kwargs.get(rollout.name)
    if arguments is None:
        return
    if not isinstance(arguments, Mapping):
        yield f"{_KEY}.{rollout.name}={show(arguments)}: write its arguments by name, {{argument: value}}"
        return
    for name, value in arguments.items():
        key = f"{_KEY}.{rollout.name}.{name}"
        # Values are not shown: an argument may hold a secret.
        if rollout.name == "hf" and name not in HF_ALLOWED:
            yield f"{key}: cannot be passed: the configuration owns how the model is loaded; only {', '.join(HF_ALLOWED)} may be"
        elif rollout.name == "hf" and value not in HF_ALLOWED[name]:
            yield f"{key}={show(value)}: one of {', '.join(HF_ALLOWED[name])}"
        elif rollout.name != "vllm":
            continue
        elif name in VLLM_OWNED:
            yield f"{key}: cannot be passed around the configuration; set {VLLM_OWNED[name]}"
        elif name not in VLLM_ALLOWED:
            hint = did_you_mean(str(name), (*VLLM_ALLOWED, *VLLM_OWNED), most=2)
            yield (
                f"{key}: is not among vLLM's settings of speed and memory, and others may load code, open an address, or change what "
                f"is sampled.{hint} Those that may be passed are {', '.join(VLLM_ALLOWED)}"
            )
        elif not _is_plain(value):
            yield f"{key}: takes a number, a text, true or false, null, or a list of these"


def _is_plain(value: Any) -> bool:
    """Return whether a value has no mapping in it, of which vLLM makes configurations that may name code."""
    if isinstance(value, list):
        return all(_is_plain(entry) for entry in value)
    return value is None or isinstance(value, bool | int | float | str)
