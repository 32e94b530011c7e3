"""The reference policy of the training loop over its worker set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from grpo_rl.checkpoint.files import Files, make_folder, merge
from grpo_rl.cluster.recovery.out_of_memory import Cut
from grpo_rl.cluster.recovery.supervised_sets import SupervisedSet
from grpo_rl.cluster.roles.actor_role import ActorRole
from grpo_rl.cluster.roles.dealing import deal, forward, gather
from grpo_rl.config.derived import MicroBatchRule
from grpo_rl.errors import CheckpointError
from grpo_rl.types import Batch
from grpo_rl.workers.specs import Rank

FOLDER = "reference"
"""The folder of a checkpoint that contains the weights of a reference which moves."""


class ReferenceRole:
    """The `protocols.Reference` whose work is done by forward-only ranks."""

    def __init__(self, worker_set: SupervisedSet, *, rule: MicroBatchRule, want_hidden: bool, splits: bool = False) -> None:
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


class MovingReferenceRole(ReferenceRole):
    """The `protocols.MovingReference`: the reference of iterated training, whose weights are part of a checkpoint."""

    def become(self, actor: ActorRole) -> None:
        """Take over the actor's weights, rank by rank: both sets have as many ranks, and are sharded alike.

        Each rank's share goes through Ray's object store, from which only the rank in the same place reads it. A set that
        fails is made anew with the state it had, and asked again.
        """
        assert len(actor.worker_set) == len(self.worker_set), "the same number of ranks"
        self.worker_set.call_each("update", [(part,) for part in actor.worker_set.parts("weights")])

    def save(self, folder: Path) -> Files:
        """Write the weights into a folder of their own."""
        make_folder(folder / FOLDER)
        return merge(self.worker_set.call("save", str(folder / FOLDER)), FOLDER)

    def begin_save(self, folder: Path, check: bool) -> None:
        """Begin a `save` of the present weights, beside the training; with `check` the files are read back."""
        make_folder(folder / FOLDER)
        self.worker_set.call("begin_save", str(folder / FOLDER), check)

    def saved(self, wait_s: float) -> Files | None:
        """Return what the save that was begun has written, as the actor does."""
        written = self.worker_set.call("saved", wait_s)
        return None if None in written else merge(written, FOLDER)

    def save_bytes(self) -> int:
        """Return about how much `save` writes."""
        return sum(self.worker_set.call("save_bytes"))

    def committed(self, folder: Path) -> None:
        """Note that what the last `save` wrote stays in `folder`: a recovery may start from there."""
        self.worker_set.committed(folder / FOLDER)

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote. Raises CheckpointError for a checkpoint that has no reference."""
        if not (folder / FOLDER).is_dir():
            raise CheckpointError(
                f"{folder} has no reference: it was written by a run without one; go on without a KL term, or start anew with "
                "trainer.resume_mode=disable"
            )
        self.worker_set.call("load", str(folder / FOLDER))


def reference_factory(spec: Any, rank: Rank, offload: bool) -> Any:
    """Return a ReferenceWorker, imported in the process that will run it."""
    from grpo_rl.workers.reference import ReferenceWorker

    return ReferenceWorker(spec, rank, offload=offload)
