"""Frozen models, log-probs on request: the reference policy (of iterated training a copy of the policy), or the teachers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from grpo_rl.checkpoint.files import Files
from grpo_rl.checkpoint.rank_files import RankFiles, put_weights
from grpo_rl.faults import fault_point
from grpo_rl.models import fsdp
from grpo_rl.types import Batch
from grpo_rl.workers.device_memory import DeviceMemory
from grpo_rl.workers.model_work import ModelWork
from grpo_rl.workers.sharded_policy import as_block, build_policy, distance, join_set, reference_columns
from grpo_rl.workers.specs import PolicySpec, Rank, Rows


class ReferenceWorker:
    """One rank of the reference, or of all teachers."""

    def __init__(self, specs: Sequence[PolicySpec], rank: Rank, *, offload: bool) -> None:
        self.device = join_set(rank, in_host_memory=specs[0].in_host_memory)
        self.share_prompts = specs[0].share_prompts
        self.policies = [build_policy(spec, rank, self.device) for spec in specs]
        self.work = ModelWork(*self.policies)
        self.files = RankFiles(self.policies[0], None, None, rank.rank, rank.patience_s)
        in_host = specs[0].in_host_memory
        self.memories = [DeviceMemory(one, self.device, param_offload=offload, in_host_memory=in_host) for one in self.policies]
        self._distance = 0.0, 0
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
        """Return what `reference_columns` does, by this one of the models, as `as_block` does."""
        fault_point("reference.logprobs")
        self.memories[model].load_weights()
        wanted: dict[str, Any] = {"share_prompts": self.share_prompts, "want_hidden": want_hidden, "top": top}
        columns = reference_columns(self.policies[model], shard, micro_batches, self.device, **wanted)
        self._distance = distance(shard, micro_batches, columns["logprobs_T"])
        self.memories[model].release()
        return as_block(columns)

    def distance(self) -> tuple[float, int]:
        """Return what `sharded_policy.distance` says of the last pass."""
        return self._distance

    def vacate(self) -> None:
        """Move everything to host memory, so that an engine can be built on this device."""
        for memory in self.memories:
            memory.vacate()

    def occupy(self) -> None:
        """Bring back what belongs on the device."""
        for memory in self.memories:
            memory.occupy()

    # ---- iterated training: new weights, which are part of checkpoints. No collectives -----------------------

    def update(self, weights: dict[str, Tensor]) -> None:
        """Take over the weights of an actor's rank in the same place of a set of the same size."""
        self.files.wait_for_copy()
        fsdp.reshard(self.policies[0])
        put_weights(weights, self.policies[0])

    def save(self, folder: str, in_background: bool = False) -> None:
        """Write this rank's share of the weights, or begin to."""
        self.files.save(Path(folder), background=in_background)

    def saved(self, wait_s: float) -> Files | None:
        """Return the files of the last save; None while they are written, and where this process has not begun one."""
        return self.files.saved(wait_s)

    def save_bytes(self) -> int:
        """Return about how much `save` writes."""
        return self.files.num_bytes()

    def load(self, folder: str) -> None:
        """Restore what `save` wrote, by any number of ranks."""
        self.files.load(Path(folder))
