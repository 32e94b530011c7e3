"""Rollout engines by name, each imported when it is built."""

from __future__ import annotations

from collections.abc import Callable

from grpo_rl.registry import Registry
from grpo_rl.rollout.engine import EngineSpec, RolloutEngine

ENGINES: Registry[Callable[[EngineSpec], RolloutEngine]] = Registry("rollout engine")


@ENGINES.register("vllm")
def _vllm(spec: EngineSpec) -> RolloutEngine:
    from grpo_rl.rollout.vllm.vllm_engine import VllmEngine

    return VllmEngine(spec)


@ENGINES.register("hf")
def _hf(spec: EngineSpec) -> RolloutEngine:
    from grpo_rl.rollout.hf.hf_engine import HfEngine

    return HfEngine(spec)
