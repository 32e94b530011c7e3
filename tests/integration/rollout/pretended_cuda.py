"""Reads lists of vLLM's engine arguments from a file, and prints what vLLM makes of each on a CUDA platform that is not there.

A process of its own: vLLM chooses its platform once, and its extensions for CUDA are missing here.
"""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import torch


class Missing(types.ModuleType):
    """A module of kernels that is imported by name and never called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *arguments, **options: None


def eight_gpus() -> Any:
    """Return the platform of a machine with eight GPUs of 80 GB."""
    for extension in ("vllm._C_stable_libtorch", "vllm._C", "vllm._moe_C"):
        try:
            __import__(extension)
        except ImportError:
            sys.modules[extension] = types.ModuleType(extension)
    sys.modules["vllm.vllm_flash_attn"] = Missing("vllm.vllm_flash_attn")
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    class EightGpus(CudaPlatformBase):
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(9, 0)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "NVIDIA H100 80GB HBM3"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return 80 << 30

        @classmethod
        def is_fully_connected(cls, device_ids: list[int]) -> bool:
            return True

        @classmethod
        def device_count(cls) -> int:
            return 8

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return 132

        def is_cumem_allocator_available(self) -> bool:
            return True

    return EightGpus()


def main(file: str) -> None:
    import vllm.platforms as platforms

    platforms._current_platform = eight_gpus()
    torch.cuda.device_count = lambda: 8
    torch.cuda.is_available = lambda: True
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

    # It would ask kernels which of their kinds this GPU has; whether the name is one of vLLM's was checked before.
    VllmConfig._get_quantization_config = staticmethod(lambda *arguments: None)
    found: list[dict[str, Any]] = []
    for arguments in json.loads(Path(file).read_text()):
        unknown = sorted(set(arguments) - set(EngineArgs.__dataclass_fields__))
        if unknown:
            found.append({"unknown": unknown})
            continue
        config = EngineArgs(**arguments).create_engine_config()
        found.append(
            {
                "graphs": f"{config.compilation_config.mode.name} {config.compilation_config.cudagraph_mode.name}",
                "graph_sizes": config.compilation_config.cudagraph_capture_sizes,
                "sleeps": config.model_config.enable_sleep_mode,
                "parallel": config.parallel_config.tensor_parallel_size,
                "executor": str(config.parallel_config.distributed_executor_backend),
                "worker": config.parallel_config.worker_cls,
                "most": config.scheduler_config.max_num_seqs,
                "tokens": config.scheduler_config.max_num_batched_tokens,
                "share": config.cache_config.gpu_memory_utilization,
                "cache_bytes": config.cache_config.kv_cache_memory_bytes,
                "quantization": config.model_config.quantization,
                "dtype": str(config.model_config.dtype),
                "longest": config.model_config.max_model_len,
                "device": config.device_config.device_type,
                "eager": config.model_config.enforce_eager,
                "schedules_ahead": config.scheduler_config.async_scheduling,
            }
        )
    print("FOUND" + json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
