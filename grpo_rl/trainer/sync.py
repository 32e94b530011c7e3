"""The synchronous schedule: sample with the current policy, score, train, and again."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from grpo_rl.checkpoint.store import CheckpointStore, verify
from grpo_rl.config.schema import Config
from grpo_rl.data.collate import collate
from grpo_rl.data.dataset import PromptDataset
from grpo_rl.errors import CheckpointError
from grpo_rl.faults import fault_point, tell
from grpo_rl.rewards.metrics import validation_metrics
from grpo_rl.roles import Actor, Critic, Reference, Rewarder, RolloutPool
from grpo_rl.telemetry.console import Console
from grpo_rl.telemetry.rollouts import RolloutLog
from grpo_rl.telemetry.rundir import RunDir
from grpo_rl.telemetry.sinks import Sinks
from grpo_rl.trainer.advantage import Advantage
from grpo_rl.trainer.baselines import with_baselines
from grpo_rl.trainer.metrics import Timer, batch_metrics, rollout_metrics
from grpo_rl.trainer.progress import StepProgress, advancing
from grpo_rl.trainer.selection import Selected, Selection
from grpo_rl.trainer.shaping import TrainedTokens, penalize_overlong
from grpo_rl.types import Batch, Metrics, Prompt, Rollout, Sampling


@dataclasses.dataclass(slots=True)
class Roles:
    """The parts that a step drives. `reference` is None where no KL term reads it, `critic` where the estimator does not."""

    actor: Actor
    rollout: RolloutPool
    rewarder: Rewarder
    reference: Reference | None
    critic: Critic | None = None
    recoveries: Callable[[], Metrics] = dict
    """Since the last call: workers that failed and came back."""


@dataclasses.dataclass(slots=True)
class Output:
    """Where a run shows and keeps what it does."""

    run_dir: RunDir
    console: Console
    sinks: Sinks
    rollouts: RolloutLog


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
        self.store = CheckpointStore(output.run_dir.checkpoints, config.trainer.max_actor_ckpt_to_keep)
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
        self.progress = StepProgress()

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
        measured = batch_metrics(batch, timer) | advantage_metrics | trained_metrics | update_metrics
        return sampled | measured | timer.metrics()

    def _sample(self, prompts: list[Prompt], timer: Timer) -> list[Rollout]:
        """Scored rollouts of these prompts; each is scored as it ends."""
        n, greedy = self.config.actor_rollout_ref.rollout.n, self.advantage.needs.baselines
        with timer("gen"):
            finished = self.progress.counting(self.rewarder.submit, len(prompts) * (n + greedy))
            rollouts = self.rollout.generate(prompts, n, self._step_sampling(), finished, greedy=greedy)
        with timer("reward"):
            return with_baselines(self._penalized(self.rewarder.wait(rollouts)))

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
        """Train to the last step, validating and saving on the way."""
        trainer = self.config.trainer
        if trainer.val_only or (self.step == 0 and trainer.val_before_train):
            self._log(self.evaluate())
        if trainer.val_only:
            return
        with self.output.console.progress("training", self.total_steps, keep=False) as bar:
            self.progress = StepProgress(bar)
            self.progress.done(self.step)
            while self.step < self.total_steps and not self.selection.exhausted:
                self._log(self._whole_step())
                self.progress.done()
        if self.selection.exhausted:
            self.output.console.warn(
                f"training ends at step {self.step} of {self.total_steps}: fewer prompts than a batch are left, the others "
                "passed often enough to retire; give harder data, or raise data.retire_above"
            )

    def _whole_step(self) -> Metrics:
        """One step with what is due after it."""
        trainer, started = self.config.trainer, time.perf_counter()
        self.step += 1
        tell(step=self.step)
        fault_point("driver.step")
        metrics = self.train_step()
        last = self.step == self.total_steps or self.selection.exhausted
        if self.val_data is not None and (last or _due(self.step, trainer.test_freq)):
            metrics |= self.evaluate()
        if trainer.save_freq > 0 and (last or _due(self.step, trainer.save_freq)):
            metrics |= self.save()
        metrics["timing_s/step"] = time.perf_counter() - started
        metrics["trainer/epoch"] = float(self.selection.epoch)
        return metrics | self.recoveries()

    def evaluate(self) -> Metrics:
        """Metrics of the current policy on the validation data; its responses go to `val/step_N.jsonl`."""
        if self.val_data is None:
            return {}
        timer = Timer()
        values = self.config.actor_rollout_ref.rollout.val_kwargs
        sampling = dataclasses.replace(
            self.sampling,
            temperature=values.temperature if values.do_sample else 0.0,
            top_p=values.top_p,
            top_k=values.top_k,
            min_p=0.0,
            keep_support=False,
            seed=_mix(self.sampling.seed, -1),
        )
        with timer("testing"):
            self.rollout.sync_weights(self.actor)
            prompts = [self.val_data.prompt(row, f"val-{row}") for row in range(len(self.val_data))]
            with self.output.console.progress("validating", len(prompts) * values.n, keep=False) as bar:
                rollouts = self.rollout.generate(prompts, values.n, sampling, advancing(bar, self.rewarder.submit))
            rollouts = self.rewarder.wait(rollouts)
        self.output.rollouts.write("val", self.step, rollouts)
        return validation_metrics(rollouts, values.n) | timer.metrics()

    def save(self) -> Metrics:
        """Write a checkpoint of everything that decides the steps to come."""
        timer = Timer()
        with timer("save"):
            folder = self.store.save(self.step, self._write_state, self.state_dict())
            self.actor.committed(folder)
            if self.critic is not None:
                self.critic.committed(folder)
        return timer.metrics()

    def _write_state(self, folder: Path) -> None:
        self.actor.save(folder)
        if self.critic is not None:
            self.critic.save(folder)
        if "hf_model" in self.config.actor_rollout_ref.actor.checkpoint.save_contents:
            self.actor.export(folder / "huggingface")

    # ---- resume ---------------------------------------------------------------------------------------

    def resume(self, folder: Path) -> None:
        """Go on from the checkpoint in `folder`."""
        self.load_state_dict(verify(folder))
        self.actor.load(folder)
        if self.critic is not None:
            self.critic.load(folder)
        self.output.sinks.truncate_after(self.step)
        self.output.console.info(f"resumed from {folder} at step {self.step}")
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
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["num_rows"] != len(self.train_data):
            raise CheckpointError(
                f"the checkpoint was made with {state['num_rows']} training rows, data.train_files has {len(self.train_data)} now; "
                "its position in the data means nothing there"
            )
        self.step = int(state["step"])
        self.selection.load_state_dict(state["sampler"])
        self.advantage.load_state_dict(state["advantage"])

    # ---- small parts -----------------------------------------------------------------------------------

    def _step_sampling(self) -> Sampling:
        """Sampling with the step mixed into the seed; the pool mixes in prompt and sample."""
        return dataclasses.replace(self.sampling, seed=_mix(self.sampling.seed, self.step))

    def _penalized(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        return penalize_overlong(rollouts, self.config.reward.overlong_buffer, self.config.data.max_response_length)

    def _keep_rollouts(self, selected: Selected, batch: Batch | None = None) -> None:
        """Write all that was sampled, with the advantages of what was trained: the rollouts of `batch`."""
        if not self.config.trainer.save_rollouts:
            return
        advantages: dict[tuple[str, int], float] = {}
        if batch is not None:
            assert batch.advantages_T is not None
            ends_N = batch.response_lengths_N.cumsum(0).tolist()
            lengths_N = batch.response_lengths_N.tolist()
            # One number per rollout: outcome advantages are the same on every token, else this is the last one's.
            last = [
                float(batch.advantages_T[end - 1]) if length else 0.0 for end, length in zip(ends_N, lengths_N, strict=True)
            ]
            advantages = dict(zip(map(_occurrence, selected.trained), last, strict=True))
        logged = [advantages.get(_occurrence(rollout)) for rollout in selected.sampled]
        self.output.rollouts.write("rollouts", self.step, selected.sampled, logged)

    def _log(self, metrics: Metrics) -> None:
        if metrics:
            fault_point("driver.log")
            self.output.sinks.log(self.step, metrics)
            self.output.console.step(self.step, self.total_steps, metrics)


def _occurrence(rollout: Rollout) -> tuple[str, int]:
    """What tells this rollout from all others of its step."""
    return rollout.prompt.uid, rollout.sample_index


def _due(step: int, frequency: int) -> bool:
    return frequency > 0 and step % frequency == 0


def _mix(seed: int | None, number: int) -> int:
    """A seed for one step, far from those of other steps and runs."""
    return ((seed or 0) * 1_000_003 + number * 7_919 + 17) & 0x7FFF_FFFF_FFFF_FFFF
