"""Iterative GRPO: in every iteration the reference becomes the policy, the reward model learns, then the policy learns from it.

DeepSeekMath (arXiv 2402.03300), section 4.1.4 and Algorithm 1: the reference model is set to the policy at the beginning of an
iteration, and the reward model is trained further on samples of the newest policy with a replay of historical data. Here the
reward model's steps open the iteration instead of closing it, so that the last ones are not made for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

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


class IterateSchedule(SyncSchedule):
    """Iterations of steps of the reward model, then steps of the policy: those of `SyncSchedule`, on the model's score alone."""

    roles: ClassVar[frozenset[str]] = SyncSchedule.roles | {"reward_model"}

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.settings, self.seed = self.config.trainer.iterate, self.config.trainer.seed
        self.model_steps, self.policy_steps = self.settings.reward_model_steps, self.settings.steps_per_iteration
        self.iteration, self.place = 1, 0
        """The iteration, and the number of the next step in it, from 0: first come the reward model's steps, then the policy's."""
        self.sampled: list[Rollout] = []
        """All that the step has sampled."""
        if self.model_steps:
            self.reward_model = required(context.roles.reward_model, "reward_model")
            self.history = PairReplay(self.settings.replay_pairs, self.settings.replay_share, self.seed)
            context.roles.kept.append(self.history)

    def step(self) -> Metrics:
        """Do the next step of the iteration: its first ones train the reward model, the others the policy."""
        iteration, in_policy_phase, timer = self.iteration, self.place >= self.model_steps, self.context.progress.timer()
        self.sampled = []
        if self.place == 0 and isinstance(self.reference, MovingReference):
            with timer("refresh_reference"):
                self.reference.become(self.actor)
        metrics = super().step() | agreement(self.sampled) if in_policy_phase else self._train_reward_model()
        self.place += 1
        if self.place == self.model_steps + self.policy_steps:
            self.iteration, self.place = self.iteration + 1, 0
        at = {"iterate/iteration": float(iteration), "iterate/policy_phase": float(in_policy_phase)}
        return metrics | at | timer.metrics()

    def _train_reward_model(self) -> Metrics:
        """Sample groups of the policy, label them by the rules, and train on the best against the worst of each."""
        timer, iteration = self.context.progress.timer(), self.iteration
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
        in_policy_phase = self.place >= self.model_steps
        number = self.place - self.model_steps if in_policy_phase else self.place
        return super().state_dict() | {"iterate": [self.iteration, in_policy_phase, number]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from this state; phases of another length count from the place in the present one."""
        super().load_state_dict(state)
        iteration, in_policy_phase, number = state["iterate"]
        self.iteration = int(iteration)
        if in_policy_phase or self.model_steps == 0:
            self.place = self.model_steps + min(int(number), self.policy_steps - 1)
        else:
            self.place = min(int(number), self.model_steps - 1)
