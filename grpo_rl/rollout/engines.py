"""Rollout engines, and senders of weights to them, by name. Each is imported when it is built, and no sooner."""

from __future__ import annotations

from collections.abc import Callable

import torch

from grpo_rl.registry import Registry
from grpo_rl.rollout.engine import EngineSpec, RolloutEngine, WeightBackend
from grpo_rl.rollout.senders import IpcSender, ObjectStoreSender, WeightSender

ENGINES: Registry[Callable[[EngineSpec], RolloutEngine]] = Registry("rollout engine")


@ENGINES.register("vllm")
def _vllm(spec: EngineSpec) -> RolloutEngine:
    from grpo_rl.rollout.vllm.vllm_engine import VllmEngine

    return VllmEngine(spec)


@ENGINES.register("hf")
def _hf(spec: EngineSpec) -> RolloutEngine:
    from grpo_rl.rollout.hf.hf_engine import HfEngine

    return HfEngine(spec)


def make_sender(
    backend: WeightBackend,
    bucket_bytes: int,
    dtype: torch.dtype | None = None,
    verify: bool = False,
    rank: int = 0,
    timeout_s: float = 600.0,
) -> WeightSender:
    """Return the sender of one actor rank. `timeout_s`: longest wait for the engines to receive a broadcast."""
    arguments = (bucket_bytes, dtype, verify, rank == 0)
    if backend == "object_store":
        return ObjectStoreSender(*arguments)
    if backend == "ipc":
        return IpcSender(*arguments)
    from grpo_rl.rollout.vllm.nccl_sender import NcclSender

    return NcclSender(*arguments, timeout_s=timeout_s)
