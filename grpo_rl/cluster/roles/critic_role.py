"""The critic of the training loop over its worker group."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from grpo_rl.algos.losses.value import explained_variance
from grpo_rl.cluster.processes.worker_group import WorkerGroup
from grpo_rl.cluster.roles.dispatch import Dispatched, computed, dispatch, mini_batches, update
from grpo_rl.cluster.roles.saved_role import SavedRole
from grpo_rl.columns import values
from grpo_rl.config.derived import MicroBatchRule
from grpo_rl.types import Batch, Metrics
from grpo_rl.workers.specs import CriticSpec, PolicySpec

if TYPE_CHECKING:
    from grpo_rl.plan.decisions import Plan


class CriticRole(SavedRole):
    """The `protocols.Critic` whose work is done by FSDP2 ranks."""

    folder = "critic"
    absent = (
        "has no critic: it was written by a run whose estimator needed none; go on with that algorithm.adv_estimator, "
        "or start anew with trainer.resume_mode=disable"
    )

    def __init__(self, worker_group: WorkerGroup, *, rule: MicroBatchRule, mini_batch_size: int, epochs: int) -> None:
        self.worker_group = worker_group
        self.rule = rule
        self.mini_batch_size = mini_batch_size
        self.epochs = epochs
        self._dispatched: Dispatched | None = None
        """The batch of this step, once the ranks have it."""

    def values(self, batch: Batch) -> Batch:
        """Return the batch with `values_T`."""
        return batch.replace(
            **computed(self.worker_group, self.rule, "values", self._dispatch(batch), {"values_T": "values_T"})
        )

    def update(self, batch: Batch) -> Metrics:
        """Take `epochs` x mini-batches of optimizer steps; return their metrics, averaged over the steps."""
        assert batch.values_T is not None and batch.returns_T is not None
        columns = ("values_T", "returns_T")
        metrics = update(self.worker_group, self.rule, self._dispatch(batch), batch, self._mini_batches(batch), columns)
        # The step ends here for these ranks: the next batch takes the place of this one.
        self._dispatched = None
        return metrics | _fit(values(batch.values_T), batch.returns_T)

    def _dispatch(self, batch: Batch) -> Dispatched:
        """Return the batch as the ranks have it, so that every mini-batch of the update is even over them."""
        if self._dispatched is None or not self._dispatched.holds(batch):
            self._dispatched = dispatch(self.worker_group, batch, self._mini_batches(batch), rule=self.rule)
        return self._dispatched

    def _mini_batches(self, batch: Batch) -> list[list[int]]:
        return mini_batches(batch, self.mini_batch_size, [None] * self.epochs)


def _fit(values_T: Tensor, returns_T: Tensor) -> Metrics:
    """Return how well the critic predicted the returns before it learnt them, over the trained tokens."""
    if not len(values_T):
        return {}
    return {
        "critic/vf_explained_var": explained_variance(values_T, returns_T),
        "critic/values/mean": float(values_T.double().mean()),
        "critic/returns/mean": float(returns_T.double().mean()),
    }


def make_critic(plan: Plan, worker_group: WorkerGroup) -> CriticRole:
    """Return the critic's role over its processes."""
    return CriticRole(
        worker_group,
        rule=plan.passes.critic,
        mini_batch_size=plan.sizes.critic_mini_batch_size,
        epochs=plan.sizes.critic_epochs,
    )


def critic_spec(plan: Plan, actor: PolicySpec) -> CriticSpec:
    """Return what every critic rank is built from; the model is the actor's unless the plan names another."""
    critic, own = plan.config.critic, plan.critic_model
    model = replace(
        actor.model,
        enable_gradient_checkpointing=critic.model.enable_gradient_checkpointing,
        enable_activation_offload=critic.model.enable_activation_offload,
    )
    if own is not None:
        model = replace(model, path=own, override_config={})
    policy = actor.sharded_as(critic.fsdp, critic.ulysses_sequence_parallel_size)
    return CriticSpec(
        model=replace(policy, model=model, train=True, path_key=actor.path_key if own is None else "critic.model.path"),
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
