"""A batch dealt to the ranks of a worker group: sent once per step, worked on in micro-batches, and gathered again.

The rollouts are assigned to ranks once. Each rank's share goes into Ray's object store, and every call of the step (old
log-probs, values, the update, a second try after a failure) only refers to it: which rows of the share make which
micro-batch, and the columns that did not exist when the share was stored. A process fetches its share with the first
call that refers to it and keeps it (`worker_host.Stored`). The tokens of sampled responses are no part of what is sent:
a share names the rollout processes' blocks that hold them (`shares.Share`), and the rank fetches those.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from grpo_rl.cluster.processes.worker_group import WorkerGroup
from grpo_rl.cluster.roles.shares import LeftColumn, Share, UpdateOfLeft
from grpo_rl.config.derived import MicroBatchRule
from grpo_rl.data.balance import Prompts, cut_shares, split_over_ranks
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
"""The columns a share is stored with: those that exist before any pass over the batch."""
LOOK = 1 << 16
ALONE = MicroBatchRule(None, 1)
"""Passes of single rollouts, each by one rank."""


class Ranks(Protocol):
    """The processes of a role, as `WorkerGroup` calls them."""

    def __len__(self) -> int: ...

    def store(self, values: Sequence[Any]) -> list[Any]:
        """Return a stand-in for each value, which a call passes on in its place."""


@dataclass(frozen=True, slots=True)
class Dealt:
    """A batch as it was dealt: the rollouts of each rank, and where they are stored."""

    batch: Batch
    shares: list[list[int]]
    """The rollouts of each rank, or of each group of ranks that compute a pass together, in the order of its share."""
    stored: list[Any]
    units: Sequence[int] | None = None
    """The unit of each rollout, whose rollouts stay together in a micro-batch; None: each is one by itself."""

    def holds(self, batch: Batch) -> bool:
        """Return whether `batch` is this one, with other columns or with fewer trained tokens."""
        return batch.token_ids_S is self.batch.token_ids_S

    def micro_batches(self, chosen: Sequence[int], rule: MicroBatchRule) -> list[list[Rows]]:
        """Return, for each rank, the rows of its share that make each micro-batch over the rollouts `chosen`."""
        row = {index: number for share in self.shares for number, index in enumerate(share)}
        wanted = set(chosen)
        shares = [[index for index in share if index in wanted] for share in self.shares]
        lengths = self.batch.sequence_lengths_N.tolist()
        # A rollout that is not chosen may be longer than a micro-batch.
        own = [length if index in wanted else 0 for index, length in enumerate(lengths)]
        most = rule.max_rollouts
        if most is not None and self.units is not None:
            # Memory that runs out halves the rule, and a unit is never cut.
            most = max([most, *Counter(self.units[index] for index in wanted).values()])
        prompts = prompts_of(self.batch) if rule.shares_prompts else None
        cut = cut_shares(shares, own, max_tokens=rule.max_tokens, max_rollouts=most, units=self.units, prompts=prompts)
        return [[tuple(row[index] for index in indices) for indices in rank] for rank in cut]

    def lengths(self, chosen: Sequence[int]) -> list[int]:
        """Return the tokens of what stays together among the rollouts `chosen`: of each rollout, or of each unit."""
        lengths = self.batch.sequence_lengths_N.tolist()
        tokens: Counter[int] = Counter()
        for index in chosen:
            tokens[index if self.units is None else self.units[index]] += lengths[index]
        return list(tokens.values())

    def updates(
        self, batch: Batch, names: Sequence[str], steps: Sequence[Sequence[OptimizerStep]]
    ) -> list[Update | UpdateOfLeft]:
        """Return each rank's part of an update on `batch`: the columns `names`, where they are there, and its steps.

        Of columns that ranks left in the store the places are sent.
        """
        trained_T = None
        left: dict[str, LeftColumn] = {name: place for name, place in (batch.elsewhere or {}).items() if name in names}
        if batch.positions_T is not self.batch.positions_T:
            trained_S = torch.zeros(len(batch.token_ids_S), dtype=torch.bool)
            trained_S[batch.positions_T] = True
            whole = self.batch.trains_whole_responses
            trained_T = trained_S[self.batch.response_positions() if whole else self.batch.positions_T]
        columns = {name: getattr(batch, name) for name in names if name not in left and getattr(batch, name) is not None}
        # A number that all tokens of a rollout share, as most advantages are, is sent once for each rollout.
        per_token = {name: column for name, column in columns.items() if name.endswith("_T")}
        per_rollout = {name: per_rollout_values(column, batch.trained_lengths_N) for name, column in per_token.items()}
        shared = {name: values for name, values in per_rollout.items() if values is not None}
        if "advantages_T" in names and batch.advantages_N is not None:
            shared["advantages_T"] = batch.advantages_N
        lengths_N, whole_N = batch.trained_lengths_N, self.batch.trained_lengths_N
        updates: list[Update | UpdateOfLeft] = []
        for share, rank_steps in zip(self.shares, steps, strict=True):
            rows = torch.tensor(share, dtype=torch.long)
            own = {
                name: column[rows] if name.endswith("_N") else segments_at(column, lengths_N, rows)
                for name, column in columns.items()
                if name not in shared
            }
            kept = None if trained_T is None else segments_at(trained_T, whole_N, rows)
            spread = {name: values[rows] for name, values in shared.items()}
            update = Update(own, kept, tuple(rank_steps), spread)
            if left:
                places = {name: column.select(rows.numpy()) for name, column in left.items()}
                updates.append(UpdateOfLeft(update, lengths_N[rows].numpy(), places))
            else:
                updates.append(update)
        return updates


def per_rollout_values(column: Tensor, lengths_N: Tensor) -> Tensor | None:
    """Return one number per rollout where it is that of all the rollout's tokens, bit for bit; None for other columns.

    A rollout without tokens gets 0.
    """
    if column.dtype != torch.float32 or not len(column):
        return None
    bits = column.view(torch.int32)
    starts_N = lengths_N.cumsum(0) - lengths_N
    # Columns that differ from token to token are many, and large: a look at their beginning is enough.
    head = bits[:LOOK]
    if int((head[1:] != head[:-1]).sum()) > int((starts_N < LOOK).sum()):
        return None
    changes = bits[1:] != bits[:-1]
    alive_N = lengths_N > 0
    if int(changes.sum()) >= len(lengths_N) or not bool(torch.isin(changes.nonzero()[:, 0] + 1, starts_N[alive_N]).all()):
        return None
    values_N = torch.zeros(len(lengths_N))
    values_N[alive_N] = column[starts_N[alive_N]]
    return values_N


def prompts_of(batch: Batch) -> Prompts:
    """Return which rollouts of the batch have a prompt in common: those of a group."""
    return Prompts(batch.group_N.tolist(), batch.prompt_lengths_N.tolist())


def deal(
    ranks: Ranks,
    batch: Batch,
    mini_batches: Sequence[Sequence[int]] = (),
    units: Sequence[int] | None = None,
    *,
    rule: MicroBatchRule = ALONE,
) -> Dealt:
    """Assign the rollouts to ranks, so that each of the mini-batches is even over them, and store each rank's share.

    Where the rule shares prompts, a group's rollouts go to one rank, as far as the ranks stay even. Ranks that compute a
    pass together get one share for all of them.
    """
    lengths = batch.sequence_lengths_N.tolist()
    prompts = prompts_of(batch) if rule.shares_prompts else None
    num_shares = len(ranks) // rule.sequence_ranks
    shares = split_over_ranks(lengths, num_shares, units=units, mini_batches=mini_batches, prompts=prompts)
    bare = Batch(**{name: getattr(batch, name) for name in FORWARD_COLUMNS}, held=batch.held)
    bare = bare.replace(token_ids_S=batch.token_ids_S.int())
    if batch.held is not None and batch.rollout_logprobs_T is not None:
        # The controller may have read them for itself; the ranks read theirs where they lie.
        bare = bare.replace(rollout_logprobs_T=batch.rollout_logprobs_T.to("meta"))
    parts = [bare.select(share) for share in shares]
    return Dealt(batch, shares, ranks.store([one if one.held is None else Share.of(one) for one in parts]), units)


@dataclass(frozen=True, slots=True)
class UpdateCall:
    """The call, made by `WorkerGroup.call_in_passes`, by which the ranks train on a batch: one optimizer step per mini-batch."""

    lengths: list[list[int]]
    """The tokens of what stays together in a micro-batch, for each mini-batch."""
    arguments: Callable[[MicroBatchRule], list[tuple[Any, Update | UpdateOfLeft]]]
    """Returns the arguments of each rank, with micro-batches by this rule."""
    counts: list[Counts]
    """The divisors of each step: those of its whole mini-batch."""


def update_call(
    dealt: Dealt,
    batch: Batch,
    mini_batches: Sequence[Sequence[int]],
    names: Sequence[str],
    *,
    entropy_coeff: float | None = None,
    selected: Sequence[Tensor] | None = None,
    silent_N: Tensor | None = None,
) -> UpdateCall:
    """Return the call by which all ranks take one optimizer step per mini-batch.

    `names` are the columns that the update reads beside those of the share. `selected` has, for each mini-batch, a bool
    for every trained token of the batch. `silent_N` are the rollouts that add nothing to the gradient: they get micro-batches
    of their own, without a backward pass. All ranks have equally many of either kind, because FSDP's collectives differ.
    """
    silent = [False] * batch.num_rollouts if silent_N is None else silent_N.tolist()
    alive_N = (batch.trained_lengths_N > 0).tolist()
    # A rollout without a trained token has no gradient: its pass is saved.
    trained = [[index for index in indices if alive_N[index]] for indices in mini_batches]
    counts = [Counts.of(batch.trained_lengths_N[indices], batch.group_N[indices]) for indices in mini_batches]

    def arguments(rule: MicroBatchRule) -> list[tuple[Any, Update | UpdateOfLeft]]:
        steps: list[list[OptimizerStep]] = [[] for _ in dealt.shares]
        for number, indices in enumerate(trained):
            planned = dealt.micro_batches([index for index in indices if not silent[index]], rule)
            quiet = [index for index in indices if silent[index]]
            forward_only = dealt.micro_batches(quiet, rule) if quiet else [[] for _ in steps]
            for own, share, rows, still in zip(steps, dealt.shares, planned, forward_only, strict=True):
                chosen_T = None if selected is None else selected[number][batch.token_index(share)]
                own.append(OptimizerStep(counts[number], tuple(rows), tuple(still), entropy_coeff, chosen_T))
        return list(zip(dealt.stored, dealt.updates(batch, names, steps), strict=True))

    return UpdateCall([dealt.lengths(indices) for indices in trained if indices], arguments, counts)


def forward(ranks: WorkerGroup, rule: MicroBatchRule, method: str, dealt: Dealt, *arguments: Any) -> tuple[Tensor, list[Any]]:
    """Return the ranks' results of a pass over the whole batch, and the rollouts that they are of, in that order."""
    orders, results = _pass(ranks, rule, method, dealt, arguments)
    return torch.tensor([index for order in orders for index in order], dtype=torch.long), results


def with_columns_left(
    ranks: WorkerGroup,
    rule: MicroBatchRule,
    batch: Batch,
    dealt: Dealt,
    keys: Mapping[str, str],
    *arguments: Any,
    method: str = "left_logprobs",
) -> Batch | None:
    """Return the batch with columns that `method` of the ranks leaves in the store: `keys` has their names in the results.

    None where one of their numbers is not finite: a pass that returns the values shows which.
    """
    orders, results = _pass(ranks, rule, method, dealt, arguments, for_two=True)
    if not all(finite for finite, _ in results):
        return None
    refs = tuple(ref for _, ref in results)
    source_N, start_N = LeftColumn.places(orders, batch.trained_lengths_N.numpy())
    columns = {name: LeftColumn(key, refs, source_N, start_N) for name, key in keys.items()}
    nowhere = {name: torch.empty(batch.num_trained_tokens, device="meta") for name in keys}
    return batch.replace(**nowhere, elsewhere={**(batch.elsewhere or {}), **columns})


def _pass(
    ranks: WorkerGroup, rule: MicroBatchRule, method: str, dealt: Dealt, arguments: Sequence[Any], *, for_two: bool = False
) -> tuple[list[list[int]], list[Any]]:
    """Return the rollouts that each rank's result of a pass over the whole batch holds, in its order, and the results."""
    chosen = (dealt.batch.trained_lengths_N > 0).nonzero()[:, 0].tolist()
    orders: list[list[int]] = []

    def ask(rule: MicroBatchRule) -> list[tuple[Any, ...]]:
        planned = dealt.micro_batches(chosen, rule)
        orders[:] = [[share[row] for rows in rank for row in rows] for share, rank in zip(dealt.shares, planned, strict=True)]
        return [(stored, rank, *arguments) for stored, rank in zip(dealt.stored, planned, strict=True)]

    return orders, ranks.call_in_passes(method, rule, [dealt.lengths(chosen)], ask, for_two=for_two)


def gather(batch: Batch, order: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """Return the per-token results of all ranks in the batch's order.

    Laid back to back, `parts` hold the trained tokens of the rollouts `order`, one after the other, each part those of
    whole rollouts. Every rollout's are copied to their place as one piece: an index for every token would cost more
    than the tokens.
    """
    lengths, ends = batch.trained_lengths_N.tolist(), batch.trained_lengths_N.cumsum(0).tolist()
    out = parts[0].new_empty(batch.num_trained_tokens, *parts[0].shape[1:])
    rollouts = iter(order.tolist())
    for part in parts:
        done = 0
        while done < len(part):
            index = next(rollouts)
            out[ends[index] - lengths[index] : ends[index]] = part[done : done + lengths[index]]
            done += lengths[index]
    return out


def per_token(ranks: WorkerGroup, rule: MicroBatchRule, method: str, dealt: Dealt) -> Tensor:
    """Return a column that the ranks work out, one number per trained token."""
    order, parts = forward(ranks, rule, method, dealt)
    return gather(dealt.batch, order, parts)


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


def combine_stats(results: Sequence[Sequence[dict[str, float]]], counts: Sequence[Counts], role: str = "actor") -> Metrics:
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
