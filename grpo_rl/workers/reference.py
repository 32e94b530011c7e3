"""Frozen models, log-probs on request: the reference policy or the teachers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from grpo_rl.checkpoint.rank_files import RankFiles, put_weights
from grpo_rl.faults import fault_point
from grpo_rl.models import fsdp
from grpo_rl.types import Batch
from grpo_rl.workers.device_memory import DeviceMemory, OnDevice
from grpo_rl.workers.model_work import ModelWork
from grpo_rl.workers.sharded_policy import Saves, Teaches, as_block, build_policy, join_set
from grpo_rl.workers.specs import PolicySpec, Rank, Rows


class ReferenceWorker(Teaches, Saves, OnDevice):
    def __init__(self, specs: Sequence[PolicySpec], rank: Rank, *, offload: bool) -> None:
        self.device = join_set(rank, in_host_memory=specs[0].in_host_memory)
        self.share_prompts = specs[0].share_prompts
        self.policies = [build_policy(spec, rank, self.device) for spec in specs]
        self.work = ModelWork(*self.policies)
        self.files = RankFiles(self.policies[0], None, rank.rank, rank.patience_s)
        in_host = specs[0].in_host_memory
        self.memories = [
            DeviceMemory(policy, self.device, param_offload=offload, in_host_memory=in_host) for policy in self.policies
        ]
        for memory in self.memories:
            memory.release()

    def logprobs(
        self,
        shard: Batch,
        micro_batches: Sequence[Rows],
        want_hidden: bool,
        top: tuple[int, int] | None = None,
        model: int = 0,
    ) -> tuple[bool, dict[str, Any]]:
        """Return what `taught` does, by this one of the models."""
        fault_point("reference.logprobs")
        self.memories[model].load_weights()
        columns = self.taught(self.policies[model], shard, micro_batches, want_hidden, top)
        self.memories[model].release()
        return as_block(columns)

    def update(self, weights: dict[str, Tensor]) -> None:
        """Take over the weights of an actor's rank in the same place of a set of the same size."""
        self.files.wait_for_copy()
        fsdp.reshard(self.policies[0])
        put_weights(weights, self.policies[0])
