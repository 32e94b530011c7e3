"""vLLM's engine, built from an EngineSpec."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from grpo_rl.errors import ClusterError, ConfigError
from grpo_rl.rollout.engine import EngineSpec
from grpo_rl.rollout.engine_environment import engine_environment, set_missing, temporary_files
from grpo_rl.rollout.model_info import kv_bytes_per_token, load_config
from grpo_rl.rollout.vllm.vllm_patches import check_version, own_threads

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

_CPU_BLOCK_TOKENS = 128
"""Tokens per cache block on CPU: vLLM's own choice."""


def build_llm_engine(spec: EngineSpec) -> LLMEngine:
    """Build vLLM's engine in this process: token ids in, token ids and log-probs out, no tokenizer, no server.

    Sets the environment variables that vLLM reads on import where they are missing.
    Raises ConfigError for another version of vLLM than the one that was tried, and for an engine argument that it does not have.
    """
    check_version()
    set_missing(engine_environment(spec))
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    from grpo_rl.rollout.vllm.weight_receiver import transfer_config

    arguments = engine_arguments(spec)
    arguments["weight_transfer_config"] = transfer_config(spec.weight_backend, spec.verify_checksum)
    unknown = [key for key in spec.engine_kwargs if key not in EngineArgs.__dataclass_fields__]
    if unknown:
        raise ConfigError(f"actor_rollout_ref.rollout.engine_kwargs.vllm: vLLM has no argument {', '.join(unknown)}")
    if spec.device == "cpu":
        check_compiled_part()
    with own_threads(spec), temporary_files():
        return LLMEngine.from_engine_args(EngineArgs(**arguments))


def check_compiled_part() -> None:
    """Raise ClusterError, with the cause, where vLLM's compiled part is not loaded, which vLLM itself only notes in its log."""
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    if hasattr(torch.ops._C, "init_cpu_memory_env"):
        return
    causes = []
    for library in sorted(Path(str(importlib.util.find_spec("vllm").origin)).parent.glob("_C*.so")):  # type: ignore[union-attr]
        try:
            ctypes.CDLL(str(library))
        except OSError as error:
            causes.append(str(error))
    remedy = ": sudo apt-get install libnuma1 (Debian, Ubuntu), or numactl-libs (Fedora)" if "libnuma" in str(causes) else ""
    raise ClusterError(f"vLLM's compiled part cannot be loaded: {'; '.join(causes) or 'no reason is given'}{remedy}")


def engine_arguments(spec: EngineSpec) -> dict[str, Any]:
    """Return the arguments of vLLM's EngineArgs, without the weight transfer's."""
    parallel = spec.tensor_parallel_size
    arguments: dict[str, Any] = {
        "model": spec.model_path,
        "skip_tokenizer_init": True,
        "trust_remote_code": spec.trust_remote_code,
        "hf_overrides": dict(spec.override_config) | ({"head_dtype": "float32"} if spec.fp32_lm_head else {}),
        # Sampling is what the request says; stop tokens are passed with it.
        "generation_config": "vllm",
        "dtype": spec.dtype,
        "seed": spec.seed,
        "max_model_len": spec.max_model_len,
        "max_num_seqs": spec.max_num_seqs,
        "max_num_batched_tokens": max(spec.max_num_batched_tokens, spec.max_num_seqs),
        "enable_prefix_caching": spec.enable_prefix_caching,
        "enforce_eager": spec.enforce_eager,
        "tensor_parallel_size": parallel,
        "quantization": spec.quantization,
        # Said outright: inside a Ray actor vLLM would otherwise start Ray workers of its own, which only several nodes need.
        "distributed_executor_backend": "ray" if spec.num_nodes > 1 else "mp" if parallel > 1 else "uni",
        "worker_extension_cls": "grpo_rl.rollout.vllm.weight_receiver.RolloutWorkerExtension",
        "logprobs_mode": "processed_logprobs",
        # No limit of its own: how many are asked for follows from the request (sampling_support.num_logprobs).
        "max_logprobs": -1,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if spec.device == "cpu":
        arguments["kv_cache_memory_bytes"] = cpu_cache_bytes(spec)
    else:
        arguments["gpu_memory_utilization"] = spec.gpu_memory_utilization
        arguments["enable_sleep_mode"] = spec.sleep_mode
        if spec.updates_in_flight:
            # Its default: tokens are handed over a step late, so that all requests would have to end before an update.
            arguments["async_scheduling"] = False
        if spec.kv_cache_memory_bytes is not None:
            arguments["kv_cache_memory_bytes"] = spec.kv_cache_memory_bytes
    return arguments | spec.engine_kwargs


def cpu_cache_bytes(spec: EngineSpec) -> int:
    """Return the bytes of the key-value cache: `kv_cache_gib`, or less where max_num_seqs full rollouts fill less.

    vLLM touches all of it at start, so what can never be used would be resident memory for nothing.
    """
    limit = int(spec.kv_cache_gib * 2**30)
    blocks_per_rollout = -(-spec.max_model_len // _CPU_BLOCK_TOKENS)
    # One rollout more than can run: vLLM keeps a block for itself.
    tokens = (spec.max_num_seqs + 1) * blocks_per_rollout * _CPU_BLOCK_TOKENS
    return min(limit, tokens * kv_bytes_per_token(load_config(spec), spec.dtype))
