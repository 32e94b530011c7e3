"""The prompts that a step trains on: drawn, sampled and scored, and kept where their groups have signal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from grpo_rl.algos.shaping import PassRates, with_signal
from grpo_rl.config.schema.tree import Config
from grpo_rl.data.dataset import PromptDataset
from grpo_rl.data.draw_order import RowOrder, make_row_order
from grpo_rl.data.row_set import TrainingSet
from grpo_rl.data.sources.source import differences
from grpo_rl.errors import CheckpointError, ConfigError, DataError, RewardError
from grpo_rl.rewards.combined import factors_of
from grpo_rl.rewards.compose import LIFTED
from grpo_rl.trainer.sampled.trained import with_reward
from grpo_rl.types import Metrics, Prompt, Rollout

Sample = Callable[[list[Prompt]], list[Rollout]]
"""Scored rollouts of prompts."""
Drawn = TypeVar("Drawn")


@dataclass(frozen=True, slots=True)
class Selected:
    """The rollouts of one step."""

    trained: list[Rollout]
    """The rollouts that are trained on, groups in the order in which they were drawn, without members whose reward
    failed. May be none without refilling."""
    sampled: list[Rollout]
    """All that were sampled for the step, which show how good the policy is."""
    metrics: Metrics


class Selection:
    """Draws prompts for one step after the other.

    With `algorithm.filter_groups` groups without signal are replaced by those of further prompts, or left out (dynamic
    sampling: DAPO, arXiv 2503.14476, section 3.2; zero-variance filter: ScaleRL, arXiv 2510.13786, section 3). With
    `data.retire_above` prompts that are learnt are not drawn again.
    """

    def __init__(self, config: Config, data: PromptDataset, factors: Mapping[str, float]) -> None:
        self.data = data
        self.factors = factors
        self.groups = config.algorithm.filter_groups
        self.num_wanted = config.data.train_batch_size
        self.retire_metric, self.retire_score = config.data.retire_metric, config.data.retire_score
        bound = config.data.retire_above
        self.pass_rates = None if bound is None else PassRates(bound)
        self.allow_change = config.data.allow_change
        self.sampler = make_row_order(config, data, *([] if self.pass_rates is None else [self.pass_rates.is_retired]))

    def next(self, sample: Sample, spared: int = 0) -> Selected:
        """Return the rollouts of the next step; with refilling so many groups fewer as are `spared`.

        Raises DataError when too few groups have a signal in `max_num_gen_batches` batches of prompts, and for a row that
        cannot be used; the next step then begins with the same row.
        """
        return self._or_rewind(lambda: self._next(sample, self.num_wanted - spared))

    def draw(self, sample: Sample) -> list[Rollout]:
        """Return all scored rollouts of the next batch of prompts, whatever their signal is. Raises DataError as `next`."""
        return self._or_rewind(lambda: self._draw(sample))

    def prompts(self) -> list[tuple[int, Prompt]]:
        """Return the next batch of prompts, each with its row, for a schedule that samples ahead. Raises DataError as `next`."""
        return self._or_rewind(self._prompts)

    def of_batch(self, rows: Mapping[str, int], rollouts: list[Rollout]) -> Selected:
        """Return what is trained of the scored rollouts of one batch, of prompts of `rows` (by uid); nothing is drawn for them."""
        self._record(rows, rollouts)
        return self._without_refill(rollouts)

    def judged(self, rows: Mapping[str, int], rollouts: list[Rollout]) -> set[str]:
        """Note these scored rollouts of whole groups of prompts of `rows`, and return the uids of those that have a signal."""
        self._record(rows, rollouts)
        return {group[0].prompt.uid for group in self._with_signal(rollouts)[0]}

    def refilled(self, trained: list[Rollout], sampled: list[Rollout], num_batches: int) -> Selected:
        """Return what is trained of groups that were `judged`, all with a signal, beside those `sampled` that have none."""
        num_groups = len(_by_uid(sampled))
        return self._selected(list(_by_uid(with_reward(trained)).values()), sampled, num_groups, num_batches)

    def _or_rewind(self, draw: Callable[[], Drawn]) -> Drawn:
        """Return what `draw` returns; after a row that cannot be used the next draw begins with that row again."""
        position = self.sampler.place()
        try:
            return draw()
        except DataError:
            self.sampler.seek(*position)
            raise

    def _without_refill(self, rollouts: list[Rollout]) -> Selected:
        if not self.groups.enable:
            return Selected(with_reward(rollouts), rollouts, self._data_metrics())
        kept, num_groups = self._with_signal(rollouts)
        return self._selected(kept, rollouts, num_groups, 1)

    def _selected(
        self,
        kept: list[list[Rollout]],
        sampled: list[Rollout],
        num_groups: int,
        num_batches: int,
        num_wanted: int | None = None,
    ) -> Selected:
        """Return as many of the groups with a signal as a step trains."""
        metrics = {
            "filter_groups/num_gen_batches": float(num_batches),
            "filter_groups/kept_fraction": len(kept) / num_groups,
        }
        trained = [rollout for group in kept[: self.num_wanted if num_wanted is None else num_wanted] for rollout in group]
        return Selected(trained, sampled, metrics | self._data_metrics())

    def _next(self, sample: Sample, num_wanted: int) -> Selected:
        if not (self.groups.enable and self.groups.refill):
            return self._without_refill(self._draw(sample))
        sampled: list[Rollout] = []
        kept: list[list[Rollout]] = []
        num_groups = num_batches = 0
        while len(kept) < num_wanted:
            if num_batches == self.groups.max_num_gen_batches:
                raise DataError(self.too_few(len(kept), num_groups, num_batches))
            if num_batches and self.exhausted:
                raise DataError(f"{self.too_few(len(kept), num_groups, num_batches)}; all other prompts are retired")
            rollouts = self._draw(sample)
            found, drawn = self._with_signal(rollouts)
            sampled += rollouts
            kept += found
            num_groups += drawn
            num_batches += 1
        return self._selected(kept, sampled, num_groups, num_batches, num_wanted)

    @property
    def epoch(self) -> int:
        """The epoch, from 0, of the prompts that were drawn last."""
        return self.sampler.epoch

    @property
    def exhausted(self) -> bool:
        """Return whether fewer prompts than a batch are left to draw, as the others are retired."""
        num_retired = 0 if self.pass_rates is None else self.pass_rates.num_retired
        return len(self.data) - num_retired < self.sampler.batch_size

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data, what is retired, and what the data were."""
        retired = {} if self.pass_rates is None else {"pass_rates": self.pass_rates.state_dict()}
        return self.sampler.state_dict() | retired | {"data": self.data.fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Continue where `state` was taken; a run that begins to retire prompts when it resumes begins with none.

        Returns whether it continues: with data.allow_change the next epoch of data that have changed begins instead. Raises
        CheckpointError for such data otherwise.
        """
        if not resume_order(self.sampler, self.data, state, allow_change=self.allow_change):
            return False
        if self.pass_rates is not None and "pass_rates" in state:
            self.pass_rates.load_state_dict(state["pass_rates"])
        return True

    def _prompts(self) -> list[tuple[int, Prompt]]:
        return [(row, self.data.prompt(row, uid)) for row, uid in self.sampler.next_batch()]

    def _draw(self, sample: Sample) -> list[Rollout]:
        """Return scored rollouts of the next batch of prompts; their pass rates are noted."""
        drawn = self._prompts()
        rollouts = sample([prompt for _, prompt in drawn])
        self._record({prompt.uid: row for row, prompt in drawn}, rollouts)
        return rollouts

    def _record(self, rows: Mapping[str, int], rollouts: list[Rollout]) -> None:
        """Note how many responses to each prompt passed, where what is drawn next depends on it; `rows` are by uid."""
        if self.pass_rates is None:
            return
        for uid, group in _by_uid(with_reward(rollouts)).items():
            values = [metric_of(rollout, self.retire_metric, self.factors) for rollout in group]
            passed = sum(value >= self.retire_score for value in values)
            self.pass_rates.record(rows[uid], passed, len(values))

    def _with_signal(self, rollouts: Sequence[Rollout]) -> tuple[list[list[Rollout]], int]:
        """Return the groups in which the metric differs, in their order, and the number of all groups.

        Members whose reward failed take no part; a group of them alone has no signal.
        """
        groups = list(_by_uid(with_reward(rollouts)).values())
        values = [metric_of(rollout, self.groups.metric, self.factors) for group in groups for rollout in group]
        sizes_G = torch.tensor([len(group) for group in groups], dtype=torch.long)
        group_N = torch.arange(len(groups)).repeat_interleave(sizes_G)
        has_signal_N = with_signal(torch.tensor(values, dtype=torch.float64), group_N)
        first_G = sizes_G.cumsum(0) - sizes_G
        kept = [group for group, has_signal in zip(groups, has_signal_N[first_G].tolist(), strict=True) if has_signal]
        return kept, len(_by_uid(rollouts))

    def too_few(self, num_kept: int, num_groups: int, num_batches: int) -> str:
        return (
            f"only {num_kept} of {num_groups} groups had a signal in {num_batches} batches of prompts, and "
            f"data.train_batch_size={self.num_wanted} are wanted; in the others all responses have the same "
            f"{self.groups.metric}. Raise algorithm.filter_groups.max_num_gen_batches or actor_rollout_ref.rollout.n, lower "
            "data.train_batch_size, set algorithm.filter_groups.refill=false, or train on prompts that are neither all "
            "solved nor all unsolved"
        )

    def _data_metrics(self) -> Metrics:
        """Return how many prompts are retired, where any can be."""
        return {} if self.pass_rates is None else {"data/retired_fraction": self.pass_rates.num_retired / len(self.data)}


def resume_order(
    sampler: RowOrder, data: PromptDataset | TrainingSet[Any], state: dict[str, Any], *, allow_change: bool
) -> bool:
    """Let the sampler continue where `state` was taken; return False where the next epoch of other data begins instead.

    Raises CheckpointError for data that have changed, unless that is allowed.
    """
    changes = differences(state["data"], data.fingerprint) if "data" in state else []
    before = state.get("num_rows")
    if not changes and before is not None and before != len(data):
        changes = [f"{before} rows were used, now {len(data)} are"]
    if changes and not allow_change:
        raise CheckpointError(
            f"the training data have changed since the checkpoint: {'; '.join(changes)}. Its position in them means nothing "
            "now; give the data of before, or start the next epoch with the new ones by data.allow_change=true"
        )
    if changes:
        sampler.seek(int(state["epoch"]) + 1, 0)
        return False
    sampler.load_state_dict(state)
    return True


def metric_of(rollout: Rollout, name: str, factors: Mapping[str, float]) -> float:
    """Return `score` (the sum of the reward's parts, each times its factor), `seq_reward` (the reward itself), or a part by its name.

    Raises RewardError for a part that this rollout's reward does not have.
    """
    if name == "seq_reward" or rollout.failure is not None:  # a fixed value has no parts
        assert rollout.reward is not None
        return rollout.reward
    parts = rollout.reward_parts
    if name == "score":
        # Added up anew: a penalty taken off the reward again would leave its rounding behind, which is no signal.
        return sum(factor * parts[part] for part, factor in factors.items())
    if name not in parts:
        raise RewardError(
            f"prompt {rollout.prompt.uid}, sample {rollout.sample_index}: its reward has no part {name!r} to choose groups by; "
            f"it has {', '.join(sorted(parts))}, and score and seq_reward are always there"
        )
    return parts[name]


def check_metric(name: str, config: Config) -> None:
    """Raise ConfigError for a metric that no reward of this run can have; `function/key` is known only when it is called."""
    try:
        names = list(factors_of(config))
    except ConfigError:
        return  # reported by itself
    overlong = ["overlong"] if config.reward.overlong_buffer.tokens is not None else []
    possible = ["score", "seq_reward", *names, *overlong, *LIFTED]
    if name not in possible and name.partition("/")[0] not in names:
        raise ConfigError(f"={name}: no part of the reward is called so; one of {', '.join(possible)}")


def _by_uid(rollouts: Sequence[Rollout]) -> dict[str, list[Rollout]]:
    groups: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.prompt.uid, []).append(rollout)
    return groups
