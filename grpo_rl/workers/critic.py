"""The critic of PPO: the value of the state before each trained token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from grpo_rl.algos.aggregate import token_mean
from grpo_rl.algos.losses.value import value_loss
from grpo_rl.algos.segments import Segments
from grpo_rl.columns import values
from grpo_rl.gpu_allocator import to_device
from grpo_rl.models.heads import ValueModel
from grpo_rl.types import Batch
from grpo_rl.workers.sharded_policy import as_block, build_sharded, sequences_of
from grpo_rl.workers.specs import CriticSpec, OptimizerStep, Rows
from grpo_rl.workers.trained_rank import TrainedRank


class CriticWorker(TrainedRank[CriticSpec, ValueModel]):
    role = "critic"

    def build(self) -> ValueModel:
        return build_sharded(self.spec.model, self.rank, self.device, ValueModel)

    def values(self, shard: Batch, micro_batches: Sequence[Rows]) -> tuple[bool, dict[str, Any]]:
        return as_block({"values_T": self.per_token(shard, micro_batches)})

    def measure(self, batch: Batch | None) -> Tensor:
        values_T: Tensor = self.model(sequences_of(batch, self.device, share_prompts=self.spec.model.share_prompts))
        return values_T

    def loss(self, batch: Batch | None, step: OptimizerStep) -> tuple[Tensor, dict[str, Tensor]]:
        values_T = self.measure(batch)
        if batch is None:
            return values_T.sum() * 0.0, {}
        assert batch.values_T is not None and batch.returns_T is not None
        old_values_T, returns_T = to_device(values(batch.values_T), self.device), to_device(batch.returns_T, self.device)
        losses_T, stats = value_loss(values_T, old_values_T, returns_T, cliprange_value=self.spec.cliprange_value)
        loss = token_mean(
            losses_T, Segments(to_device(batch.trained_lengths_N, self.device), batch.num_trained_tokens), step.counts
        )
        return loss, {"share/vf_loss": loss.detach()} | {f"sum/{name}": value_T.sum() for name, value_T in stats.items()}
