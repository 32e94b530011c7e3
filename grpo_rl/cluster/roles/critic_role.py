"""The critic of the training loop over its worker set."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from grpo_rl.algos.losses.value import explained_variance
from grpo_rl.checkpoint.files import Files, make_folder, merge
from grpo_rl.cluster.recovery.out_of_memory import Cut
from grpo_rl.cluster.recovery.supervised_sets import SupervisedSet
from grpo_rl.cluster.roles.dealing import Dealt, combine_stats, deal, mini_batches, per_token, train
from grpo_rl.config.derived import MicroBatchRule
from grpo_rl.errors import CheckpointError
from grpo_rl.types import Batch, Metrics
from grpo_rl.workers.specs import CriticSpec, PolicySpec

if TYPE_CHECKING:
    from grpo_rl.plan.decisions import Plan

FOLDER = "critic"
"""The folder of a checkpoint that contains the critic's part."""


class CriticRole:
    """The `protocols.Critic` whose work is done by FSDP2 ranks."""

    def __init__(
        self, worker_set: SupervisedSet, *, rule: MicroBatchRule, mini_batch_size: int, epochs: int, splits: bool = False
    ) -> None:
        self.worker_set = worker_set
        self.cut = Cut(worker_set, rule, splits)
        self.mini_batch_size = mini_batch_size
        self.epochs = epochs
        self._dealt: Dealt | None = None
        """The batch of this step, once the ranks have it."""

    def values(self, batch: Batch) -> Batch:
        """Return the batch with `values_T`."""
        return batch.replace(values_T=per_token(self.cut, "values", self._deal(batch)))

    def update(self, batch: Batch) -> Metrics:
        """Take `epochs` x mini-batches of optimizer steps; return their metrics, averaged over the steps."""
        assert batch.values_T is not None and batch.returns_T is not None
        results, counts = train(self.cut, self._deal(batch), batch, self._mini_batches(batch), ("values_T", "returns_T"))
        # The step ends here for these ranks: the next batch takes the place of this one.
        self._dealt = None
        return combine_stats(results, counts, role="critic") | _fit(batch.values_T, batch.returns_T)

    def _deal(self, batch: Batch) -> Dealt:
        """Return the batch as the ranks have it, dealt so that every mini-batch of the update is even over them."""
        if self._dealt is None or not self._dealt.holds(batch):
            self._dealt = deal(self.worker_set, batch, self._mini_batches(batch))
        return self._dealt

    def _mini_batches(self, batch: Batch) -> list[list[int]]:
        return mini_batches(batch, self.mini_batch_size, [None] * self.epochs)

    def save(self, folder: Path) -> Files:
        """Write the critic's state into a folder of its own."""
        make_folder(folder / FOLDER)
        return merge(self.worker_set.call("save", str(folder / FOLDER)), FOLDER)

    def begin_save(self, folder: Path, check: bool) -> None:
        """Begin a `save` of the present state, beside the training; with `check` the files are read back."""
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
        """Restore what `save` wrote. Raises CheckpointError for a checkpoint of a run without a critic."""
        if not (folder / FOLDER).is_dir():
            raise CheckpointError(
                f"{folder} has no critic: it was written by a run whose estimator needed none; go on with that "
                "algorithm.adv_estimator, or start anew with trainer.resume_mode=disable"
            )
        self.worker_set.call("load", str(folder / FOLDER))


def _fit(values_T: Tensor, returns_T: Tensor) -> Metrics:
    """Return how well the critic predicted the returns before it learnt them, over the trained tokens."""
    if not len(values_T):
        return {}
    return {
        "critic/vf_explained_var": explained_variance(values_T, returns_T),
        "critic/values/mean": float(values_T.double().mean()),
        "critic/returns/mean": float(returns_T.double().mean()),
    }


def make_critic(plan: Plan, worker_set: SupervisedSet) -> CriticRole:
    """Return the critic's role over its processes."""
    return CriticRole(
        worker_set,
        rule=plan.passes.critic,
        mini_batch_size=plan.sizes.critic_mini_batch_size,
        epochs=plan.sizes.critic_epochs,
        splits=plan.passes.splits,
    )


def critic_spec(plan: Plan, actor: PolicySpec) -> CriticSpec:
    """Return what every critic rank is built from; the model is the actor's unless the plan names another."""
    critic, own = plan.config.critic, plan.critic_model
    model = replace(actor.model, enable_gradient_checkpointing=critic.model.enable_gradient_checkpointing)
    if own is not None:
        model = replace(model, path=own, override_config={})
    return CriticSpec(
        model=replace(
            actor,
            model=model,
            dtype=critic.fsdp.dtype,
            reshard_after_forward=critic.fsdp.reshard_after_forward,
            train=True,
            path_key=actor.path_key if own is None else "critic.model.path",
        ),
        optim=critic.optim,
        total_optimizer_steps=plan.sizes.critic_updates,
        seed=plan.config.trainer.seed,
        cliprange_value=critic.cliprange_value,
        param_offload=critic.fsdp.param_offload,
        optimizer_offload=critic.fsdp.optimizer_offload,
    )


def critic_factory(*arguments: Any) -> Any:
    """Return a CriticWorker, imported in the process that will run it."""
    from grpo_rl.workers.critic import CriticWorker

    return CriticWorker(*arguments)
