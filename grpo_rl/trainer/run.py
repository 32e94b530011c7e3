"""A run: what all schedules share. Counting steps, validating, saving, logging, resuming, answering signals."""

from __future__ import annotations

import copy
import dataclasses
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo_rl.checkpoint.manifest import STATE, Checkpoint, verify
from grpo_rl.errors import CheckpointError, DataError, DivergedError, Preempted, StoppedByAlarm
from grpo_rl.faults import fault_point, tell
from grpo_rl.telemetry.diagnosis.diagnose import ALARM, Alarms, as_warning
from grpo_rl.telemetry.diagnosis.run_record import Finding
from grpo_rl.telemetry.metrics.metrics_file import read_metrics
from grpo_rl.telemetry.metrics.validation import validation_score
from grpo_rl.telemetry.rollout_log import write_rollouts
from grpo_rl.trainer.parts import Step, is_due
from grpo_rl.trainer.saving import Saving
from grpo_rl.trainer.session import Schedule, Session
from grpo_rl.types import Metrics

NOT_LOADABLE = (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)
"""What reading a state of another form raises."""
RECENT_STEPS = 20


class RunLoop:
    """One run of a schedule, from its first or a resumed step to its last one."""

    def __init__(self, session: Session, schedule: Schedule) -> None:
        self.session, self.schedule = session, schedule
        self.config, self.roles, self.output = session.config, session.roles, session.output
        self.progress = session.progress
        self.progress.on_phase = self._phase
        self.timeline = session.output.timeline
        session.run_steps = self.steps
        self.total_steps = session.total_steps
        self.saving = Saving(self.config, self.roles, self.output)
        self.store = self.saving.store
        self._nonfinite_in_a_row = 0
        self._seconds: list[float] = []  # the seconds that each step took
        self.alarms = Alarms(dataclasses.asdict(self.config))
        self._begun: Sequence[Finding] = ()  # the alarms that began in the last step
        self._before: dict[str, Any] | None = None  # the state at the beginning of the step
        self._open: tuple[Step, float] | None = None
        """The step, and when it began; also after the loop was left in the middle of it."""
        self._best: tuple[int, float] | None = None  # the step with the best validation, and its score
        self._unlogged: Metrics | None = None  # metrics of a step that is trained, and not validated, saved and logged yet

    @property
    def step(self) -> int:
        return self.session.step

    @property
    def is_trained(self) -> bool:
        return self.step >= self.total_steps or self.session.ended() is not None

    def fit(self) -> None:
        """Train to the last step. Raises Preempted if a signal ended it, with everything that was trained saved."""
        with self.guarded():
            self.schedule(self.session)
            self.leave()

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Save what was trained if a signal (Preempted) or an error ends what is done inside."""
        try:
            yield
            self.output.rollouts.flush()
        except Preempted as request:
            raise self._saved(request) from None
        except Exception as error:
            if isinstance(error, DataError) and self._before is not None and self._open is not None:
                # What was trained before a step whose data cannot be used is saved.
                self.load_state_dict(self._before)
                if self.config.trainer.save_freq > 0 and self.step > max([0, *self.store.steps()]):
                    self.saving.begin(self.step, self.state_dict())
            self.saving.rescue()
            raise
        finally:
            self._open = None
            self.output.stop.finishing()
            self.timeline.write()

    def steps(self) -> Iterator[Step]:
        trainer = self.config.trainer
        self._complete_left_step()
        if self._unlogged is not None:
            self._end_step()
        metrics = dict(self.session.collected) if self.step == 0 else {}
        if trainer.val_only or (self.step == 0 and trainer.val_before_train):
            metrics |= self.session.evaluate()
        self._log(metrics)
        if trainer.val_only:
            return
        with self.output.console.progress("training", self.total_steps, keep=False) as bar:
            self.progress.bar = bar
            bar.advance(self.step, "")
            while self.step < self.total_steps and self.session.ended() is None:
                yield from self._whole_step()
                bar.advance(1, "")
                self._answer_alarms()
                bar.left(self._left_s())
            self.leave()
        if (reason := self.session.ended()) is not None:
            self.output.console.warn(f"training ends at step {self.step} of {self.total_steps}: {reason}")

    def leave(self) -> None:
        """Commit the last state. Raises CheckpointError if that fails and the user asked for checkpoints."""
        self._complete_left_step()
        if self.step > 0 and (self.config.trainer.save_freq > 0 or self.config.trainer.save_at_end):
            self.progress.phase("save")
            try:
                self.keep()
            except CheckpointError as error:
                if self.config.trainer.save_freq > 0:
                    raise
                self.output.console.warn(f"NOT SAVED: {error}. A longer run cannot go on from this one's end")
        saved = self.store.steps()
        if best := [step for step in self.store.best if step in saved][:1]:
            self.output.console.info(f"the best validation that is saved: {self.store.folder}/step_{best[0]}")

    def _whole_step(self) -> Iterator[Step]:
        self._before = copy.deepcopy(self.state_dict())
        self.output.stop.step_begins()
        started = time.perf_counter()
        self.session.step += 1
        self.timeline.step = self.step
        tell(step=self.step)
        self.output.status.update(step=self.step, total=self.total_steps)
        fault_point("driver.step")
        if self.roles.instruments is not None:
            self.roles.instruments.begin(self.step)
        step = Step(self.step, self.session.validates and is_due(self.step, self.config.trainer.test_freq))
        self.session.begin_step()
        self._open = step, started
        with self.timeline.span("step", "step"):
            yield step
        self._complete()

    def _complete_left_step(self) -> None:
        """Complete the step in which the loop was left if it has trained; otherwise go back to its beginning."""
        if self._open is not None and (self.session.has_trained or self._open[0].metrics):
            self._complete()
        elif self._open is not None and self._before is not None:
            self._open = None
            self.load_state_dict(self._before)

    def _complete(self) -> None:
        assert self._open is not None
        (step, started), self._open = self._open, None
        self.session.end_step(step)
        metrics = step.metrics
        self._check_finite(metrics)
        self.session.trained = []
        metrics["timing_s/step"] = time.perf_counter() - started
        self._unlogged = metrics
        self.session.has_trained = False
        self._end_step()

    def _check_finite(self, metrics: Metrics) -> None:
        """Write what was trained to `nonfinite_step_N.jsonl` if a role left out an update that was not
        finite.

        Raises DivergedError after more such steps in a row than `trainer.max_nonfinite_steps`.
        """
        left_out = [key.removesuffix("/nonfinite") for key, share in metrics.items() if key.endswith("/nonfinite") and share]
        self._nonfinite_in_a_row = self._nonfinite_in_a_row + 1 if left_out else 0
        log = ""
        if left_out and self.session.trained:
            path = self.output.run_dir.path / f"nonfinite_step_{self.step}.jsonl"
            log = f"\n  log: {write_rollouts(path, self.session.trained)}"
        skips = self.config.trainer.on_nonfinite == "skip"
        if self._nonfinite_in_a_row > (self.config.trainer.max_nonfinite_steps if skips else 0):
            raise DivergedError(
                f"loss or gradient of the {' and the '.join(left_out)} not finite in {self._nonfinite_in_a_row} steps in a row "
                f"(trainer.{'max_nonfinite_steps' if skips else 'on_nonfinite'}), no weight was changed by them; look at the rollouts, "
                f"lower the learning rate or clip_grad, and go on from the last checkpoint{log}"
            )

    def _end_step(self) -> None:
        """Validate, save and log as is due."""
        assert self._unlogged is not None
        trainer, metrics, started = self.config.trainer, self._unlogged, time.perf_counter()
        last = self.step == self.total_steps or self.session.ended() is not None
        is_validated = "timing_s/testing" in metrics  # by the run that saved this step, and was killed before it logged it
        if self.session.validates and (last or is_due(self.step, trainer.test_freq)) and not is_validated:
            metrics |= self.session.evaluate()
        saves = trainer.save_freq > 0 and (last or is_due(self.step, trainer.save_freq))
        if (saves | self._is_best(metrics)) and not self.saving.is_saved(self.step):
            with self.progress.timed("save", timings := dict[str, float]()):
                self.saving.begin(self.step, self.state_dict())
            metrics |= timings
        if not last:
            self.saving.begin_own(self.step, self.state_dict)
        if self.saving.num_failed:
            metrics["trainer/failed_saves"] = float(self.saving.num_failed)
        metrics["timing_s/step"] += time.perf_counter() - started
        self._seconds.append(metrics["timing_s/step"])
        if self.roles.instruments is not None:
            metrics |= self.roles.instruments.end(metrics)
        self._log(metrics | self.roles.recoveries())
        self._unlogged = None
        self.output.stop.step_ends(metrics.get("timing_s/save"))

    def _is_best(self, metrics: Metrics) -> bool:
        """Note and return whether the validation among the metrics is the best so far (`trainer.keep_best`)."""
        score = validation_score(metrics)
        if score is None and "val/loss" in metrics:
            score = -metrics["val/loss"]
        if not self.config.trainer.keep_best or score is None or (self._best is not None and score <= self._best[1]):
            return False
        self._best = self.step, score
        self.store.best = self.step, *self.store.best[:1]
        return True

    def _log(self, metrics: Metrics) -> None:
        if metrics:
            fault_point("driver.log")
            self._begun = begun = self.alarms.see(self.step, metrics)
            self.output.sinks.log(self.step, metrics | {f"{ALARM}{finding.name}": 1.0 for finding in begun})
            self.output.console.step(self.step, self.total_steps, metrics, self._left_s())
            for finding in begun:
                self.output.console.warn(as_warning(finding))
            self.timeline.write()
            self.output.page.step(self.step)

    def _left_s(self) -> float | None:
        """Return about how long the remaining steps take; None before the first one is done."""
        # In the first step compilers and caches are cold.
        recent = self._seconds[1:][-RECENT_STEPS:] or self._seconds
        return statistics.fmean(recent) * (self.total_steps - self.step) if recent else None

    def _answer_alarms(self) -> None:
        """Save, and raise StoppedByAlarm, if an alarm of `trainer.stop_on` has begun and steps are left."""
        finding = next((alarm for alarm in self._begun if alarm.name in self.config.trainer.stop_on), None)
        if finding is None or self.step >= self.total_steps:
            return
        self.output.stop.finishing()
        self.progress.phase("save")
        self.keep()
        raise StoppedByAlarm(
            f"{finding.title} [{finding.name}, since step {finding.since}; trainer.stop_on]\n{finding.evidence}\n"
            f"step {self.step} of {self.total_steps} is saved: the same command goes on from it, with a changed key or without; "
            f"from an earlier one by trainer.resume_mode=resume_path\nlikeliest remedy: {finding.advice[0]}"
        )

    def _phase(self, name: str) -> None:
        self.output.status.update(phase=name)
        self.output.stop.finishing()  # a commit is not to be interrupted
        self.saving.poll()
        if not self.session.has_trained:  # a step whose weights have changed is finished
            self.output.stop.phase(name)

    def keep(self) -> None:
        """Commit the state as it is, if it is not committed. Raises CheckpointError."""
        self.saving.settle(self.step, self.state_dict)

    def _saved(self, request: Preempted) -> Preempted:
        """Save the newest state between two steps, and return the request with what was saved."""
        self.output.stop.finishing()
        signal, _, _ = str(request).partition(": ")  # a session within this one has added what it saved
        if self._before is not None and self._unlogged is None and self.step != self._before["step"]:
            # No weight has changed since the step began.
            self.load_state_dict(self._before)
            self.output.status.update(step=self.step)
        if self.config.trainer.val_only:
            return Preempted(f"{signal}: nothing is trained (trainer.val_only=true), so the same command begins anew")
        if self.step == 0:
            return Preempted(f"{signal}: no step was done, so the same command begins anew")
        self.progress.phase("save")
        with self.output.console.progress(f"saving step {self.step}", keep=False):
            self.keep()
        return Preempted(f"{signal}: step {self.step} of {self.total_steps} is saved; the same command goes on from there")

    def resume(self, checkpoint: Checkpoint | Path) -> None:
        """Go on from this checkpoint; one that is only a path is verified first. Raises CheckpointError."""
        checkpoint, part = verify(checkpoint) if isinstance(checkpoint, Path) else checkpoint, STATE
        try:
            self.load_state_dict(checkpoint.state)
            for role in self.roles.with_state():
                part = f"what {type(role).__name__} saved"
                role.load(checkpoint.folder)
        except NOT_LOADABLE as error:
            reason = f"it has no field {error}" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"
            raise CheckpointError(f"{checkpoint.folder}: {part} cannot be used: {reason}") from error
        self.output.sinks.truncate_after(self.step)
        logged = read_metrics(self.output.run_dir.metrics_file)
        self.alarms.resume(logged)
        self.timeline.truncate_after(self.step)
        self.timeline.step = self.step
        if any(row["step"] == self.step for row in logged):
            self._unlogged = None
        self.output.status.update(step=self.step, total=self.total_steps, last_commit=self.step)
        self.output.console.info(f"resumed from {checkpoint.folder} at step {self.step}")
        code_of_checkpoint = checkpoint.state.get("code", self.session.code)
        if code_of_checkpoint != self.session.code:
            self.output.console.warn(
                f"the code, or a model that the configuration names, is another than that of the checkpoint: {code_of_checkpoint} -> {self.session.code}"
            )
        for aside in self.store.set_aside_after(self.step):
            self.output.console.info(f"a checkpoint of a later step is now {aside}")
        if self.step >= self.total_steps and not self.config.trainer.val_only:
            self.output.console.warn(
                f"step {self.step} of {self.total_steps} is done: nothing is left to train; "
                "for more give trainer.total_training_steps, for a new run another trainer.experiment_name"
            )

    def start_over(self) -> None:
        """Begin again with the first step, after ranks were lost before the first checkpoint."""
        self.output.sinks.truncate_after(-1)
        self.timeline.truncate_after(-1)
        self.output.status.update(step=0)

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "schedule": self.config.trainer.schedule,
            "code": self.session.code,
            "nonfinite": self._nonfinite_in_a_row,
            "unlogged": self._unlogged,
            "best": self._best,
        } | self.session.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from this state. Raises CheckpointError for that of another schedule, or of other data."""
        saved_by, schedule = state.get("schedule", "sync"), self.config.trainer.schedule
        if saved_by != schedule:
            raise CheckpointError(
                f"the checkpoint was saved with trainer.schedule={saved_by}, and this run has trainer.schedule={schedule}, "
                "which cannot go on from it; give the schedule of before, or train a new run from its exported model"
            )
        self.session.load_state_dict(state)
        self.session.step = int(state["step"])
        self._nonfinite_in_a_row = int(state["nonfinite"])
        self._unlogged = state.get("unlogged")
        if best := state.get("best"):
            self._best = int(best[0]), float(best[1])
            self.store.best = (self._best[0],)


def single_step(session: Session, schedule: Schedule) -> Metrics:
    """Do one step of a schedule without a run around it, and return its metrics."""
    session.step += 1
    session.begin_step()
    step = Step(session.step)
    session.run_steps = lambda: iter([step])
    schedule(session)
    session.end_step(step)
    return step.metrics
