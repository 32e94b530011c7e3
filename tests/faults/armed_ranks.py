"""Real ranks in which faults can be armed while they run."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from grpo_rl import faults
from grpo_rl.cluster.processes import worker_host
from grpo_rl.models import fsdp
from grpo_rl.workers.actor import ActorWorker
from grpo_rl.workers.critic import CriticWorker

_fetched: list[Any] = []
_get = worker_host._get


def _noted_get(ref: Any) -> Any:
    _fetched.append(ref)
    return _get(ref)


worker_host._get = _noted_get


class Armed:
    """Methods of a rank that only tests call."""

    def num_fetches(self) -> int:
        """Return the number of stored values that this process has fetched: a share of a batch each."""
        return len(_fetched)

    def arm(self, spec: str) -> None:
        faults.arm(spec)

    def whole_weights(self) -> str:
        """Digest of all parameters as this rank sees them. A collective."""
        digest = hashlib.sha256()
        with torch.no_grad():
            for name, tensor in self.model.named_parameters():  # type: ignore[attr-defined]
                digest.update(name.encode() + fsdp.full_tensor(tensor).numpy().tobytes())
        return digest.hexdigest()


class ArmedActor(Armed, ActorWorker):
    pass


class ArmedCritic(Armed, CriticWorker):
    pass


def make_actor(*arguments: Any) -> ArmedActor:
    return ArmedActor(*arguments)


def make_critic(*arguments: Any) -> ArmedCritic:
    return ArmedCritic(*arguments)
