"""A user's own engine, as rollout.name=path/to/file.py:function takes it: transformers, with faults on request."""

from __future__ import annotations

import time

from grpo_rl.rollout.engine import EngineSpec
from grpo_rl.rollout.hf.hf_engine import HfEngine
from grpo_rl.types import Completion


class FaultyEngine(HfEngine):
    """Fails in step number `fail_at`, and takes `step_s` for every step."""

    def __init__(self, spec: EngineSpec, fail_at: int, step_s: float) -> None:
        super().__init__(spec)
        self._fail_at, self._step_s, self._steps = fail_at, step_s, 0

    def step(self) -> list[Completion]:
        self._steps += 1
        if self._steps == self._fail_at:
            raise FloatingPointError("logits are not finite")
        time.sleep(self._step_s)
        return super().step()


def fails_in_third_step(spec: EngineSpec) -> FaultyEngine:
    return FaultyEngine(spec, fail_at=3, step_s=0.0)


def steps_slowly(spec: EngineSpec) -> FaultyEngine:
    return FaultyEngine(spec, fail_at=-1, step_s=1.0)


def cannot_start(spec: EngineSpec) -> FaultyEngine:
    raise MemoryError("no room for the cache")
