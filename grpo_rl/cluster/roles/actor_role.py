"""The actor of the training loop over its worker group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_rl.algos.aggregate import group_tokens
from grpo_rl.algos.objective import Objective
from grpo_rl.algos.shaping import AdaptiveEntropy
from grpo_rl.cluster.processes.worker_group import WorkerGroup
from grpo_rl.cluster.roles.dispatch import Dispatched, computed, dispatch, mini_batches, update
from grpo_rl.cluster.roles.saved_role import SavedRole
from grpo_rl.columns import values
from grpo_rl.config.derived import MicroBatchRule
from grpo_rl.config.schema.tree import ActorConfig
from grpo_rl.types import Batch, Metrics

if TYPE_CHECKING:
    from grpo_rl.plan.decisions import OldLogprobs

_READ = (
    "advantages_T",
    "old_logprobs_T",
    "ref_logprobs_T",
    "ref_hidden_TD",
    "teacher_logprobs_T",
    "teacher_top_logprobs_TK",
    "teacher_top_ids_TK",
    "weights_T",
    "chosen_N",
    "kl_N",
    "group_tokens_N",
)
"""The columns that an update reads beside those of the ranks' shards. Where the engine's log-probs are the old ones, the
ranks have them."""


class ActorRole(SavedRole):
    """The `protocols.Actor` whose work is done by FSDP2 ranks."""

    own_file = "actor.json"

    def __init__(
        self,
        worker_group: WorkerGroup,
        config: ActorConfig,
        *,
        train_rule: MicroBatchRule,
        forward_rule: MicroBatchRule,
        old_logprobs: OldLogprobs,
        objective: Objective,
        tokenizer: Any = None,
    ) -> None:
        self.worker_group = worker_group
        self.config = config
        self.objective = objective
        self.train_rule = train_rule
        self.forward_rule = forward_rule
        self.old_from: OldLogprobs = old_logprobs
        """The process that computes old log-probs, as the plan decided."""
        self.tokenizer = tokenizer
        """The tokenizer that is written beside every exported model, if there is one."""
        settings = config.adaptive_entropy
        self.entropy = AdaptiveEntropy(settings.target, settings.delta, config.entropy_coeff) if settings.enable else None
        """The controller of the weight of the entropy bonus from one batch to the next."""
        self.num_shuffles = 0
        self.version = 0
        """The version of the weights: the number of batches they were trained on."""
        self._dispatched: Dispatched | None = None
        """The batch of this step, once the ranks have it."""

    def old_logprobs(self, batch: Batch) -> Batch:
        """Return the batch with `old_logprobs_T`, where something reads them.

        Where the plan has none there is one update per batch, and the policy has not moved: the ratio is exactly 1.
        """
        if self.old_from == "none":
            return batch
        if self.old_from == "engine":
            return batch.replace(old_logprobs_T=batch.rollout_logprobs_T)
        names = {"old_logprobs_T": "logprobs_T"}
        return batch.replace(**computed(self.worker_group, self.forward_rule, "logprobs", self.dispatched(batch), names))

    def logprobs(self, batch: Batch) -> Tensor:
        """Return the present policy's log-probability of each trained token of a batch that is not trained on."""
        dispatched = dispatch(self.worker_group, batch, rule=self.forward_rule)
        return computed(self.worker_group, self.forward_rule, "logprobs", dispatched, {"": "logprobs_T"})[""].read()

    def update(self, batch: Batch) -> Metrics:
        """Take `ppo_epochs` x mini-batches of optimizer steps; return their metrics, averaged over the steps."""
        coefficient = None if self.entropy is None else self.entropy.value
        dispatched, chosen = self.dispatched(batch), self._mini_batches(batch)
        if self.config.shuffle:
            self.num_shuffles += self.config.ppo_epochs
        if self.objective.needs_group_tokens:
            # A group lies in one mini-batch as a whole, so its tokens there are its tokens in the batch.
            batch = batch.replace(group_tokens_N=group_tokens(batch.trained_lengths_N, batch.group_N))
        names = [name for name in _READ if name != "old_logprobs_T" or self.old_from != "engine"]
        metrics = update(
            self.worker_group,
            self.train_rule,
            dispatched,
            batch,
            chosen,
            names,
            entropy_coeff=coefficient,
            selected=self._selected(batch, chosen),
            zero_advantage_N=batch.zero_advantage() if self.objective.skips_zero_advantage else None,
        )
        # The step ends here for these ranks: the next batch takes the place of this one.
        self._dispatched = None
        self.version += 1
        if self.entropy is not None and coefficient is not None:
            metrics["actor/entropy_coeff"] = coefficient
            if batch.num_trained_tokens and math.isfinite(metrics["actor/entropy"]):
                self.entropy.update(metrics["actor/entropy"])
        return metrics

    def own_state(self) -> dict[str, Any]:
        """Return the version, the position of the shuffle of mini-batches, and the state of the entropy's controller."""
        state: dict[str, Any] = {"num_shuffles": self.num_shuffles, "version": self.version}
        return state if self.entropy is None else state | {"entropy": self.entropy.state_dict()}

    def load_own_state(self, state: dict[str, Any]) -> None:
        """Go on from this state. A run may switch the entropy's controller on when it resumes: it starts from its configured weight then."""
        self.num_shuffles, self.version = int(state["num_shuffles"]), int(state["version"])
        if self.entropy is not None and "entropy" in state:
            self.entropy.load_state_dict(state["entropy"])

    def export(self, folder: Path) -> None:
        """Write a Hugging Face folder."""
        self.worker_group.call("export", str(folder))
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)

    def dispatched(self, batch: Batch) -> Dispatched:
        """Return the batch as the ranks have it, so that every mini-batch of the update is even over them."""
        if self._dispatched is None or not self._dispatched.holds(batch):
            # The two sides of a pair are compared in one micro-batch.
            units = batch.group_N.tolist() if self.objective.needs_pairs else None
            self._dispatched = dispatch(self.worker_group, batch, self._mini_batches(batch), units, rule=self.train_rule)
        return self._dispatched

    def _mini_batches(self, batch: Batch) -> list[list[int]]:
        """Return the rollouts of each optimizer step: `ppo_mini_batch_size` whole prompt groups, for every epoch."""
        seeds: list[int | None] = [None] * self.config.ppo_epochs
        if self.config.shuffle:
            first = self.config.data_loader_seed * 1_000_003 + self.num_shuffles
            seeds = list(range(first, first + self.config.ppo_epochs))
        return mini_batches(batch, self.config.ppo_mini_batch_size, seeds)

    def _selected(self, batch: Batch, chosen: Sequence[Sequence[int]]) -> list[Tensor] | None:
        """Return, for each mini-batch, the clipped ones among the batch's tokens; None for losses without."""
        if not self.objective.needs_selection:
            return None
        advantages_T = batch.token_advantages()
        assert advantages_T is not None and batch.old_logprobs_T is not None
        old_logprobs_T, selected = values(batch.old_logprobs_T), []
        for number, indices in enumerate(chosen):
            seed = (self.config.data_loader_seed * 1_000_003 + self.version) * 1_009 + number
            generator = torch.Generator().manual_seed(seed)
            index_T = batch.token_index(list(indices))
            selected_T = torch.zeros(batch.num_trained_tokens, dtype=torch.bool)
            selected_T[index_T] = self.objective.select(advantages_T[index_T], old_logprobs_T[index_T], generator)
            selected.append(selected_T)
        return selected


def actor_factory(*arguments: Any) -> Any:
    """Return an ActorWorker, imported in the process that will run it."""
    from grpo_rl.workers.actor import ActorWorker

    return ActorWorker(*arguments)
