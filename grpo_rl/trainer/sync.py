"""The synchronous schedule: sample with the current policy, score, train, and again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from grpo_rl.data.collate import collate
from grpo_rl.data.training_rows.pairs import pairs_of_groups, with_sides
from grpo_rl.trainer.metrics import batch_metrics, logged_advantages, pair_metrics, rollout_metrics
from grpo_rl.trainer.progress import Timer
from grpo_rl.trainer.replay import GroupReplay
from grpo_rl.trainer.sampled.advantage import Advantage, check_finite, with_baselines
from grpo_rl.trainer.sampled.selection import Selected, Selection
from grpo_rl.trainer.sampled.trained import TrainedTokens, penalize_overlong, scored
from grpo_rl.trainer.schedule import Context, required, training_sampling
from grpo_rl.trainer.validation import Validation
from grpo_rl.types import Batch, Metrics, Prompt, Rollout


class SyncSchedule:
    """GRPO and its kin as the papers have them: every rollout is sampled by the policy that it then trains, singly or in pairs.

    Schedules that sample otherwise are made of its parts: `scored`, `train`, `evaluate` and the state.
    """

    roles: ClassVar[frozenset[str]] = frozenset({"actor", "rollout", "rewarder", "reference", "teacher", "critic"})

    def __init__(self, context: Context) -> None:
        self.context, self.config, self.output = context, context.config, context.output
        self.actor = required(context.roles.actor, "actor")
        self.rollout = required(context.roles.rollout, "rollout")
        self.rewarder = required(context.roles.rewarder, "rewarder")
        self.reference, self.teacher, self.critic = context.roles.reference, context.roles.teacher, context.roles.critic
        self.train_data = required(context.train_data, "training data")
        self.advantage = Advantage(
            self.config.algorithm, self.rewarder.factors, of_turns=self.config.actor_rollout_ref.rollout.multi_turn.enable
        )
        self.trained_tokens = TrainedTokens(self.config.algorithm)
        self.compares = context.objective.needs_pairs
        """True where the loss compares the best and the worst response of each group; no advantages are estimated then."""
        self.selection = Selection(self.config, self.train_data, self.rewarder.factors)
        self.validation = Validation(context)
        self.replay: GroupReplay | None = None
        if self.config.algorithm.replay.max_age:
            self.replay = GroupReplay(
                self.config.algorithm.replay, self.config.data.train_batch_size, self.config.actor_rollout_ref.rollout.n
            )
            context.roles.kept.append(self.replay)
        self.trained: Sequence[Rollout] = ()

    def step(self) -> Metrics:
        """Sample, score, compare, train: one batch of prompts from beginning to end."""
        timer = self.context.progress.timer()
        with timer("sync_weights"):
            self.rollout.sync_weights(self.actor)
        spared = 0 if self.replay is None else len(self.replay.of_step(self.context.step))
        selected = self.selection.next(lambda prompts: self._sample(prompts, timer), spared)
        metrics = self.train(selected, timer)
        return metrics | timer.metrics()

    def _sample(self, prompts: list[Prompt], timer: Timer) -> list[Rollout]:
        """Return scored rollouts of these prompts; each is scored as it ends."""
        n, greedy = self.config.actor_rollout_ref.rollout.n, "baselines" in self.advantage.needs
        sampling = training_sampling(self.config, self.context.step)
        with timer("gen"):
            finished = self.context.progress.counting(self.rewarder.submit, len(prompts) * (n + greedy))
            rollouts = self.rollout.generate(prompts, n, sampling, finished, greedy=greedy)
        return self.scored(rollouts, timer)

    # ---- from rollouts to new weights --------------------------------------------------------------------

    def scored(self, rollouts: Sequence[Rollout], timer: Timer) -> list[Rollout]:
        """Return the rollouts with the rewards that they are trained with; greedy ones have become baselines of the others."""
        with timer("reward"):
            return self.rewarded(rollouts)

    def rewarded(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Return what `scored` does, without a phase of the step: for any thread."""
        rewarded = scored(self.rewarder, rollouts, self.output.console.warn)
        return with_baselines(
            penalize_overlong(rewarded, self.config.reward.overlong_buffer, self.config.data.max_response_length)
        )

    def train(self, selected: Selected, timer: Timer) -> Metrics:
        """Train on the rollouts of one step, and return its metrics, without those of `timer`. They are audited beside it."""
        audit = self.context.roles.audit
        if audit is not None:
            audit.submit(selected.sampled)
        sampled = rollout_metrics(selected.sampled) | selected.metrics | {"trainer/epoch": float(self.selection.epoch)}
        if self.compares:
            pairs = pairs_of_groups(selected.trained)
            sampled |= pair_metrics(pairs, len({rollout.prompt.uid for rollout in selected.sampled}))
            selected = replace(selected, trained=[rollout for pair in pairs for rollout in pair])
        elif self.replay is not None:
            filled, replayed = self.replay.fill(selected.trained, self.context.step)
            selected, sampled = replace(selected, trained=filled), sampled | replayed
        if not selected.trained:
            return sampled | self._keep_rollouts(selected)
        batch = with_sides(collate(selected.trained)) if self.compares else collate(selected.trained, self.advantage.parts)
        with timer("old_logprobs"):
            batch = self.actor.old_logprobs(batch)
        if self.reference is not None:
            with timer("ref"):
                batch = self.reference.logprobs(batch)
        if self.teacher is not None:
            with timer("teacher"):
                batch, taught = self.teacher.logprobs(batch, selected.trained)
            sampled |= taught
        if self.critic is not None:
            with timer("values"):
                batch = self.critic.values(batch)
        with timer("adv"):
            batch, trained, measured = self._weighed(batch)
        if self.critic is not None:
            with timer("update_critic"):
                measured |= self.critic.update(trained)
        if self.context.step > self.config.trainer.critic_warmup:
            with timer("update_actor"):
                measured |= self.actor.update(trained)
        sampled |= self._keep_rollouts(selected, batch)
        self.trained = selected.trained
        return sampled | batch_metrics(batch, timer) | measured

    def _weighed(self, batch: Batch) -> tuple[Batch, Batch, Metrics]:
        """Return the batch with its advantages, what is trained of it, and metrics of both; pairs are trained whole."""
        if self.compares:
            check_finite(batch)
            return batch, batch, {}
        taught, advantage_metrics = self.context.objective.distillation, dict[str, float]()
        if taught is not None and not taught.task:
            batch = batch.replace(advantages_N=torch.zeros(batch.num_rollouts))  # the ranks make all of them
        else:
            batch, advantage_metrics = self.advantage(batch)
        trained, trained_metrics = self.trained_tokens(batch)
        return batch, trained, advantage_metrics | trained_metrics

    def _keep_rollouts(self, selected: Selected, batch: Batch | None = None) -> Metrics:
        """Write all that was sampled, with its audit and the advantages of what was trained, the rollouts of `batch`.

        Returns the metrics of the audit.
        """
        audit, audited, sampled = self.context.roles.audit, dict[str, float](), selected.sampled
        if audit is not None:
            audited = audit.wait(self.output.console.warn)
            sampled = audit.logged(sampled)
        if self.config.trainer.save_rollouts:
            advantages = logged_advantages(sampled, selected.trained, batch)
            self.output.rollouts.write("rollouts", self.context.step, sampled, advantages)
        return audited

    # ---- the rest of the contract ------------------------------------------------------------------------

    def evaluate(self) -> Metrics:
        return self.validation()

    def ended(self) -> str | None:
        """Return why training ends early: with `data.retire_above` the prompts can run out."""
        if not self.selection.exhausted:
            return None
        return (
            "fewer prompts than a batch are left, the others passed often enough to retire; give harder data, or raise "
            "data.retire_above"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data, and the state of what the advantages are made with."""
        advantage, sampler = self.advantage.state_dict(), self.selection.state_dict()
        return {"sampler": sampler, "advantage": advantage, "num_rows": len(self.train_data)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.selection.load_state_dict(state["sampler"])
        self.advantage.load_state_dict(state["advantage"])
