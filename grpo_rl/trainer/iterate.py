"""Iterative GRPO: in every iteration the reference becomes the policy, the reward model learns, then the policy learns from it.

DeepSeekMath (arXiv 2402.03300), section 4.1.4 and Algorithm 1: the reference model is set to the policy at the beginning of an
iteration, and the reward model is trained further on samples of the newest policy with a replay of historical data. Here the
reward model's steps open the iteration instead of closing it, so that the last ones are not made for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch

from grpo_rl.algos.scoring_quality import pair_accuracy
from grpo_rl.data.training_rows.pairs import pair_batch, pairs_of_groups
from grpo_rl.protocols import MovingReference
from grpo_rl.rewards.combined import REWARD_MODEL, RULE, by_rule
from grpo_rl.trainer.metrics import rollout_metrics
from grpo_rl.trainer.progress import Timer
from grpo_rl.trainer.replay import LabelledPair, ReplayHistory
from grpo_rl.trainer.schedule import Context, required
from grpo_rl.trainer.sync import SyncSchedule
from grpo_rl.types import GREEDY, Metrics, Prompt, Rollout

# ---- what the model and the rules say of a step ----------------------------------------------------------------------


def opinions(rollouts: Sequence[Rollout]) -> Metrics:
    """Return how well the model's scores agree with the rules, within groups: a model of pairs leaves open a constant per prompt.

    `iterate/correlation` is Pearson's, of the deviations from the means of the groups; `iterate/agreement` is the share of the
    pairs within a group, of different reward by the rules, that the model orders as they do. Each only where there is something
    to compare.
    """
    scored = [rollout for rollout in rollouts if rollout.failure is None and rollout.sample_index != GREEDY]
    rule_N, score_N = (
        torch.tensor([rollout.reward_parts[name] for rollout in scored], dtype=torch.float64) for name in (RULE, REWARD_MODEL)
    )
    groups: dict[str, list[int]] = {}
    for index, rollout in enumerate(scored):
        groups.setdefault(rollout.prompt.uid, []).append(index)
    metrics: Metrics = {}
    centered = [values_N.clone() for values_N in (rule_N, score_N)]
    for members in groups.values():
        for values_N in centered:
            values_N[members] -= values_N[members].mean()
    lengths = [float(values_N.norm()) for values_N in centered]
    if min(lengths) > 1e-12 * len(scored):
        metrics["iterate/correlation"] = float(centered[0] @ centered[1]) / (lengths[0] * lengths[1])
    pairs = [(i, j) for members in groups.values() for i in members for j in members if rule_N[i] > rule_N[j]]
    if pairs:
        better_P, worse_P = (score_N[torch.tensor(side)] for side in zip(*pairs, strict=True))
        metrics["iterate/agreement"] = pair_accuracy(better_P, worse_P)
    return metrics


class Opinion:
    """The gains of the policy in the eyes of the reward model and in those of the rules, since the iteration began.

    Each gain is in units of the spread, over the responses of the iteration's first step of the policy, of what it measures:
    `iterate/gap` = (s_t - s_0) / std(s_0) - (r_t - r_0) / std(r_0), of means of the model's scores s and the rules' rewards r.
    It grows where the policy learns to please the model without getting better (the proxy and the gold reward of Gao et al.,
    arXiv 2210.10760).
    """

    def __init__(self) -> None:
        self.start: dict[str, list[float]] = {}
        """Mean and spread of rules and scores at the iteration's first step of the policy."""

    def __call__(self, rollouts: Sequence[Rollout], *, begins: bool) -> Metrics:
        """Return `opinions` of the step's rollouts, and the gap; `begins` at the first step of the policy in an iteration."""
        scored = [rollout for rollout in rollouts if rollout.failure is None and rollout.sample_index != GREEDY]
        if not scored:
            return {}
        gains = []
        if begins:
            self.start = {}
        for name in (REWARD_MODEL, RULE):
            values = [rollout.reward_parts[name] for rollout in scored]
            mean = math.fsum(values) / len(values)
            spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
            first_mean, first_spread = self.start.setdefault(name, [mean, spread])
            # All alike at the beginning: the gain has no unit.
            gains.append((mean - first_mean) / first_spread if first_spread > 0 else math.nan)
        gap = gains[0] - gains[1]
        return opinions(scored) | ({"iterate/gap": gap} if math.isfinite(gap) else {})

    def state_dict(self) -> dict[str, Any]:
        return {name: list(values) for name, values in self.start.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = {name: [float(value) for value in values] for name, values in state.items()}


# ---- the schedule --------------------------------------------------------------------------------------------------------


class Position(NamedTuple):
    """The place of a step in its iteration."""

    iteration: int = 1
    in_policy_phase: bool = False
    number: int = 0
    """The number of the step in its phase, from 0."""

    def after(self, model_steps: int, policy_steps: int) -> Position:
        """Return the place of the next step, where the phases of an iteration have so many steps."""
        if self.number + 1 < (policy_steps if self.in_policy_phase else model_steps):
            return self._replace(number=self.number + 1)
        if not self.in_policy_phase:
            return Position(self.iteration, True)
        return Position(self.iteration + 1, model_steps == 0)

    def begins(self, model_steps: int) -> bool:
        """Return whether this is the first step of its iteration."""
        return self.number == 0 and (not self.in_policy_phase or model_steps == 0)


class IterateSchedule(SyncSchedule):
    """Iterations of steps of the reward model, then steps of the policy: those of `SyncSchedule`, on the model's score alone."""

    roles: ClassVar[frozenset[str]] = SyncSchedule.roles | {"reward_model"}

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.settings, self.seed = self.config.trainer.iterate, self.config.trainer.seed
        self.model_steps, self.policy_steps = self.settings.reward_model_steps, self.settings.steps_per_iteration
        self.position = Position(in_policy_phase=self.model_steps == 0)
        self.opinion = Opinion()
        self.sampled: list[Rollout] = []
        """All that the step has sampled."""
        if self.model_steps:
            self.reward_model = required(context.roles.reward_model, "reward_model")
            self.history = ReplayHistory(self.settings.replay_pairs, self.settings.replay_share, self.seed)
            context.roles.kept.append(self.history)

    def step(self) -> Metrics:
        """Do the next step of the iteration: its first ones train the reward model, the others the policy."""
        position, timer = self.position, self.context.progress.timer()
        self.sampled = []
        if position.begins(self.model_steps) and isinstance(self.reference, MovingReference):
            with timer("refresh_reference"):
                self.reference.become(self.actor)
        if position.in_policy_phase:
            metrics = super().step() | self.opinion(self.sampled, begins=position.number == 0)
        else:
            metrics = self._train_reward_model()
        self.position = position.after(self.model_steps, self.policy_steps)
        place = {"iterate/iteration": float(position.iteration), "iterate/policy_phase": float(position.in_policy_phase)}
        return metrics | place | timer.metrics()

    def _train_reward_model(self) -> Metrics:
        """Sample groups of the policy, label them by the rules, and train on the best against the worst of each."""
        timer, iteration = self.context.progress.timer(), self.position.iteration
        with timer("sync_weights"):
            self.rollout.sync_weights(self.actor)
        rollouts = self.selection.draw(lambda prompts: self._sample(prompts, timer))
        sampled = [rollout for rollout in rollouts if rollout.sample_index != GREEDY]
        chosen = pairs_of_groups(by_rule(sampled))
        new = [LabelledPair.of(*pair, iteration, self.history.num_seen + i) for i, pair in enumerate(chosen)]
        replayed = self.history.draw(len(new), iteration, self.context.step)
        metrics = rollout_metrics(rollouts) | opinions(sampled) | {"trainer/epoch": float(self.selection.epoch)}
        metrics |= {"reward_model/new_pairs": float(len(new)), "reward_model/replayed_pairs": float(len(replayed))}
        if new:
            with timer("update_reward_model"):
                metrics |= self.reward_model.update(pair_batch([labelled.pair for labelled in [*new, *replayed]]))
                self.history.add(new, iteration)
        if self.config.trainer.save_rollouts:
            self.output.rollouts.write("rollouts", self.context.step, rollouts)
        self.trained = [rollout for pair in chosen for rollout in pair]
        return metrics | timer.metrics()

    def _sample(self, prompts: list[Prompt], timer: Timer) -> list[Rollout]:
        rollouts = super()._sample(prompts, timer)
        self.sampled += rollouts
        return rollouts

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the steps that train the policy, and the place in the iteration."""
        return super().state_dict() | {"iterate": {"place": list(self.position), "opinion": self.opinion.state_dict()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from this state; phases of another length count from the place in the present one."""
        super().load_state_dict(state)
        iteration, in_policy_phase, number = state["iterate"]["place"]
        self.position = Position(int(iteration), bool(in_policy_phase) or self.model_steps == 0, int(number))
        self.opinion.load_state_dict(state["iterate"]["opinion"])
