"""A batch dispatched to the ranks of a role: sent once per step, worked on in micro-batches, and gathered again.

The rollouts are assigned to ranks once. Each rank's shard goes into Ray's object store, and every call of the step (old
log-probs, values, the update, a retry after a failure) only refers to it: which rows of the shard make which micro-batch,
and the columns that did not exist when the shard was stored. A process fetches its shard with the first call that refers to
it and keeps it (`worker_host.Stored`). Remote columns are sent as the places of their values, and a rank fetches its own:
tokens and log-probs cross processes once, from where they were made into the rank that trains on them. Ray moves values
below its limit of 100 KiB in its messages, so that smaller blocks pass through the controller's process as bytes, unread.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_rl.cluster.processes.worker_group import WorkerGroup
from grpo_rl.columns import RemoteColumn
from grpo_rl.config.derived import MicroBatchRule
from grpo_rl.data.balance import Prompts, cut_shards, split_over_ranks
from grpo_rl.types import Batch, Counts, Metrics, segments_at
from grpo_rl.workers.specs import OptimizerStep, Rows, Update

FORWARD_COLUMNS = (
    "prompt_lengths_N",
    "response_lengths_N",
    "group_N",
    "token_ids_S",
    "rewards_N",
    "rollout_logprobs_T",
    "positions_T",
    "trained_lengths_N",
    "support_counts_T",
    "support_ids_M",
)
"""The columns a shard is stored with: those that exist before any pass over the batch."""
ALONE = MicroBatchRule(None, 1)
"""Passes of single rollouts, each by one rank."""


@dataclass(frozen=True, slots=True)
class Dispatched:
    """A batch as it was dispatched: the rollouts of each rank, and where its shard is stored."""

    batch: Batch
    shards: list[list[int]]
    """The rollouts of each rank, or of each group of ranks that compute a pass together, in the order of its shard."""
    stored: list[Any]
    units: Sequence[int] | None = None
    """The unit of each rollout, whose rollouts stay together in a micro-batch; None: each is one by itself."""

    def holds(self, batch: Batch) -> bool:
        """Return whether `batch` is this one, with other columns or with fewer trained tokens."""
        return batch.token_ids_S is self.batch.token_ids_S

    def micro_batches(self, chosen: Sequence[int], rule: MicroBatchRule) -> list[list[Rows]]:
        """Return, for each rank, the rows of its shard that make each micro-batch over the rollouts `chosen`."""
        row = {index: number for shard in self.shards for number, index in enumerate(shard)}
        wanted = set(chosen)
        shards = [[index for index in shard if index in wanted] for shard in self.shards]
        lengths = self.batch.sequence_lengths_N.tolist()
        # A rollout that is not chosen may be longer than a micro-batch.
        own = [length if index in wanted else 0 for index, length in enumerate(lengths)]
        together: dict[int, list[int]] = defaultdict(list)
        for index in wanted:
            together[index if self.units is None else self.units[index]].append(lengths[index])
        # What stays together is never cut.
        most, tokens = rule.max_rollouts, rule.max_tokens
        most = None if most is None else max([most, *map(len, together.values())])
        tokens = None if tokens is None else max([tokens, *map(sum, together.values())])
        prompts = prompts_of(self.batch) if rule.shares_prompts else None
        cut = cut_shards(shards, own, max_tokens=tokens, max_rollouts=most, units=self.units, prompts=prompts)
        return [[tuple(row[index] for index in indices) for indices in rank] for rank in cut]

    def updates(self, batch: Batch, names: Sequence[str], steps: Sequence[Sequence[OptimizerStep]]) -> list[Update]:
        """Return each rank's part of an update on `batch`: the columns `names`, where they are there, and its steps."""
        trained_T = None
        if batch.positions_T is not self.batch.positions_T:
            trained_S = torch.zeros(len(batch.token_ids_S), dtype=torch.bool)
            trained_S[batch.positions()] = True
            trained_T = trained_S[self.batch.positions()]
        columns = {name: getattr(batch, name) for name in names if getattr(batch, name) is not None}
        # What all tokens of a rollout share, as most advantages are, is sent once for each rollout.
        spread = {} if batch.advantages_N is None or "advantages_T" not in names else {"advantages_T": batch.advantages_N}
        updates = []
        for shard, rank_steps in zip(self.shards, steps, strict=True):
            rows = torch.tensor(shard, dtype=torch.long)
            own = {
                name: column[rows] if name.endswith("_N") else segments_at(column, batch.trained_lengths_N, rows)
                for name, column in columns.items()
            }
            kept = None if trained_T is None else segments_at(trained_T, self.batch.trained_lengths_N, rows)
            updates.append(Update(own, kept, tuple(rank_steps), {name: values[rows] for name, values in spread.items()}))
        return updates


def prompts_of(batch: Batch) -> Prompts:
    """Return which rollouts of the batch have a prompt in common: those of a group."""
    return Prompts(batch.group_N.tolist(), batch.prompt_lengths_N.tolist())


def dispatch(
    ranks: WorkerGroup,
    batch: Batch,
    mini_batches: Sequence[Sequence[int]] = (),
    units: Sequence[int] | None = None,
    *,
    rule: MicroBatchRule = ALONE,
) -> Dispatched:
    """Assign the rollouts to ranks, so that each of the mini-batches is even over them, and store each rank's shard.

    Where the rule shares prompts, a group's rollouts go to one rank, as far as the ranks stay even. Ranks that compute a
    pass together get one shard for all of them.
    """
    lengths = batch.sequence_lengths_N.tolist()
    prompts = prompts_of(batch) if rule.shares_prompts else None
    num_shards = len(ranks) // rule.sequence_ranks
    shards = split_over_ranks(lengths, num_shards, units=units, mini_batches=mini_batches, prompts=prompts)
    bare = Batch(**{name: getattr(batch, name) for name in FORWARD_COLUMNS})
    return Dispatched(batch, shards, ranks.store([bare.select(shard) for shard in shards]), units)


def update(
    ranks: WorkerGroup,
    rule: MicroBatchRule,
    dispatched: Dispatched,
    batch: Batch,
    mini_batches: Sequence[Sequence[int]],
    names: Sequence[str],
    *,
    entropy_coeff: float | None = None,
    selected: Sequence[Tensor] | None = None,
    zero_advantage_N: Tensor | None = None,
) -> Metrics:
    """Have all ranks take one optimizer step per mini-batch; return their statistics as metrics of their role.

    `names` are the columns that the update reads beside those of the shard. `selected` has, for each mini-batch, a bool
    for every trained token of the batch. The rollouts of `zero_advantage_N` add nothing to the gradient: they get micro-batches
    of their own, without a backward pass. All ranks have equally many of either kind, because FSDP's collectives differ.
    """
    forward_only = [False] * batch.num_rollouts if zero_advantage_N is None else zero_advantage_N.tolist()
    alive_N = (batch.trained_lengths_N > 0).tolist()
    # A rollout without a trained token has no gradient: its pass is saved.
    trained = [[index for index in indices if alive_N[index]] for indices in mini_batches]
    counts = [Counts.of(batch.trained_lengths_N[indices], batch.group_N[indices]) for indices in mini_batches]
    steps: list[list[OptimizerStep]] = [[] for _ in dispatched.shards]
    for number, indices in enumerate(trained):
        planned = dispatched.micro_batches([index for index in indices if not forward_only[index]], rule)
        others = [index for index in indices if forward_only[index]]
        without_backward = dispatched.micro_batches(others, rule) if others else [[] for _ in steps]
        for own, shard, rows, more in zip(steps, dispatched.shards, planned, without_backward, strict=True):
            selected_T = None if selected is None else selected[number][batch.token_index(shard)]
            own.append(OptimizerStep(counts[number], tuple(rows), tuple(more), entropy_coeff, selected_T))
    arguments = list(zip(dispatched.stored, dispatched.updates(batch, names, steps), strict=True))
    results = ranks.call_each("update", _for_every_rank(arguments, rule))[:: rule.sequence_ranks]
    return combine_stats(results, counts, ranks.role)


def computed(
    ranks: WorkerGroup, rule: MicroBatchRule, method: str, dispatched: Dispatched, names: Mapping[str, str], *arguments: Any
) -> dict[str, RemoteColumn]:
    """Return columns that `method` of the ranks computes over the whole batch; `names` has their names in the ranks' results.

    The results stay in the object store of the ranks' machines.
    """
    batch = dispatched.batch
    chosen = (batch.trained_lengths_N > 0).nonzero()[:, 0].tolist()
    planned = dispatched.micro_batches(chosen, rule)
    orders = [[shard[row] for rows in rank for row in rows] for shard, rank in zip(dispatched.shards, planned, strict=True)]
    asked = [(stored, rank, *arguments) for stored, rank in zip(dispatched.stored, planned, strict=True)]
    results = ranks.call_for_two(method, _for_every_rank(asked, rule))[:: rule.sequence_ranks]
    finite, blocks = all(one for one, _ in results), [block for _, block in results]
    lengths_N = batch.trained_lengths_N
    return {ours: RemoteColumn.of_results(name, blocks, orders, lengths_N, finite=finite) for ours, name in names.items()}


def _for_every_rank(arguments: Sequence[tuple[Any, ...]], rule: MicroBatchRule) -> list[tuple[Any, ...]]:
    """Return the arguments of every rank from those of every shard: ranks that compute a pass together have the same shard."""
    return [one for one in arguments for _ in range(rule.sequence_ranks)]


def mini_batches(batch: Batch, num_groups: int, seeds: Sequence[int | None]) -> list[list[int]]:
    """Return mini-batches of `num_groups` whole prompt groups, as rollouts: a pass over all groups for each seed.

    A seed shuffles the groups of its pass; None keeps the prompts' order.
    """
    groups = batch.group_N.unique()
    chosen: list[list[int]] = []
    for seed in seeds:
        order = groups
        if seed is not None:
            order = groups[torch.randperm(len(groups), generator=torch.Generator().manual_seed(seed))]
        chosen += [torch.isin(batch.group_N, some).nonzero()[:, 0].tolist() for some in order.split(num_groups)]
    return chosen


def combine_stats(results: Sequence[Sequence[dict[str, float]]], counts: Sequence[Counts], role: str) -> Metrics:
    """Return statistics of ranks and optimizer steps as metrics `role/...`: see `Objective.__call__` for the prefixes.

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
    if name == "rollout_entropy":
        return "rollout/entropy"
    if name == "rollout_logprob_diff":
        return "rollout/logprob_diff_max" if prefix == "max" else "rollout/logprob_diff_mean"
    return name if name.startswith("rollout_corr/") else f"{role}/{name}"
