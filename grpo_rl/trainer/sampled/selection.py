"""The prompts that a step trains on: drawn, sampled and scored, and kept if their groups have signal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grpo_rl.config.schema.tree import Config
from grpo_rl.data.dataset import PromptDataset
from grpo_rl.data.draw_order import Curriculum, make_row_order, resume_order
from grpo_rl.errors import DataError, FunctionError, RewardError
from grpo_rl.registry import Registry
from grpo_rl.trainer.sampled.trained import with_reward
from grpo_rl.types import Metrics, Prompt, Rollout

FILTERS: Registry[Callable[[list[Rollout]], bool]] = Registry("group filter", "keep(group: list[Rollout]) -> bool")
"""Users' functions that say whether a group is trained, of its rollouts that have a reward."""


class Selection:
    """Draws prompts, and chooses the groups that are trained.

    Dynamic sampling: DAPO, arXiv 2503.14476, section 3.2. Zero-variance filter and No-Positive-Resampling
    (`data.retire_above`): ScaleRL, arXiv 2510.13786, section 3.
    """

    def __init__(self, config: Config, data: PromptDataset, factors: Mapping[str, float]) -> None:
        self.data, self.factors = data, factors
        self.filters = config.algorithm.filter_groups
        self.refills = self.filters.enable and self.filters.refill
        self.keep = FILTERS.get(self.filters.metric) if self.filters.enable and ":" in self.filters.metric else None
        self.num_wanted = config.data.train_batch_size
        self.settings = config.data
        self.retired: set[int] = set()
        """The rows of prompts whose latest pass rate reached the bound. They stay retired."""
        self.sampler = make_row_order(config, data, self.retired.__contains__)

    def prompts(self, rows: Sequence[int] | None = None) -> list[tuple[int, Prompt]]:
        """Return the next batch of prompts, or those of `rows`, each with its row.

        Raises DataError for a row that cannot be used; the next draw then begins with the same rows.
        """
        with self.sampler.rewinding():
            drawn = self.sampler.next_batch() if rows is None else self.sampler.named(rows)
            return [(row, self.data.prompt(row, uid)) for row, uid in drawn]

    def note(self, rows: Mapping[str, int], rollouts: Sequence[Rollout]) -> None:
        """Note how many responses passed to each prompt, whose rows are by uid."""
        bound, curriculum = self.settings.retire_above, self.sampler if isinstance(self.sampler, Curriculum) else None
        if bound is None and curriculum is None:
            return
        for uid, group in by_uid([rollout for rollout in with_reward(rollouts) if rollout.prompt.uid in rows]).items():
            metrics = (metric_of(rollout, self.settings.retire_metric, self.factors) for rollout in group)
            passed = sum(metric >= self.settings.retire_score for metric in metrics)
            if curriculum is not None:
                curriculum.pass_rates[rows[uid]] = passed / len(group)
            if bound is not None and passed >= bound * len(group):
                self.retired.add(rows[uid])

    def choose(
        self, rollouts: Sequence[Rollout], draw_more: Callable[[], list[Rollout]], num_spared: int = 0
    ) -> tuple[list[Rollout], Metrics]:
        """Return the rollouts with a reward of the groups to train, in the order of the draws; and metrics.

        With refilling, `draw_more` returns the scored rollouts of further batches, until all groups but
        `num_spared` have a signal. Raises DataError after `max_num_gen_batches`.
        """
        if not self.filters.enable:
            return with_reward(rollouts), self._data_metrics()
        groups, num_groups, num_batches = self.with_signal(rollouts), len(by_uid(rollouts)), 1
        num_wanted = self.num_wanted - num_spared * self.refills
        while self.refills and len(groups) < num_wanted:
            is_last = num_batches == self.filters.max_num_gen_batches
            if is_last or self.exhausted:
                retired = "" if is_last else "; all other prompts are retired"
                raise DataError(self.too_few(len(groups), num_groups, num_batches) + retired)
            rollouts = draw_more()
            groups += self.with_signal(rollouts)
            num_groups, num_batches = num_groups + len(by_uid(rollouts)), num_batches + 1
        trained = [rollout for group in groups[:num_wanted] for rollout in group]
        return trained, self.metrics(len(groups), num_groups, num_batches)

    def metrics(self, num_kept: int, num_groups: int, num_batches: int) -> Metrics:
        return {
            "filter_groups/num_gen_batches": float(num_batches),
            "filter_groups/kept_fraction": num_kept / num_groups,
        } | self._data_metrics()

    def with_signal(self, rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
        """Return the groups in which the metric differs, or which the user's function keeps."""
        return [group for group in by_uid(with_reward(rollouts)).values() if self._has_signal(group)]

    def _has_signal(self, group: list[Rollout]) -> bool:
        if self.keep is None:
            return len({metric_of(rollout, self.filters.metric, self.factors) for rollout in group}) > 1
        if (is_kept := self.keep(group)) is None:
            raise FunctionError(f"group filter {self.filters.metric} returned None; it returns whether the group is trained")
        return bool(is_kept)

    @property
    def exhausted(self) -> bool:
        """Return whether fewer prompts than a batch are left to draw, as the others are retired."""
        return len(self.data) - len(self.retired) < self.sampler.batch_size

    def state_dict(self) -> dict[str, Any]:
        return self.sampler.state_dict() | {"retired": sorted(self.retired), "data": self.data.fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Return whether the order continues (`resume_order`)."""
        if not resume_order(self.sampler, self.data, state, allow_change=self.settings.allow_change):
            return False
        self.retired.clear()  # what draws looks at this very set
        self.retired |= set(() if self.settings.retire_above is None else state.get("retired", ()))
        return True

    def too_few(self, num_kept: int, num_groups: int, num_batches: int) -> str:
        metric = self.filters.metric
        reason = f"all responses have the same {metric}" if self.keep is None else f"{metric} returned false"
        return (
            f"only {num_kept} of {num_groups} groups had a signal in {num_batches} batches of prompts, and "
            f"data.train_batch_size={self.num_wanted} are wanted; in the others {reason}. Raise algorithm.filter_groups.max_num_gen_batches or actor_rollout_ref.rollout.n, lower "
            "data.train_batch_size, set algorithm.filter_groups.refill=false, or train on prompts that are neither all "
            "solved nor all unsolved"
        )

    def _data_metrics(self) -> Metrics:
        return {} if self.settings.retire_above is None else {"data/retired_fraction": len(self.retired) / len(self.data)}


def metric_of(rollout: Rollout, name: str, factors: Mapping[str, float]) -> float:
    """Return `score` (the weighted sum of the reward's parts), `seq_reward` (the reward itself), or a part by its name.

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


def by_uid(rollouts: Sequence[Rollout]) -> dict[str, list[Rollout]]:
    """Return the groups of rollouts, in the order in which they appear."""
    groups: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.prompt.uid, []).append(rollout)
    return groups
