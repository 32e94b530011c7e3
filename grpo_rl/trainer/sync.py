"""The synchronous schedule: sample with the current policy, score, train, and again."""

from __future__ import annotations

import copy
import dataclasses
import time
from pathlib import Path
from typing import Any

from grpo_rl.checkpoint.manifest import Checkpoint, verify
from grpo_rl.config.schema.tree import Config
from grpo_rl.data.collate import collate
from grpo_rl.data.dataset import PromptDataset
from grpo_rl.errors import DataError, Preempted
from grpo_rl.faults import fault_point, tell
from grpo_rl.telemetry.metrics.metrics_file import read_metrics
from grpo_rl.trainer.advantage import Advantage
from grpo_rl.trainer.baselines import with_baselines
from grpo_rl.trainer.context import Output, Roles, is_due, mix_seed
from grpo_rl.trainer.metrics import Timer, batch_metrics, logged_advantages, rollout_metrics
from grpo_rl.trainer.nonfinite import NonFiniteUpdates
from grpo_rl.trainer.progress import StepProgress
from grpo_rl.trainer.reward_failures import scored
from grpo_rl.trainer.saving import Saving
from grpo_rl.trainer.selection import Selected, Selection
from grpo_rl.trainer.trained_tokens import TrainedTokens, penalize_overlong
from grpo_rl.trainer.validation import validate
from grpo_rl.types import Batch, Metrics, Prompt, Rollout, Sampling


class SyncTrainer:
    """GRPO as the papers have it: every rollout is sampled by the policy that it then trains."""

    def __init__(
        self,
        config: Config,
        roles: Roles,
        train_data: PromptDataset,
        val_data: PromptDataset | None,
        output: Output,
        *,
        total_steps: int,
    ) -> None:
        self.config = config
        self.actor, self.rollout, self.rewarder, self.reference = roles.actor, roles.rollout, roles.rewarder, roles.reference
        self.critic, self.recoveries = roles.critic, roles.recoveries
        self.train_data, self.val_data = train_data, val_data
        self.output = output
        self.total_steps = total_steps
        self.step = 0
        self.advantage = Advantage(config.algorithm, roles.rewarder.factors)
        self.trained_tokens = TrainedTokens(config.algorithm)
        data = config.data
        self.selection = Selection(config, train_data, roles.rewarder.factors)
        self.saving = Saving(config, roles, output)
        self.store = self.saving.store
        rollout = config.actor_rollout_ref.rollout
        self.sampling = Sampling(
            max_tokens=data.max_response_length,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            min_p=rollout.min_p,
            keep_support=True,
            ignore_eos=rollout.ignore_eos,
            seed=rollout.seed,
        )
        self.progress = StepProgress(on_phase=self._phase)
        self.nonfinite = NonFiniteUpdates(config.trainer, output.run_dir)
        self._before: dict[str, Any] | None = None
        """The state at the beginning of the step that is going on."""
        self._unlogged: Metrics | None = None
        """Metrics of a step that is trained, and not validated, saved and logged yet."""

    # ---- one step ------------------------------------------------------------------------------------

    def train_step(self) -> Metrics:
        """Sample, score, compare, train: one batch of prompts from beginning to end."""
        timer = Timer(self.progress.phase)
        with timer("sync_weights"):
            self.rollout.sync_weights(self.actor)
        selected = self.selection.next(lambda prompts: self._sample(prompts, timer))
        sampled = rollout_metrics(selected.sampled) | selected.metrics
        if not selected.trained:
            self._keep_rollouts(selected)
            return sampled | timer.metrics()
        batch = collate(selected.trained, self.advantage.parts)
        with timer("old_logprobs"):
            batch = self.actor.old_logprobs(batch)
        if self.reference is not None:
            with timer("ref"):
                batch = self.reference.logprobs(batch)
        if self.critic is not None:
            with timer("values"):
                batch = self.critic.values(batch)
        with timer("adv"):
            batch, advantage_metrics = self.advantage(batch)
            batch, trained_metrics = self.trained_tokens(batch)
        update_metrics = self._update(batch, timer)
        self._keep_rollouts(selected, batch)
        self.nonfinite.check(self.step, update_metrics, selected.trained)
        measured = batch_metrics(batch, timer) | advantage_metrics | trained_metrics | update_metrics
        return sampled | measured | timer.metrics()

    def _sample(self, prompts: list[Prompt], timer: Timer) -> list[Rollout]:
        """Scored rollouts of these prompts; each is scored as it ends."""
        n, greedy = self.config.actor_rollout_ref.rollout.n, "baselines" in self.advantage.needs
        with timer("gen"):
            finished = self.progress.counting(self.rewarder.submit, len(prompts) * (n + greedy))
            rollouts = self.rollout.generate(prompts, n, self._step_sampling(), finished, greedy=greedy)
        with timer("reward"):
            rewarded = scored(self.rewarder, rollouts, self.output.console.warn)
            return with_baselines(
                penalize_overlong(rewarded, self.config.reward.overlong_buffer, self.config.data.max_response_length)
            )

    def _update(self, batch: Batch, timer: Timer) -> Metrics:
        """Train the critic, and the actor once the critic's warm-up is over."""
        metrics: Metrics = {}
        if self.critic is not None:
            with timer("update_critic"):
                metrics |= self.critic.update(batch)
        if self.step > self.config.trainer.critic_warmup:
            with timer("update_actor"):
                metrics |= self.actor.update(batch)
        return metrics

    # ---- the run --------------------------------------------------------------------------------------

    def fit(self) -> None:
        """Train to the last step, validating and saving on the way.

        Raises Preempted when a signal ended it, with everything that was trained saved.
        """
        try:
            self._fit()
        except Preempted as request:
            raise self._saved(request) from None
        except Exception:
            self.saving.rescue()
            raise
        finally:
            self.output.stop.finishing()

    def _fit(self) -> None:
        trainer = self.config.trainer
        if self._unlogged is not None:
            self._end_step()
        if trainer.val_only or (self.step == 0 and trainer.val_before_train):
            self._log(self.evaluate())
        if trainer.val_only:
            return
        with self.output.console.progress("training", self.total_steps, keep=False) as bar:
            self.progress = StepProgress(bar, self._phase)
            self.progress.done(self.step)
            while self.step < self.total_steps and not self.selection.exhausted:
                self._whole_step()
                self.progress.done()
            if trainer.save_freq > 0 and self.step > 0:
                self.progress.phase("save")
                self.saving.settle(self.step, self.state_dict)
        if self.selection.exhausted:
            self.output.console.warn(
                f"training ends at step {self.step} of {self.total_steps}: fewer prompts than a batch are left, the others "
                "passed often enough to retire; give harder data, or raise data.retire_above"
            )

    def _whole_step(self) -> None:
        """One step with what is due after it."""
        self._before = copy.deepcopy(self.state_dict())
        self.output.stop.step_begins()
        started = time.perf_counter()
        self.step += 1
        tell(step=self.step)
        self.output.status.update(step=self.step, total=self.total_steps)
        fault_point("driver.step")
        try:
            metrics = self.train_step()
        except DataError:
            self._keep_finished()
            raise
        metrics["trainer/epoch"] = float(self.selection.epoch)
        metrics["timing_s/step"] = time.perf_counter() - started
        self._unlogged = metrics
        self._end_step()

    def _end_step(self) -> None:
        """What is due after the training of a step: validate, save, log."""
        assert self._unlogged is not None
        trainer, metrics, started = self.config.trainer, self._unlogged, time.perf_counter()
        last = self.step == self.total_steps or self.selection.exhausted
        is_validated = "timing_s/testing" in metrics  # by the run that saved this step, and was killed before it logged it
        if self.val_data is not None and (last or is_due(self.step, trainer.test_freq)) and not is_validated:
            metrics |= self.evaluate()
        if trainer.save_freq > 0 and (last or is_due(self.step, trainer.save_freq)) and not self.saving.is_saved(self.step):
            metrics |= self.save()
        metrics |= self.saving.metrics()
        metrics["timing_s/step"] += time.perf_counter() - started
        self._log(metrics | self.recoveries())
        self._unlogged = None
        self.output.stop.step_ends(metrics.get("timing_s/save"))

    def _keep_finished(self) -> None:
        """Save what was trained before a step for which the data cannot be used."""
        assert self._before is not None
        self.load_state_dict(self._before)
        if self.config.trainer.save_freq > 0 and self.step > max([0, *self.store.steps()]):
            self.save()

    def evaluate(self) -> Metrics:
        """Metrics of the current policy on the validation data; its responses go to `val/step_N.jsonl`."""
        if self.val_data is None:
            return {}
        timer = Timer(self.progress.phase)
        sampling = dataclasses.replace(self.sampling, seed=mix_seed(self.sampling.seed, -1))
        with timer("testing"):
            self.rollout.sync_weights(self.actor)
            values = self.config.actor_rollout_ref.rollout.val_kwargs
            rollouts, metrics = validate(self.val_data, values, sampling, self.rollout, self.rewarder, self.output.console)
        self.output.rollouts.write("val", self.step, rollouts)
        return metrics | timer.metrics()

    def save(self) -> Metrics:
        """Write, or begin to write, a checkpoint of everything that decides the steps to come."""
        timer = Timer(self.progress.phase)
        with timer("save"):
            self.saving.begin(self.step, self.state_dict())
        return timer.metrics()

    def _saved(self, request: Preempted) -> Preempted:
        """The request to stop, followed: the newest state between two steps is saved."""
        self.output.stop.finishing()
        if self._before is not None and self._unlogged is None and self.step != self._before["step"]:
            # No weight has changed since the step began: its beginning is where the run goes on.
            self.load_state_dict(self._before)
        if self.step == 0:
            return Preempted(f"{request}: no step was done, so the same command begins anew")
        self.progress.phase("save")
        self.saving.settle(self.step, self.state_dict)
        return Preempted(f"{request}: step {self.step} of {self.total_steps} is saved; the same command goes on from there")

    def resume(self, checkpoint: Checkpoint | Path) -> None:
        """Go on from this checkpoint; one that is only a path is verified first."""
        checkpoint = verify(checkpoint) if isinstance(checkpoint, Path) else checkpoint
        self.load_state_dict(checkpoint.state)
        self.actor.load(checkpoint.folder)
        if self.critic is not None:
            self.critic.load(checkpoint.folder)
        self.output.sinks.truncate_after(self.step)
        if any(row["step"] == self.step for row in read_metrics(self.output.run_dir.metrics_file)):
            self._unlogged = None
        self.output.status.update(step=self.step, total=self.total_steps, last_commit=self.step)
        self.output.console.info(f"resumed from {checkpoint.folder} at step {self.step}")
        for aside in self.store.set_aside_after(self.step):
            self.output.console.info(f"a checkpoint of a later step is now {aside}")
        if self.step >= self.total_steps:
            self.output.console.warn(
                f"step {self.step} of {self.total_steps} is done: nothing is left to train; "
                "for more give trainer.total_training_steps, for a new run another trainer.experiment_name"
            )

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "sampler": self.selection.state_dict(),
            "advantage": self.advantage.state_dict(),
            "num_rows": len(self.train_data),
            "nonfinite": self.nonfinite.state_dict(),
            "unlogged": self._unlogged,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.selection.load_state_dict(state["sampler"])
        self.step = int(state["step"])
        self.advantage.load_state_dict(state["advantage"])
        self.nonfinite.load_state_dict(state.get("nonfinite", {}))
        self._unlogged = state.get("unlogged")

    def _step_sampling(self) -> Sampling:
        """Sampling with the step mixed into the seed; the pool mixes in prompt and sample."""
        return dataclasses.replace(self.sampling, seed=mix_seed(self.sampling.seed, self.step))

    def _keep_rollouts(self, selected: Selected, batch: Batch | None = None) -> None:
        """Write all that was sampled, with the advantages of what was trained: the rollouts of `batch`."""
        if self.config.trainer.save_rollouts:
            advantages = logged_advantages(selected.sampled, selected.trained, batch)
            self.output.rollouts.write("rollouts", self.step, selected.sampled, advantages)

    def _phase(self, name: str) -> None:
        self.output.status.update(phase=name)
        self.output.stop.finishing()  # a commit is not to be interrupted
        self.saving.poll()
        self.output.stop.phase(name)

    def _log(self, metrics: Metrics) -> None:
        if metrics:
            fault_point("driver.log")
            self.output.sinks.log(self.step, metrics)
            self.output.console.step(self.step, self.total_steps, metrics)
