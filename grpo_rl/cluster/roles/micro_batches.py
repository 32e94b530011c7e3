"""What ranks are asked with: a batch cut into mini- and micro-batches, and their answers put together again."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from grpo_rl.algos.aggregate import count
from grpo_rl.algos.correction import kept_lengths
from grpo_rl.cluster.recovery.out_of_memory import Cut
from grpo_rl.config.derived import MicroBatchRule
from grpo_rl.data.balance import plan_micro_batches
from grpo_rl.types import Batch, Counts, Metrics
from grpo_rl.workers.specs import OptimizerStep


def train(
    cut: Cut, mini_batches: Sequence[Batch], entropy_coeff: float | None = None
) -> tuple[list[list[dict[str, float]]], list[Counts]]:
    """One optimizer step per mini-batch on all ranks: the ranks' statistics of each, and the counts they are divided by."""
    counts = [count(trained_lengths(mini_batch), mini_batch.group_N) for mini_batch in mini_batches]

    def steps(rule: MicroBatchRule) -> list[tuple[list[OptimizerStep]]]:
        per_rank: list[list[OptimizerStep]] = [[] for _ in range(len(cut.worker_set))]
        for mini_batch, step_counts in zip(mini_batches, counts, strict=True):
            for own, rows in zip(per_rank, plan(mini_batch, rule, len(cut.worker_set)), strict=True):
                own.append(OptimizerStep(step_counts, tuple(micro_batches(mini_batch, rows)), entropy_coeff))
        return [(own,) for own in per_rank]

    lengths = [mini_batch.sequence_lengths_N.tolist() for mini_batch in mini_batches]
    return cut.call("update", lengths, steps), counts


def forward(cut: Cut, method: str, batch: Batch, *arguments: Any) -> tuple[list[list[list[int]]], list[Any]]:
    """Results by rank of a pass over the batch, and the rows that each of its micro-batches had."""
    planned: list[list[list[list[int]]]] = []

    def parts(rule: MicroBatchRule) -> list[tuple[Any, ...]]:
        planned.append(plan(batch, rule, len(cut.worker_set)))
        return [(micro_batches(batch, rank_rows), *arguments) for rank_rows in planned[-1]]

    results = cut.call(method, [batch.sequence_lengths_N.tolist()], parts)
    return planned[-1], results


def per_token(cut: Cut, method: str, batch: Batch) -> Tensor:
    """A column that the ranks work out, one number per trained token."""
    rows, parts = forward(cut, method, batch)
    return gather(batch, rows, parts)


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
