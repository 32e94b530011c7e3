"""The reward model of the training loop over its worker group: optimizer steps, scores of a batch, and its export."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_rl.cluster.processes.worker_group import WorkerGroup
from grpo_rl.cluster.roles.dispatch import combine_stats, computed, dispatch, update_call
from grpo_rl.cluster.roles.reward_model_role import reward_model_spec
from grpo_rl.cluster.roles.saved_role import SavedRole
from grpo_rl.config.derived import MicroBatchRule
from grpo_rl.types import Batch, Metrics
from grpo_rl.workers.specs import TrainedRewardModelSpec

if TYPE_CHECKING:
    from grpo_rl.plan.decisions import Plan

_READ = ("chosen_N", "margins_N", "labels_T")
"""The columns that the losses read beside those of a shard."""


class TrainedRewardModelRole(SavedRole):
    """The `protocols.TrainedRewardModel` whose work is done by FSDP2 ranks."""

    folder = "reward_model"
    absent = (
        "has no reward model: it was written by a run that trained none; go on with that trainer.schedule, or start anew with "
        "trainer.resume_mode=disable"
    )

    def __init__(self, worker_group: WorkerGroup, *, rule: MicroBatchRule, pairs: bool, tokenizer: Any = None) -> None:
        self.worker_group = worker_group
        self.rule = rule
        self.pairs = pairs
        """True where it learns from pairs, False where from labelled steps."""
        self.tokenizer = tokenizer
        """The tokenizer that is written beside every exported model, if there is one."""

    def update(self, batch: Batch) -> Metrics:
        """Take one optimizer step on the whole batch; return its metrics. Raises ValueError for a batch of another kind."""
        batch = self._scored(batch)
        if (batch.chosen_N if self.pairs else batch.labels_T) is None:
            raise ValueError("a batch of pairs has chosen_N, one of labelled steps labels_T")
        everything = [list(range(batch.num_rollouts))]
        # The two sides of a pair are compared in one micro-batch.
        units = batch.group_N.tolist() if self.pairs else None
        dispatched = dispatch(self.worker_group, batch, everything, units, rule=self.rule)
        call = update_call(dispatched, batch, everything, _READ)
        results = self.worker_group.call_in_passes("update", self.rule, call.lengths, call.arguments)
        return combine_stats(results, call.counts, role="reward_model")

    def scores(self, batch: Batch) -> Tensor:
        """Return the score of each rollout of pairs, or that at each labelled position, in the batch's order."""
        dispatched = dispatch(self.worker_group, self._scored(batch), rule=self.rule)
        return computed(self.worker_group, self.rule, "position_scores", dispatched, {"": "scores_T"})[""].read()

    def _scored(self, batch: Batch) -> Batch:
        """Return the batch whose trained tokens are those with a score: of pairs the last one of every response."""
        return at_the_end(batch) if self.pairs else batch

    def export(self, folder: Path) -> None:
        """Write a Hugging Face folder, which reward.reward_model.model_path loads."""
        self.worker_group.call("export", str(folder))
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)


def at_the_end(batch: Batch) -> Batch:
    """Return the batch that trains the last trained token of every rollout only: the one with the score of the whole."""
    last_T = torch.zeros(batch.num_trained_tokens, dtype=torch.bool)
    last_T[batch.trained_lengths_N.cumsum(0)[batch.trained_lengths_N > 0] - 1] = True
    return batch.keep(last_T)


def make_trained_reward_model(plan: Plan, worker_group: WorkerGroup, tokenizer: Any) -> TrainedRewardModelRole:
    """Return the reward model's role over its processes."""
    own = plan.config.reward.reward_model
    return TrainedRewardModelRole(
        worker_group,
        rule=MicroBatchRule(
            own.max_token_len_per_gpu, None, plan.config.actor_rollout_ref.actor.use_prefix_grouper is not False
        ),
        pairs=own.train.loss == "bradley_terry",
        tokenizer=tokenizer,
    )


def trained_reward_model_spec(plan: Plan, path: str) -> TrainedRewardModelSpec:
    """Return what every rank is built from; `path` is the model's folder on this machine."""
    own = plan.config.reward.reward_model
    return TrainedRewardModelSpec(
        reward_model_spec(own, path),
        own.train,
        plan.sizes.reward_model_updates,
        plan.config.trainer.seed,
        plan.config.actor_rollout_ref.actor.use_prefix_grouper is not False,
    )


def trained_reward_model_factory(*arguments: Any) -> Any:
    """Return a TrainedRewardModelWorker, imported in the process that will run it."""
    from grpo_rl.workers.reward_model import TrainedRewardModelWorker

    return TrainedRewardModelWorker(*arguments)
