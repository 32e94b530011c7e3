"""Copies of a trained rank's state in host memory, for the process that takes its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from grpo_rl.checkpoint import memory_state
from grpo_rl.models import fsdp
from grpo_rl.models.forward import PackedModel


class Snapshots:
    """What actor and critic ranks offer beside `save` and `load`; nothing here is a collective."""

    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LambdaLR
    stepped_model: Callable[[], PackedModel]
    """The model that the optimizer steps."""

    def state_bytes(self) -> int:
        """Size of what `snapshot` gives."""
        return memory_state.num_bytes(self.stepped_model())

    def snapshot(self) -> dict[str, Any]:
        """A copy of this rank's share of weights, optimizer, schedule and random state."""
        fsdp.reshard(self.stepped_model())
        return memory_state.take(self.stepped_model(), self.optimizer, self.scheduler)

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a `snapshot` of a rank in the same place of a set of the same size."""
        fsdp.reshard(self.stepped_model())
        memory_state.put_back(state, self.stepped_model(), self.optimizer, self.scheduler)
