"""Iterative GRPO: in every iteration the reference becomes the policy, the reward model learns, then the policy learns from it.

DeepSeekMath (arXiv 2402.03300), section 4.1.4 and Algorithm 1: the reference model is set to the policy at the beginning of an
iteration, and the reward model is trained further on samples of the newest policy with a replay of historical data. Here the
reward model's steps open the iteration instead of closing it, so that the last ones are not made for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from grpo_rl.algos.scoring_quality import pair_accuracy
from grpo_rl.data.training_rows.pairs import Pair, pair_batch, pairs_of_groups
from grpo_rl.protocols import MovingReference
from grpo_rl.rewards.combined import REWARD_MODEL, RULE, by_rule
from grpo_rl.trainer.metrics import rollout_metrics
from grpo_rl.trainer.progress import Timer
from grpo_rl.trainer.replay import PairReplay
from grpo_rl.trainer.schedule import Context, required
from grpo_rl.trainer.sync import SyncSchedule
from grpo_rl.types import GREEDY, Metrics, Prompt, Rollout


def agreement(rollouts: Sequence[Rollout]) -> Metrics:
    """Return `iterate/agreement`: of the pairs that the rules reward differently, the share that the model orders as they do.

    Pairs are of one group, as a model of pairs leaves open a constant per prompt. Nothing where there is nothing to compare.
    """
    groups: dict[str, list[tuple[float, float]]] = {}
    for rollout in rollouts:
        if rollout.failure is None and rollout.sample_index != GREEDY:
            parts = rollout.reward_parts
            groups.setdefault(rollout.prompt.uid, []).append((parts[RULE], parts[REWARD_MODEL]))
    pairs = [
        (better, worse)
        for group in groups.values()
        for high, better in group
        for low, worse in group
        if high > low
    ]  # fmt: skip
    if not pairs:
        return {}
    better_P, worse_P = torch.tensor(pairs, dtype=torch.float64).T
    return {"iterate/agreement": pair_accuracy(better_P, worse_P)}


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
        self.sampled: list[Rollout] = []
        """All that the step has sampled."""
        if self.model_steps:
            self.reward_model = required(context.roles.reward_model, "reward_model")
            self.history = PairReplay(self.settings.replay_pairs, self.settings.replay_share, self.seed)
            context.roles.kept.append(self.history)

    def step(self) -> Metrics:
        """Do the next step of the iteration: its first ones train the reward model, the others the policy."""
        position, timer = self.position, self.context.progress.timer()
        self.sampled = []
        if position.begins(self.model_steps) and isinstance(self.reference, MovingReference):
            with timer("refresh_reference"):
                self.reference.become(self.actor)
        if position.in_policy_phase:
            metrics = super().step() | agreement(self.sampled)
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
        replayed = self.history.draw(len(chosen), iteration, self.context.step)
        metrics = rollout_metrics(rollouts) | agreement(sampled) | {"trainer/epoch": float(self.selection.epoch)}
        metrics |= {"reward_model/new_pairs": float(len(chosen)), "reward_model/replayed_pairs": float(len(replayed))}
        if chosen:
            with timer("update_reward_model"):
                pairs = [
                    Pair(best.prompt.token_ids, np.asarray(best.response_ids), np.asarray(worst.response_ids))
                    for best, worst in (*chosen, *replayed)
                ]
                metrics |= self.reward_model.update(pair_batch(pairs))
                self.history.add(chosen, iteration)
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
        return super().state_dict() | {"iterate": list(self.position)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from this state; phases of another length count from the place in the present one."""
        super().load_state_dict(state)
        iteration, in_policy_phase, number = state["iterate"]
        self.position = Position(int(iteration), bool(in_policy_phase) or self.model_steps == 0, int(number))
