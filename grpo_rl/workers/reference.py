"""The reference policy: frozen weights, log-probs on request; of iterated training, a copy of the policy from time to time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from grpo_rl.checkpoint import policy_state
from grpo_rl.checkpoint.files import Files
from grpo_rl.checkpoint.rank_files import RankFiles
from grpo_rl.faults import fault_point
from grpo_rl.models import fsdp
from grpo_rl.types import Batch
from grpo_rl.workers.device_memory import DeviceMemory
from grpo_rl.workers.model_work import ModelWork
from grpo_rl.workers.sharded_policy import as_block, build_policy, join_set, reference_columns
from grpo_rl.workers.specs import PolicySpec, Rank, Rows


class ReferenceWorker:
    """One rank of the reference."""

    def __init__(self, spec: PolicySpec, rank: Rank, *, offload: bool) -> None:
        self.device = join_set(rank, in_host_memory=spec.in_host_memory)
        self.share_prompts = spec.share_prompts
        self.policy = build_policy(spec, rank, self.device)
        self.work = ModelWork(self.policy)
        self.files = RankFiles(self.policy, None, None, rank.rank, rank.patience_s)
        self.memory = DeviceMemory(self.policy, self.device, param_offload=offload, in_host_memory=spec.in_host_memory)
        self.memory.release()

    def logprobs(self, shard: Batch, micro_batches: Sequence[Rows], want_hidden: bool) -> tuple[bool, dict[str, Any]]:
        """Return the micro-batches' log-probs of trained tokens, with `want_hidden` their last hidden states, as `as_block` does."""
        fault_point("reference.logprobs")
        self.memory.load_weights()
        wanted = {"share_prompts": self.share_prompts, "want_hidden": want_hidden}
        columns = reference_columns(self.policy, shard, micro_batches, self.device, **wanted)
        self.memory.release()
        return as_block(columns)

    def vacate(self) -> None:
        """Move everything to host memory, so that an engine can be built on this device."""
        self.memory.vacate()

    def occupy(self) -> None:
        """Bring back what belongs on the device."""
        self.memory.occupy()

    # ---- iterated training: new weights, which are part of checkpoints. No collectives -----------------------

    def update(self, weights: dict[str, Tensor]) -> None:
        """Take over the weights of an actor's rank in the same place of a set of the same size."""
        fault_point("reference.update")
        self.files.wait_for_copy()
        fsdp.reshard(self.policy)
        policy_state.put_weights(weights, self.policy)

    def save(self, folder: str) -> Files:
        """Write this rank's share of the weights; return the files that it wrote."""
        self.files.save(Path(folder))
        return self.files.saved() or {}

    def begin_save(self, folder: str, check: bool) -> None:
        """Begin to write what `save` would write now; with `check` it is read back."""
        self.files.save(Path(folder), check=check, background=True)

    def saved(self, wait_s: float) -> Files | None:
        """Return the files of the last save; None while they are written, and where this process has not begun one."""
        return self.files.saved(wait_s)

    def save_bytes(self) -> int:
        """Return about how much `save` writes."""
        return self.files.num_bytes()

    def load(self, folder: str) -> None:
        """Restore what `save` wrote, by any number of ranks."""
        self.files.load(Path(folder))
