"""Real actor ranks in which faults can be armed while they run."""

from __future__ import annotations

from typing import Any

from grpo_rl import faults
from grpo_rl.workers.actor import ActorWorker


class ArmedActor(ActorWorker):
    def arm(self, spec: str) -> None:
        faults.arm(spec)


def make_actor(*arguments: Any) -> ArmedActor:
    return ArmedActor(*arguments)
