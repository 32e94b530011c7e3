"""The roles of the training loop over worker sets: actor and reference."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_rl.algos.aggregate import group_tokens
from grpo_rl.algos.objective import Objective
from grpo_rl.algos.shaping import AdaptiveEntropy
from grpo_rl.checkpoint.files import Files, merge, write_file
from grpo_rl.cluster.processes.worker_host import track_apart
from grpo_rl.cluster.processes.worker_sets import WorkerSet
from grpo_rl.cluster.recovery.out_of_memory import Cut
from grpo_rl.cluster.recovery.supervised_sets import SupervisedSet
from grpo_rl.cluster.roles.micro_batches import combine_stats, forward, gather, mini_batches, per_token, train, trained_lengths
from grpo_rl.config.derived import MicroBatchRule
from grpo_rl.config.schema.tree import ActorConfig
from grpo_rl.types import Batch, Metrics

if TYPE_CHECKING:
    from grpo_rl.plan.decisions import OldLogprobs

_OWN = "actor.json"
"""Where a checkpoint has what the actor's controller remembers."""


class ActorRole:
    """roles.Actor over FSDP2 ranks."""

    def __init__(
        self,
        worker_set: SupervisedSet,
        config: ActorConfig,
        *,
        train_rule: MicroBatchRule,
        forward_rule: MicroBatchRule,
        old_logprobs: OldLogprobs,
        objective: Objective,
        tokenizer: Any = None,
        splits: bool = False,
    ) -> None:
        self.worker_set = worker_set
        self.config = config
        self.objective = objective
        self.train_cut = Cut(worker_set, train_rule, splits)
        self.forward_cut = Cut(worker_set, forward_rule, splits)
        self.old_from: OldLogprobs = old_logprobs
        """Which process computes old log-probs, as the plan decided."""
        self.tokenizer = tokenizer
        """Written beside every exported model, if there is one."""
        settings = config.adaptive_entropy
        self.entropy = AdaptiveEntropy(settings.target, settings.delta, config.entropy_coeff) if settings.enable else None
        """Steers the weight of the entropy bonus from one batch to the next."""
        self.num_shuffles = 0
        self.version = 0
        """Of the weights: the number of batches they were trained on."""

    def old_logprobs(self, batch: Batch) -> Batch:
        """Return the batch with `old_logprobs_T`, where something reads them.

        Where the plan has none there is one update per batch, and the policy has not moved: the ratio is exactly 1.
        """
        if self.old_from == "none":
            return batch
        if self.old_from == "engine":
            return batch.replace(old_logprobs_T=batch.rollout_logprobs_T)
        return batch.replace(old_logprobs_T=per_token(self.forward_cut, "logprobs", batch))

    def update(self, batch: Batch) -> Metrics:
        """`ppo_epochs` x mini-batches of optimizer steps; metrics averaged over the steps."""
        coefficient = None if self.entropy is None else self.entropy.value
        chosen = [self._with_columns(mini_batch, number) for number, mini_batch in enumerate(self._mini_batches(batch))]
        results, counts = train(self.train_cut, chosen, coefficient)
        self.version += 1
        metrics = combine_stats(results, counts)
        if self.entropy is not None and coefficient is not None:
            metrics["actor/entropy_coeff"] = coefficient
            if any(step_counts.num_tokens for step_counts in counts) and math.isfinite(metrics["actor/entropy"]):
                self.entropy.update(metrics["actor/entropy"])
        return metrics

    def save(self, folder: Path) -> Files:
        """Write the policy's state; the mini-batch shuffle's position is part of it."""
        return merge(self.worker_set.call("save", str(folder))) | {_OWN: write_file(folder / _OWN, [self._own().encode()])}

    def begin_save(self, folder: Path, check: bool) -> None:
        """`save`, of the state of this moment, while the training goes on; with `check` the files are read back."""
        self.worker_set.call("begin_save", str(folder), check, {_OWN: self._own()})

    def saved(self, wait_s: float) -> Files | None:
        """What the save that was begun has written; None when it has not ended within `wait_s`.

        Raises CheckpointError when it failed, SaveLost when a process that was saving is gone.
        """
        written = self.worker_set.call("saved", wait_s)
        return None if None in written else merge(written)

    def save_bytes(self) -> int:
        """About how much `save` writes."""
        return sum(self.worker_set.call("save_bytes"))

    def _own(self) -> str:
        state: dict[str, Any] = {"num_shuffles": self.num_shuffles, "version": self.version}
        if self.entropy is not None:
            state["entropy"] = self.entropy.state_dict()
        return json.dumps(state)

    def committed(self, folder: Path) -> None:
        """What the last `save` wrote stays in `folder`: a recovery may start from there."""
        self.worker_set.committed(folder)

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote."""
        self.worker_set.call("load", str(folder))
        state = json.loads((folder / _OWN).read_text())
        self.num_shuffles, self.version = int(state["num_shuffles"]), int(state["version"])
        # A run may switch the steering on when it resumes: then it starts from the configured weight.
        if self.entropy is not None and "entropy" in state:
            self.entropy.load_state_dict(state["entropy"])

    def export(self, folder: Path) -> None:
        """Write a Hugging Face folder."""
        self.worker_set.call("export", str(folder))
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)

    def _mini_batches(self, batch: Batch) -> list[Batch]:
        """Whole prompt groups, `ppo_mini_batch_size` of them each, for every epoch."""
        seeds: list[int | None] = [None] * self.config.ppo_epochs
        if self.config.shuffle:
            first = self.config.data_loader_seed * 1_000_003 + self.num_shuffles
            seeds = list(range(first, first + self.config.ppo_epochs))
            self.num_shuffles += self.config.ppo_epochs
        return mini_batches(batch, self.config.ppo_mini_batch_size, seeds)

    def _with_columns(self, mini_batch: Batch, number: int) -> Batch:
        """The mini-batch with what the objective has to know of the whole of it."""
        columns: dict[str, Tensor] = {}
        if self.objective.needs_group_tokens:
            columns["group_tokens_N"] = group_tokens(trained_lengths(mini_batch), mini_batch.group_N)
        if self.objective.needs_selection:
            assert mini_batch.advantages_T is not None and mini_batch.old_logprobs_T is not None
            seed = (self.config.data_loader_seed * 1_000_003 + self.version) * 1_009 + number
            generator = torch.Generator().manual_seed(seed)
            columns["selected_T"] = self._selected(
                mini_batch.advantages_T, mini_batch.old_logprobs_T, mini_batch.keep_T, generator
            )
        return mini_batch.replace(**columns)

    def _selected(self, advantages_T: Tensor, old_T: Tensor, keep_T: Tensor | None, generator: torch.Generator) -> Tensor:
        if keep_T is None:
            return self.objective.select(advantages_T, old_T, generator)
        chosen = self.objective.select(advantages_T[keep_T], old_T[keep_T], generator)
        return torch.zeros_like(keep_T).masked_scatter(keep_T, chosen)


class ReferenceRole:
    """roles.Reference over forward-only ranks."""

    def __init__(self, worker_set: WorkerSet, *, rule: MicroBatchRule, want_hidden: bool, splits: bool = False) -> None:
        self.cut = Cut(worker_set, rule, splits)
        self.want_hidden = want_hidden

    def logprobs(self, batch: Batch) -> Batch:
        """The batch with `ref_logprobs_T`, and `ref_hidden_TD` for the full KL."""
        rows, columns = forward(self.cut, "logprobs", batch, self.want_hidden)
        batch = batch.replace(ref_logprobs_T=gather(batch, rows, [c["logprobs_T"] for c in columns]))
        if self.want_hidden:
            batch = batch.replace(ref_hidden_TD=gather(batch, rows, [c["hidden_TD"] for c in columns]))
        return batch


def actor_factory(*arguments: Any) -> Any:
    """An ActorWorker, imported in the process that will run it."""
    from grpo_rl.workers.actor import ActorWorker

    return ActorWorker(*arguments)


def reference_factory(spec: Any, rank: Any, offload: bool) -> Any:
    """A ReferenceWorker, imported in the process that will run it."""
    from grpo_rl.workers.reference import ReferenceWorker

    return ReferenceWorker(spec, rank, offload=offload)


def rollout_factory(spec: Any) -> Any:
    """A RolloutWorker, imported in the process that will run it."""
    from grpo_rl.workers.rollout import RolloutWorker

    if spec.tensor_parallel_size > 1:
        track_apart()
    return RolloutWorker(spec)
