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
from grpo_rl.workers.reference import ReferenceWorker
from grpo_rl.workers.reward_model import TrainedRewardModelWorker

_num_fetched = 0
_get = worker_host._get


def _counted_get(ref: Any) -> Any:
    """Fetch as workers do. The reference itself is not kept: that would keep what it refers to."""
    global _num_fetched
    _num_fetched += 1
    return _get(ref)


worker_host._get = _counted_get


class Armed:
    """Methods of a rank that only tests call."""

    def num_fetches(self) -> int:
        """Return the number of stored values that this process has fetched: a share of a batch each."""
        return _num_fetched

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


class ArmedReference(Armed, ReferenceWorker):
    pass


class ArmedRewardModel(Armed, TrainedRewardModelWorker):
    pass


def make_actor(*arguments: Any) -> ArmedActor:
    return ArmedActor(*arguments)


def make_critic(*arguments: Any) -> ArmedCritic:
    return ArmedCritic(*arguments)


def make_reference(*arguments: Any) -> ArmedReference:
    return ArmedReference(*arguments, offload=False)


def make_reward_model(*arguments: Any) -> ArmedRewardModel:
    return ArmedRewardModel(*arguments)
