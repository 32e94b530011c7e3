"""The roles that train, over their worker groups: how a batch is dispatched to ranks; actor, critic, reward
model.

The rollouts are assigned to ranks once a step. Each rank's shard goes into Ray's object store; every call
only refers to it, and brings which rows make which micro-batch, and columns that came later. A process
fetches its shard once (`worker_group.Stored`). Tokens and log-probs cross processes once, from where they
were made to the rank that trains on them; values below Ray's limit of 100 KiB pass through the controller's
process, unread.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from grpo_rl.algos.aggregate import group_tokens
from grpo_rl.algos.losses.value import explained_variance
from grpo_rl.algos.objective import Objective
from grpo_rl.algos.shaping import AdaptiveEntropy
from grpo_rl.checkpoint.files import Files, make_folder, merge, whole_folder
from grpo_rl.columns import RemoteColumn, values
from grpo_rl.config.derived import MicroBatchRule
from grpo_rl.config.schema.tree import ActorConfig
from grpo_rl.data.balance import Prompts, cut_shards, split_over_ranks
from grpo_rl.errors import CheckpointError
from grpo_rl.frozen import frozen
from grpo_rl.types import Batch, Counts, Metrics, columns_read_by, segments_at
from grpo_rl.workers.specs import OptimizerStep, Rows, Update

if TYPE_CHECKING:
    from grpo_rl.cluster.processes.worker_group import WorkerGroup
    from grpo_rl.plan.decisions import OldLogprobs


@frozen
class Dispatched:
    """A batch as it was dispatched: the rollouts of each rank, and where its shard is stored."""

    ranks: WorkerGroup
    batch: Batch
    mini_batches: Sequence[Sequence[int]]
    """The rollouts of each optimizer step that will be taken on the batch; none if it is only passed through a model."""
    shards: list[list[int]]
    """The rollouts of each rank, or of each group of ranks that compute a pass together, in the order of its shard."""
    stored: list[Any]
    units: Sequence[int] | None = None
    """The unit of each rollout, whose rollouts stay together in a micro-batch; None: each is one by itself."""

    @classmethod
    def to(
        cls,
        ranks: WorkerGroup,
        batch: Batch,
        rule: MicroBatchRule,
        mini_batches: Sequence[Sequence[int]] = (),
        units: Sequence[int] | None = None,
    ) -> Dispatched:
        """Assign the rollouts to ranks, so that each of the mini-batches is even over them, and store each
        rank's shard.

        If the rule shares prompts, a group's rollouts go to one rank, as far as the ranks stay even.
        """
        lengths, prompts = batch.sequence_lengths_N.tolist(), _prompts(batch, rule)
        num_shards = len(ranks) // rule.sequence_ranks
        shards = split_over_ranks(lengths, num_shards, units=units, mini_batches=mini_batches, prompts=prompts)
        bare = Batch(**{name: getattr(batch, name) for name in columns_read_by("shard")})
        return cls(ranks, batch, mini_batches, shards, ranks.store([bare.select(shard) for shard in shards]), units)

    def holds(self, batch: Batch) -> bool:
        """Return whether `batch` is this one, with other columns or with fewer trained tokens."""
        return batch.token_ids_S is self.batch.token_ids_S

    def micro_batches(self, chosen: Sequence[int], rule: MicroBatchRule) -> list[list[Rows]]:
        """Return, for each rank, the rows of its shard that make each micro-batch over the rollouts `chosen`."""
        row = {index: number for shard in self.shards for number, index in enumerate(shard)}
        chosen_set = set(chosen)
        shards = [[index for index in shard if index in chosen_set] for shard in self.shards]
        lengths = self.batch.sequence_lengths_N.tolist()
        # A rollout that is not chosen may be longer than a micro-batch.
        chosen_lengths = [length if index in chosen_set else 0 for index, length in enumerate(lengths)]
        unit_lengths: dict[int, list[int]] = defaultdict(list)
        for index in chosen_set:
            unit_lengths[index if self.units is None else self.units[index]].append(lengths[index])
        # What stays together is never cut.
        cut = cut_shards(
            shards,
            chosen_lengths,
            max_tokens=rule.max_tokens and max([rule.max_tokens, *map(sum, unit_lengths.values())]),
            max_rollouts=rule.max_rollouts and max([rule.max_rollouts, *map(len, unit_lengths.values())]),
            units=self.units,
            prompts=_prompts(self.batch, rule),
        )
        return [[tuple(row[index] for index in indices) for indices in rank] for rank in cut]

    def compute(self, rule: MicroBatchRule, method: str, names: Mapping[str, str], *arguments: Any) -> dict[str, RemoteColumn]:
        """Return columns that ranks compute over the batch: `names` maps them to those of the results."""
        lengths_N = self.batch.trained_lengths_N
        planned = self.micro_batches((lengths_N > 0).nonzero()[:, 0].tolist(), rule)
        orders = [[shard[row] for rows in rank for row in rows] for shard, rank in zip(self.shards, planned, strict=True)]
        shard_arguments = ((stored, rank, *arguments) for stored, rank in zip(self.stored, planned, strict=True))
        results = _call_per_shard(self.ranks.call_for_two, method, shard_arguments, rule)
        finite, blocks = all(is_finite for is_finite, _ in results), [block for _, block in results]
        return {key: RemoteColumn.of_results(name, blocks, orders, lengths_N, finite=finite) for key, name in names.items()}

    def update(
        self,
        rule: MicroBatchRule,
        batch: Batch,
        names: Sequence[str],
        *,
        whole: Counts | None = None,
        entropy_coeff: float | None = None,
        selected: Sequence[Tensor] | None = None,
        zero_advantage_N: Tensor | None = None,
    ) -> Metrics:
        """Have all ranks take one optimizer step per mini-batch; return their statistics as metrics of their
        role.

        `names` are the columns that the update reads beside those of the shard. `selected` has, for each
        mini-batch, a bool for every trained token of the batch. The rollouts of `zero_advantage_N` get
        micro-batches of their own, without a backward pass. All ranks have equally many of either kind,
        because FSDP's collectives differ. With `whole` the ranks only add up the gradient of the one
        mini-batch, a part of a step with these counts.
        """
        forward_only = [False] * batch.num_rollouts if zero_advantage_N is None else zero_advantage_N.tolist()
        alive_N = (batch.trained_lengths_N > 0).tolist()
        counts = [Counts.of(batch.trained_lengths_N[indices], batch.group_N[indices]) for indices in self.mini_batches]
        counts = counts if whole is None else [whole]
        steps: list[list[OptimizerStep]] = [[] for _ in self.shards]
        for number, mini_batch in enumerate(self.mini_batches):
            # A rollout without a trained token has no gradient: its pass is saved.
            indices = [index for index in mini_batch if alive_N[index]]
            planned = self.micro_batches([index for index in indices if not forward_only[index]], rule)
            forward_indices = [index for index in indices if forward_only[index]]
            without_backward = self.micro_batches(forward_indices, rule) if forward_indices else [[] for _ in steps]
            for rank_steps, shard, rows, forward_rows in zip(steps, self.shards, planned, without_backward, strict=True):
                selected_T = None if selected is None else selected[number][batch.token_index(shard)]
                rank_steps.append(OptimizerStep(counts[number], tuple(rows), tuple(forward_rows), entropy_coeff, selected_T))
        arguments = zip(self.stored, self._updates(batch, names, steps), strict=True)
        method = "update" if whole is None else "forward_backward"
        results = _call_per_shard(self.ranks.call_each, method, arguments, rule)
        return combine_stats(results, counts, self.ranks.role) if whole is None else {}

    def _updates(self, batch: Batch, names: Sequence[str], steps: Sequence[Sequence[OptimizerStep]]) -> list[Update]:
        """Return each rank's part of an update on `batch`: the columns `names`, if they are there, and its steps."""
        trained_T = None
        if batch.positions_T is not self.batch.positions_T:
            trained_S = torch.zeros(len(batch.token_ids_S), dtype=torch.bool)
            trained_S[batch.positions()] = True
            trained_T = trained_S[self.batch.positions()]
        names = [name for name in names if getattr(batch, name) is not None]
        updates = []
        for shard, rank_steps in zip(self.shards, steps, strict=True):
            rows = torch.tensor(shard, dtype=torch.long)
            of_shard = {name: batch.part_of(name, rows) for name in names}
            kept_T = None if trained_T is None else segments_at(trained_T, self.batch.trained_lengths_N, rows)
            updates.append(Update(of_shard, kept_T, tuple(rank_steps)))
        return updates


def _prompts(batch: Batch, rule: MicroBatchRule) -> Prompts | None:
    return Prompts(batch.group_N.tolist(), batch.prompt_lengths_N.tolist()) if rule.shares_prompts else None


def _call_per_shard(
    call: Callable[[str, list[Any]], list[Any]], method: str, arguments: Iterable[Any], rule: MicroBatchRule
) -> list[Any]:
    """Return the result of each shard from its arguments: ranks that compute a pass together have the same shard."""
    return call(method, [of_shard for of_shard in arguments for _ in range(rule.sequence_ranks)])[:: rule.sequence_ranks]


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
    """Return statistics of ranks and optimizer steps as metrics `role/...`: see `Objective.__call__` for the
    prefixes.

    Means over tokens are divided by the global token count of their step; steps are averaged, maxima taken.
    What is named `rollout/...` or `rollout_corr/...` keeps its name.
    """
    per_step: dict[str, list[float]] = defaultdict(list)
    for step, step_counts in enumerate(counts):
        rank_values: dict[str, list[float]] = defaultdict(list)
        for rank in results:
            for key, value in rank[step].items():
                rank_values[key].append(value)
        for key, parts in rank_values.items():
            prefix = key.partition("/")[0]
            total = parts[0] if prefix == "same" else max(parts) if prefix == "max" else sum(parts)
            per_step[key].append(total / max(1, step_counts.num_tokens) if prefix == "sum" else total)
    metrics: Metrics = {}
    for key, of_steps in per_step.items():
        prefix, _, name = key.partition("/")
        name = name if name.startswith(("rollout/", "rollout_corr/")) else f"{role}/{name}"
        metrics[name] = max(of_steps) if prefix == "max" else math.fsum(of_steps) / len(of_steps)
    return metrics


# ---- the roles ---------------------------------------------------------------------------------------


class SavedRole:
    """The part of `protocols.Trained` that writes and reads a worker group's state in a checkpoint."""

    folder: ClassVar[str] = ""
    """The role's folder in a checkpoint; empty for the checkpoint itself."""
    missing_advice: ClassVar[str] = ""
    """Of a checkpoint without that folder: what it does not have, why, and what to do."""
    own_file: ClassVar[str | None] = None
    """The file with the role's state in the controller; None if it has none."""

    worker_group: WorkerGroup

    def own_state(self) -> dict[str, Any]:
        return {}

    def load_own_state(self, state: dict[str, Any]) -> None: ...

    def save(self, folder: Path, in_background: bool = False) -> None:
        if self.folder:
            make_folder(folder / self.folder)
        state_files = ({self.own_file: json.dumps(self.own_state())},) if self.own_file else ()
        self.worker_group.call("save", str(folder / self.folder), in_background, *state_files)

    def saved(self, wait_s: float) -> Files | None:
        """Return what `save` wrote; None if it has not ended within `wait_s`. Raises CheckpointError."""
        written = self.worker_group.call("saved", wait_s)
        return None if None in written else merge(written, self.folder)

    def save_bytes(self) -> int:
        return sum(self.worker_group.call("save_bytes"))

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote. Raises CheckpointError for a checkpoint of a run without this role."""
        if not (folder / self.folder).is_dir():
            raise CheckpointError(f"{folder} has no {self.missing_advice}, or start anew with trainer.resume_mode=disable")
        self.worker_group.call("load", str(folder / self.folder))
        if self.own_file is not None:
            self.load_own_state(json.loads((folder / self.own_file).read_text()))


class TrainedRole(SavedRole):
    """A role that is trained: its ranks keep the batch of a step from the first pass over it to its update."""

    def __init__(self, worker_group: WorkerGroup, rule: MicroBatchRule, tokenizer: Any = None) -> None:
        self.worker_group, self.rule = worker_group, rule
        self.tokenizer = tokenizer
        self._dispatched: Dispatched | None = None

    def mini_batches(self, batch: Batch) -> list[list[int]]:
        raise NotImplementedError

    def units(self, batch: Batch) -> Sequence[int] | None:
        return None

    def dispatched(self, batch: Batch) -> Dispatched:
        """Return the batch as the ranks have it, so that every mini-batch of the update is even over them."""
        if self._dispatched is None or not self._dispatched.holds(batch):
            ranks, units = self.worker_group, self.units(batch)
            self._dispatched = Dispatched.to(ranks, batch, self.rule, self.mini_batches(batch), units)
        return self._dispatched

    def train(self, batch: Batch, names: Sequence[str], whole: Counts | None = None, **options: Any) -> Metrics:
        """Return what `Dispatched.update` does. The step ends here for these ranks: the next batch takes the place of this one."""
        dispatched = self.dispatched(batch) if whole is None else None
        if dispatched is None:
            part = [list(range(batch.num_rollouts))]
            dispatched = Dispatched.to(self.worker_group, batch, self.rule, part, self.units(batch))
        metrics = dispatched.update(self.rule, batch, names, whole=whole, **options)
        self._dispatched = None
        return metrics

    def optim_step(self, whole: Counts) -> Metrics:
        """Take the step of the gradients that `forward_backward` has added up, of a mini-batch with these counts; return its metrics."""
        results = self.worker_group.call("optim_step", whole)[:: self.rule.sequence_ranks]
        return combine_stats(results, [whole], self.worker_group.role)

    def export(self, folder: Path, dtype: str = "float32") -> None:
        """Write a Hugging Face folder with weights of this type, complete or not at all. Raises CheckpointError."""
        with whole_folder(folder, self.worker_group.call("export_bytes")[0]) as fresh:
            self.worker_group.call("export", str(fresh))
            if not (fresh / "config.json").is_file():
                raise OSError("rank 0 wrote it on another machine: trainer.default_local_dir must be on a disk that all share")
            if self.tokenizer is not None:
                self.tokenizer.save_pretrained(fresh)
            if dtype != "float32":
                from grpo_rl.checkpoint.exporting import cast  # which loads torch's distributed tensors

                cast(fresh, dtype)


class ActorRole(TrainedRole):
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
        super().__init__(worker_group, train_rule, tokenizer)
        self.config, self.forward_rule, self.objective = config, forward_rule, objective
        self.old_from: OldLogprobs = old_logprobs
        settings = config.adaptive_entropy
        self.entropy = AdaptiveEntropy(settings.target, settings.delta, config.entropy_coeff) if settings.enable else None
        self.num_shuffles = 0
        self.version = 0
        """The version of the weights: the number of batches they were trained on."""

    def old_logprobs(self, batch: Batch) -> Batch:
        """Return the batch with `old_logprobs_T`, if something reads them.

        If the plan has none there is one update per batch, and the policy has not moved: the ratio is exactly 1.
        """
        if self.old_from == "none":
            return batch
        if self.old_from == "engine":
            return batch.replace(old_logprobs_T=batch.rollout_logprobs_T)
        names = {"old_logprobs_T": "logprobs_T"}
        return batch.replace(**self.dispatched(batch).compute(self.forward_rule, "logprobs", names))

    def logprobs(self, batch: Batch) -> Tensor:
        """Return the present policy's log-probability of each trained token of a batch that is not trained on."""
        dispatched = Dispatched.to(self.worker_group, batch, self.forward_rule)
        return dispatched.compute(self.forward_rule, "logprobs", {"": "logprobs_T"})[""].read()

    def update(self, batch: Batch) -> Metrics:
        """Take `ppo_epochs` x mini-batches of optimizer steps; return their metrics, averaged over the steps."""
        metrics = self._trained(batch)
        if self.config.shuffle:
            self.num_shuffles += self.config.ppo_epochs
        return self._stepped(metrics, batch.num_trained_tokens)

    def forward_backward(self, batch: Batch, whole: Counts) -> None:
        """Add the gradient of a part of a step. Raises ValueError for a loss over whole mini-batches."""
        looks = {
            "a loss that selects tokens of the mini-batch": self.objective.needs_selection,
            "router_aux_loss_coef, which counts its experts": self.objective.router_aux_loss_coef > 0,
            "router_replay, which is of a whole update": self.config.router_replay.mode != "disabled",
        }
        if refused := [what for what, is_there in looks.items() if is_there]:
            raise ValueError(f"forward_backward() sees a part of the mini-batch, and this run has {refused[0]}: use update()")
        self._trained(batch, whole)

    def optim_step(self, whole: Counts) -> Metrics:
        return self._stepped(super().optim_step(whole), whole.num_tokens)

    def _trained(self, batch: Batch, whole: Counts | None = None) -> Metrics:
        if self.objective.needs_group_tokens and batch.group_tokens_N is None:
            # A group lies in one mini-batch as a whole, so its tokens there are its tokens in the batch.
            batch = batch.replace(group_tokens_N=group_tokens(batch.trained_lengths_N, batch.group_N))
        return self.train(
            batch,
            # If the engine's log-probs are the old ones, the ranks have them.
            [name for name in columns_read_by("actor") if name != "old_logprobs_T" or self.old_from != "engine"],
            whole,
            entropy_coeff=None if self.entropy is None else self.entropy.value,
            selected=self._selected(batch) if self.objective.needs_selection else None,
            zero_advantage_N=batch.zero_advantage() if self.objective.skips_zero_advantage else None,
        )

    def _stepped(self, metrics: Metrics, num_trained_tokens: int) -> Metrics:
        self.version += 1
        if self.entropy is not None:
            metrics["actor/entropy_coeff"] = self.entropy.value
            if num_trained_tokens and math.isfinite(metrics["actor/entropy"]):
                self.entropy.update(metrics["actor/entropy"])
        return metrics

    def own_state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"num_shuffles": self.num_shuffles, "version": self.version}
        return state if self.entropy is None else state | {"entropy": self.entropy.state_dict()}

    def load_own_state(self, state: dict[str, Any]) -> None:
        """If a resumed run switches the entropy's controller on, it starts from its configured weight."""
        self.num_shuffles, self.version = int(state["num_shuffles"]), int(state["version"])
        if self.entropy is not None and "entropy" in state:
            self.entropy.load_state_dict(state["entropy"])

    def units(self, batch: Batch) -> Sequence[int] | None:
        return batch.group_N.tolist() if self.objective.needs_pairs else None

    def mini_batches(self, batch: Batch) -> list[list[int]]:
        seeds: list[int | None] = [None] * self.config.ppo_epochs
        if self.config.shuffle:
            first = self.config.data_loader_seed * 1_000_003 + self.num_shuffles
            seeds = list(range(first, first + self.config.ppo_epochs))
        return mini_batches(batch, self.config.ppo_mini_batch_size, seeds)

    def _selected(self, batch: Batch) -> list[Tensor]:
        advantages_T = batch.token_advantages()
        assert advantages_T is not None and batch.old_logprobs_T is not None
        old_logprobs_T, selected = values(batch.old_logprobs_T), []
        for number, indices in enumerate(self.dispatched(batch).mini_batches):
            seed = (self.config.data_loader_seed * 1_000_003 + self.version) * 1_009 + number
            generator = torch.Generator().manual_seed(seed)
            index_T = batch.token_index(list(indices))
            selected_T = torch.zeros(batch.num_trained_tokens, dtype=torch.bool)
            selected_T[index_T] = self.objective.select(advantages_T[index_T], old_logprobs_T[index_T], generator)
            selected.append(selected_T)
        return selected


class CriticRole(TrainedRole):
    folder = "critic"
    missing_advice = "critic: it was written by a run whose estimator needed none; go on with that algorithm.adv_estimator"

    def __init__(self, worker_group: WorkerGroup, *, rule: MicroBatchRule, mini_batch_size: int, epochs: int) -> None:
        super().__init__(worker_group, rule)
        self.mini_batch_size, self.epochs = mini_batch_size, epochs

    def mini_batches(self, batch: Batch) -> list[list[int]]:
        return mini_batches(batch, self.mini_batch_size, [None] * self.epochs)

    def values(self, batch: Batch) -> Batch:
        return batch.replace(**self.dispatched(batch).compute(self.rule, "values", {"values_T": "values_T"}))

    def update(self, batch: Batch) -> Metrics:
        """Take `epochs` x mini-batches of optimizer steps; return their metrics, averaged over the steps."""
        assert batch.values_T is not None and batch.returns_T is not None
        metrics = self.train(batch, columns_read_by("critic"))
        values_T, returns_T = values(batch.values_T), batch.returns_T
        if len(values_T):
            # How well the critic predicted the returns before it learnt them, over the trained tokens.
            metrics["critic/vf_explained_var"] = explained_variance(values_T, returns_T)
            metrics["critic/values/mean"] = float(values_T.double().mean())
            metrics["critic/returns/mean"] = float(returns_T.double().mean())
        return metrics

    def forward_backward(self, batch: Batch, whole: Counts) -> None:
        self.train(batch, columns_read_by("critic"), whole)


class TrainedRewardModelRole(TrainedRole):
    folder = "reward_model"
    missing_advice = "reward model: it was written by a run that trained none; go on with that trainer.schedule"

    def __init__(self, worker_group: WorkerGroup, *, rule: MicroBatchRule, pairs: bool, tokenizer: Any = None) -> None:
        super().__init__(worker_group, rule, tokenizer)
        self.pairs = pairs
        """True if it learns from pairs, False if from labelled steps."""

    def mini_batches(self, batch: Batch) -> list[list[int]]:
        return [list(range(batch.num_rollouts))]

    def units(self, batch: Batch) -> Sequence[int] | None:
        return batch.group_N.tolist() if self.pairs else None

    def update(self, batch: Batch) -> Metrics:
        """Take one optimizer step on the whole batch; return its metrics. Raises ValueError for a batch of another kind."""
        if (batch.chosen_N if self.pairs else batch.labels_T) is None:
            raise ValueError("a batch of pairs has chosen_N, one of labelled steps labels_T")
        return self.train(self._scored(batch), columns_read_by("reward_model"))

    def scores(self, batch: Batch) -> Tensor:
        """Return the score of each rollout of pairs, or that at each labelled position, in the batch's order."""
        dispatched = Dispatched.to(self.worker_group, self._scored(batch), self.rule)
        return dispatched.compute(self.rule, "position_scores", {"": "scores_T"})[""].read()

    def _scored(self, batch: Batch) -> Batch:
        """Return the batch whose trained tokens are those with a score: of pairs the last one of every response."""
        if not self.pairs:
            return batch
        last_T = torch.zeros(batch.num_trained_tokens, dtype=torch.bool)
        last_T[batch.trained_lengths_N.cumsum(0)[batch.trained_lengths_N > 0] - 1] = True
        return batch.keep(last_T)
