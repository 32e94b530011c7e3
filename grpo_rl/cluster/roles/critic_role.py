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
from grpo_rl.cluster.roles.micro_batches import combine_stats, mini_batches, per_token, train
from grpo_rl.config.derived import MicroBatchRule
from grpo_rl.errors import CheckpointError
from grpo_rl.types import Batch, Metrics
from grpo_rl.workers.specs import CriticSpec, PolicySpec

if TYPE_CHECKING:
    from grpo_rl.plan.decisions import Plan

FOLDER = "critic"
"""Where a checkpoint has the critic's part."""


class CriticRole:
    """roles.Critic over FSDP2 ranks."""

    def __init__(
        self, worker_set: SupervisedSet, *, rule: MicroBatchRule, mini_batch_size: int, epochs: int, splits: bool = False
    ) -> None:
        self.worker_set = worker_set
        self.cut = Cut(worker_set, rule, splits)
        self.mini_batch_size = mini_batch_size
        self.epochs = epochs

    def values(self, batch: Batch) -> Batch:
        """The batch with `values_T`."""
        return batch.replace(values_T=per_token(self.cut, "values", batch))

    def update(self, batch: Batch) -> Metrics:
        """`epochs` x mini-batches of optimizer steps; metrics averaged over the steps."""
        assert batch.values_T is not None and batch.returns_T is not None
        # What the critic does not read need not travel.
        lean = batch.replace(ref_hidden_TD=None, ref_logprobs_T=None, old_logprobs_T=None, weights_T=None)
        results, counts = train(self.cut, mini_batches(lean, self.mini_batch_size, [None] * self.epochs))
        return combine_stats(results, counts, role="critic") | _fit(batch, batch.values_T, batch.returns_T)

    def save(self, folder: Path) -> Files:
        """Write the critic's state into a folder of its own."""
        make_folder(folder / FOLDER)
        return merge(self.worker_set.call("save", str(folder / FOLDER)), FOLDER)

    def begin_save(self, folder: Path, check: bool) -> None:
        """`save`, of the state of this moment, while the training goes on; with `check` the files are read back."""
        make_folder(folder / FOLDER)
        self.worker_set.call("begin_save", str(folder / FOLDER), check)

    def saved(self, wait_s: float) -> Files | None:
        """As the actor's."""
        written = self.worker_set.call("saved", wait_s)
        return None if None in written else merge(written, FOLDER)

    def save_bytes(self) -> int:
        """About how much `save` writes."""
        return sum(self.worker_set.call("save_bytes"))

    def committed(self, folder: Path) -> None:
        """What the last `save` wrote stays in `folder`: a recovery may start from there."""
        self.worker_set.committed(folder / FOLDER)

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote. Raises CheckpointError for a checkpoint of a run without a critic."""
        if not (folder / FOLDER).is_dir():
            raise CheckpointError(
                f"{folder} has no critic: it was written by a run whose estimator needed none; go on with that "
                "algorithm.adv_estimator, or start anew with trainer.resume_mode=disable"
            )
        self.worker_set.call("load", str(folder / FOLDER))


def _fit(batch: Batch, values_T: Tensor, returns_T: Tensor) -> Metrics:
    """How well the critic knew the returns before it learnt them, over the trained tokens."""
    if batch.keep_T is not None:
        values_T, returns_T = values_T[batch.keep_T], returns_T[batch.keep_T]
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
    """A CriticWorker, imported in the process that will run it."""
    from grpo_rl.workers.critic import CriticWorker

    return CriticWorker(*arguments)
