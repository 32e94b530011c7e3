"""The roles of the training loop over worker groups: actor and reference."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_rl.algos.aggregate import count, group_tokens
from grpo_rl.algos.correction import kept_lengths
from grpo_rl.algos.objective import Objective
from grpo_rl.algos.shaping import AdaptiveEntropy
from grpo_rl.cluster.groups import WorkerGroup
from grpo_rl.cluster.supervised import SupervisedGroup
from grpo_rl.config.derived import MicroBatchRule
from grpo_rl.config.schema import ActorConfig
from grpo_rl.data.balance import plan_micro_batches
from grpo_rl.types import Batch, Counts, Metrics
from grpo_rl.workers.actor import OptimizerStep


class ActorGroup:
    """roles.Actor over FSDP2 ranks."""

    def __init__(
        self,
        group: SupervisedGroup,
        config: ActorConfig,
        *,
        train_rule: MicroBatchRule,
        forward_rule: MicroBatchRule,
        always_old: bool,
        objective: Objective,
        old_from_engine: bool = False,
        tokenizer: Any = None,
    ) -> None:
        self.group = group
        self.config = config
        self.objective = objective
        self.train_rule = train_rule
        self.forward_rule = forward_rule
        self.always_old = always_old
        """Recompute old log-probs even where one update makes the ratio exactly 1, because something else reads them."""
        self.old_from_engine = old_from_engine
        """Take the engine's log-probs as the old ones (algorithm.rollout_correction.bypass_mode)."""
        self.tokenizer = tokenizer
        """Written beside every exported model, if there is one."""
        settings = config.adaptive_entropy
        self.entropy = AdaptiveEntropy(settings.target, settings.delta, config.entropy_coeff) if settings.enable else None
        """Steers the weight of the entropy bonus from one batch to the next."""
        self.num_shuffles = 0
        self.version = 0
        """Of the weights: the number of batches they were trained on."""

    def old_logprobs(self, batch: Batch) -> Batch:
        """The batch with `old_logprobs_T` where a later update, or the reward, reads them.

        With one update per batch the policy has not moved: the update's own forward pass gives them.
        """
        if self.old_from_engine:
            return batch.replace(old_logprobs_T=batch.rollout_logprobs_T)
        if self.updates_per_batch(batch) == 1 and not self.always_old:
            return batch
        rows = plan(batch, self.forward_rule, len(self.group))
        parts = self.group.call_each("logprobs", [(micro_batches(batch, rank_rows),) for rank_rows in rows])
        return batch.replace(old_logprobs_T=gather(batch, rows, parts))

    def update(self, batch: Batch) -> Metrics:
        """`ppo_epochs` x mini-batches of optimizer steps; metrics averaged over the steps."""
        counts: list[Counts] = []
        coefficient = None if self.entropy is None else self.entropy.value
        per_rank: list[list[OptimizerStep]] = [[] for _ in range(len(self.group))]
        for number, chosen in enumerate(self._mini_batches(batch)):
            counts.append(count(trained_lengths(chosen), chosen.group_N))
            mini_batch = self._with_columns(chosen, number)
            for steps, rows in zip(per_rank, plan(mini_batch, self.train_rule, len(self.group)), strict=True):
                steps.append(OptimizerStep(counts[-1], tuple(micro_batches(mini_batch, rows)), coefficient))
        results = self.group.call_each("update", [(steps,) for steps in per_rank])
        self.version += 1
        metrics = combine_stats(results, counts)
        if self.entropy is not None and coefficient is not None:
            metrics["actor/entropy_coeff"] = coefficient
            if any(step_counts.num_tokens for step_counts in counts) and math.isfinite(metrics["actor/entropy"]):
                self.entropy.update(metrics["actor/entropy"])
        return metrics

    def updates_per_batch(self, batch: Batch) -> int:
        """Optimizer steps on one batch."""
        num_groups = int(batch.group_N.unique().numel())
        return self.config.ppo_epochs * -(-num_groups // self.config.ppo_mini_batch_size)

    def save(self, folder: Path) -> None:
        """Write the policy's state; the mini-batch shuffle's position is part of it."""
        self.group.call("save", str(folder))
        state: dict[str, Any] = {"num_shuffles": self.num_shuffles, "version": self.version}
        if self.entropy is not None:
            state["entropy"] = self.entropy.state_dict()
        (folder / "actor.json").write_text(json.dumps(state))

    def committed(self, folder: Path) -> None:
        """What the last `save` wrote stays in `folder`: a recovery may start from there."""
        self.group.committed(folder)

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote."""
        self.group.call("load", str(folder))
        state = json.loads((folder / "actor.json").read_text())
        self.num_shuffles, self.version = int(state["num_shuffles"]), int(state["version"])
        # A run may switch the steering on when it resumes: then it starts from the configured weight.
        if self.entropy is not None and "entropy" in state:
            self.entropy.load_state_dict(state["entropy"])

    def export(self, folder: Path) -> None:
        """Write a Hugging Face folder."""
        self.group.call("export", str(folder))
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
            columns["selected_T"] = self.objective.select(
                mini_batch.advantages_T, mini_batch.old_logprobs_T, generator, mini_batch.keep_T
            )
        return mini_batch.replace(**columns)


class ReferenceGroup:
    """roles.Reference over forward-only ranks."""

    def __init__(self, group: WorkerGroup, *, rule: MicroBatchRule, want_hidden: bool) -> None:
        self.group = group
        self.rule = rule
        self.want_hidden = want_hidden

    def logprobs(self, batch: Batch) -> Batch:
        """The batch with `ref_logprobs_T`, and `ref_hidden_TD` for the full KL."""
        rows = plan(batch, self.rule, len(self.group))
        arguments = [(micro_batches(batch, rank_rows), self.want_hidden) for rank_rows in rows]
        columns = self.group.call_each("logprobs", arguments)
        batch = batch.replace(ref_logprobs_T=gather(batch, rows, [c["logprobs_T"] for c in columns]))
        if self.want_hidden:
            batch = batch.replace(ref_hidden_TD=gather(batch, rows, [c["hidden_TD"] for c in columns]))
        return batch


def mini_batches(batch: Batch, num_groups: int, seeds: Sequence[int | None]) -> list[Batch]:
    """Whole prompt groups, `num_groups` of them each, for one pass per seed; None keeps the order of the prompts."""
    groups = batch.group_N.unique()
    chosen: list[Batch] = []
    for seed in seeds:
        order = groups
        if seed is not None:
            order = groups[torch.randperm(len(groups), generator=torch.Generator().manual_seed(seed))]
        for some in order.split(num_groups):
            chosen.append(batch.select(torch.isin(batch.group_N, some).nonzero()[:, 0]))
    return chosen


def trained_lengths(batch: Batch) -> Tensor:
    """Trained tokens of each response: those of `keep_T`, or all."""
    return batch.response_lengths_N if batch.keep_T is None else kept_lengths(batch.keep_T, batch.response_lengths_N)


def plan(batch: Batch, rule: MicroBatchRule, num_ranks: int) -> list[list[list[int]]]:
    """Rollout indices per rank and micro-batch."""
    lengths = batch.sequence_lengths_N.tolist()
    return plan_micro_batches(lengths, num_ranks, max_tokens=rule.max_tokens, max_rollouts=rule.max_rollouts)


def micro_batches(batch: Batch, rows: Sequence[list[int]]) -> list[Batch | None]:
    """The micro-batches with these rollouts; None where a rank has none."""
    return [batch.select(indices) if indices else None for indices in rows]


def gather(batch: Batch, rows: Sequence[Sequence[list[int]]], parts: Sequence[Sequence[Tensor | None]]) -> Tensor:
    """Per-token results of all ranks and micro-batches, back in the batch's order."""
    flat = [part for rank_parts in parts for part in rank_parts if part is not None]
    order = torch.tensor([index for rank_rows in rows for indices in rank_rows for index in indices])
    column = torch.cat(flat)
    lengths_K = batch.response_lengths_N[order]
    starts_N = batch.response_lengths_N.cumsum(0) - batch.response_lengths_N
    within = torch.arange(len(column)) - torch.repeat_interleave(lengths_K.cumsum(0) - lengths_K, lengths_K)
    out = torch.empty_like(column)
    out[torch.repeat_interleave(starts_N[order], lengths_K) + within] = column
    return out


def combine_stats(results: Sequence[Sequence[dict[str, float]]], counts: Sequence[Counts], role: str = "actor") -> Metrics:
    """Statistics of ranks and optimizer steps as metrics `role/...`: see `Objective.__call__` for the prefixes.

    Means over tokens are divided by the global token count of their step; steps are averaged, maxima taken.
    """
    per_step: dict[str, list[float]] = defaultdict(list)
    for step, step_counts in enumerate(counts):
        merged: dict[str, float] = {}
        for rank_steps in results:
            for key, value in rank_steps[step].items():
                merged[key] = _merge(key, merged.get(key), value)
        for key, value in merged.items():
            per_step[key].append(value / max(1, step_counts.num_tokens) if key.startswith("sum/") else value)
    metrics: Metrics = {}
    for key, values in per_step.items():
        prefix, _, name = key.partition("/")
        metrics[_metric_name(role, prefix, name)] = max(values) if prefix == "max" else math.fsum(values) / len(values)
    return metrics


def _merge(key: str, so_far: float | None, value: float) -> float:
    if so_far is None or key.startswith("same/"):
        return value
    return max(so_far, value) if key.startswith("max/") else so_far + value


def _metric_name(role: str, prefix: str, name: str) -> str:
    if name == "rollout_logprob_diff":
        return "rollout/logprob_diff_max" if prefix == "max" else "rollout/logprob_diff_mean"
    return name if name.startswith("rollout_corr/") else f"{role}/{name}"


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

    return RolloutWorker(spec)
