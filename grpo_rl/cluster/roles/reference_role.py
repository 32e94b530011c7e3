"""The reference policy of the training loop over its worker group."""

from __future__ import annotations

from typing import Any, ClassVar

from grpo_rl.cluster.processes.worker_group import WorkerGroup
from grpo_rl.cluster.roles.actor_role import ActorRole
from grpo_rl.cluster.roles.dispatch import Dispatched, computed, dispatch
from grpo_rl.cluster.roles.saved_role import SavedRole
from grpo_rl.config.derived import MicroBatchRule
from grpo_rl.types import Batch
from grpo_rl.workers.specs import Rank


class ReferenceRole:
    """The `protocols.Reference` whose work is done by forward-only ranks."""

    method: ClassVar[str] = "logprobs"
    """The method of a rank that computes it."""

    def __init__(
        self,
        worker_group: WorkerGroup,
        *,
        rule: MicroBatchRule,
        want_hidden: bool,
    ) -> None:
        self.worker_group = worker_group
        self.rule = rule
        self.want_hidden = want_hidden

    def logprobs(self, batch: Batch) -> Batch:
        """Return the batch with `ref_logprobs_T`, and `ref_hidden_TD` for the full KL."""
        names = {"ref_logprobs_T": "logprobs_T"} | ({"ref_hidden_TD": "hidden_TD"} if self.want_hidden else {})
        return batch.replace(
            **computed(self.worker_group, self.rule, self.method, self._dispatched(batch), names, self.want_hidden)
        )

    def _dispatched(self, batch: Batch) -> Dispatched:
        return dispatch(self.worker_group, batch, rule=self.rule)


class BaseReferenceRole(ReferenceRole):
    """The reference that is the base model under the actor's adapters: its ranks compute it, on the shards that they have."""

    method = "reference_logprobs"

    def __init__(self, actor: ActorRole, **options: Any) -> None:
        super().__init__(actor.worker_group, **options)
        self.actor = actor

    def _dispatched(self, batch: Batch) -> Dispatched:
        return self.actor.dispatched(batch)


class MovingReferenceRole(SavedRole, ReferenceRole):
    """The `protocols.MovingReference`: the reference of iterated training, whose weights are part of a checkpoint."""

    folder = "reference"
    absent = (
        "has no reference that moves: it was written by a run without a KL term, or of another trainer.schedule; go on with that "
        "configuration, or start anew with trainer.resume_mode=disable"
    )

    def become(self, actor: ActorRole) -> None:
        """Take over the actor's weights, rank by rank: both groups have as many ranks, and are sharded alike.

        Each rank's shard goes through Ray's object store, from which only the rank in the same place reads it.
        """
        assert len(actor.worker_group) == len(self.worker_group), "the same number of ranks"
        self.worker_group.call_each("update", [(part,) for part in actor.worker_group.parts("weights")])


def reference_factory(spec: Any, rank: Rank, offload: bool) -> Any:
    """Return a ReferenceWorker, imported in the process that will run it."""
    from grpo_rl.workers.reference import ReferenceWorker

    return ReferenceWorker(spec, rank, offload=offload)
