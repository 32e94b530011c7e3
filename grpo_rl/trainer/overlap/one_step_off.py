"""The one-step-off schedule: the batch of the next step is sampled while this one's is trained."""

from __future__ import annotations

from grpo_rl.trainer.overlap.overlapping import OverlappingSchedule
from grpo_rl.trainer.progress import Timer
from grpo_rl.types import Metrics


class OneStepOffSchedule(OverlappingSchedule):
    """Sampling and training side by side, a batch apart: every batch is trained by the policy after the one that sampled it.

    The staleness of every token is exactly 1, and 0 in the first batch of a start. What is sampled does not depend on
    timing: a batch is sampled as a whole with the same weights.
    """

    def step(self) -> Metrics:
        """Wait for this step's batch, begin to sample the next one with the newest weights, and train."""
        timer = self.context.progress.timer()
        if not self.groups.asked:
            self._begin(timer)
        with timer("wait_for_rollouts"):
            self._sample_all()
        batch = self.groups.waiting[: self.batch_size]
        with timer("sync_weights"):
            self.rollout.sync_weights(self.actor)
        if len(self.groups) < 2 * self.batch_size and self.may_draw():
            self.draw()
        self.groups.ask(2 * self.batch_size)
        return self.train_beside(self.selected(batch, timer), timer)

    def _begin(self, timer: Timer) -> None:
        """Ask for the first batch of a start: there is none that was sampled beside a training."""
        with timer("sync_weights"):
            self.rollout.sync_weights(self.actor)
        if not len(self.groups):
            self.draw()
        self.groups.ask(self.batch_size)

    def _sample_all(self) -> None:
        """Wait until all that was asked for has ended."""
        on_end = self.context.progress.counting(self.rewarder.submit, self.groups.unfinished)
        self.groups.wait(lambda: self.groups.unfinished == 0, on_end)

    def evaluate(self) -> Metrics:
        """Validate the current policy. What is being sampled is sampled to its end first: new weights would come into it."""
        if self.context.validates:
            self._sample_all()
        return super().evaluate()
