"""The reference policy of the training loop over its worker set."""

from __future__ import annotations

from typing import Any

from grpo_rl.cluster.processes.worker_sets import WorkerSet
from grpo_rl.cluster.recovery.out_of_memory import Cut
from grpo_rl.cluster.roles.dealing import deal, forward, gather
from grpo_rl.config.derived import MicroBatchRule
from grpo_rl.types import Batch
from grpo_rl.workers.specs import Rank


class ReferenceRole:
    """roles.Reference over forward-only ranks."""

    def __init__(self, worker_set: WorkerSet, *, rule: MicroBatchRule, want_hidden: bool, splits: bool = False) -> None:
        self.worker_set = worker_set
        self.cut = Cut(worker_set, rule, splits)
        self.want_hidden = want_hidden

    def logprobs(self, batch: Batch) -> Batch:
        """Return the batch with `ref_logprobs_T`, and `ref_hidden_TD` for the full KL."""
        order, columns = forward(self.cut, "logprobs", deal(self.worker_set, batch), self.want_hidden)
        batch = batch.replace(ref_logprobs_T=gather(batch, order, [c["logprobs_T"] for c in columns]))
        if self.want_hidden:
            batch = batch.replace(ref_hidden_TD=gather(batch, order, [c["hidden_TD"] for c in columns]))
        return batch


def reference_factory(spec: Any, rank: Rank, offload: bool) -> Any:
    """Return a ReferenceWorker, imported in the process that will run it."""
    from grpo_rl.workers.reference import ReferenceWorker

    return ReferenceWorker(spec, rank, offload=offload)
