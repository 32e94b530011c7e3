"""The parts that both schedules share which sample while they train: groups in flight, training in a thread of its own."""

from __future__ import annotations

from typing import Any

from grpo_rl.trainer.aside import Aside
from grpo_rl.trainer.metrics import staleness_metrics
from grpo_rl.trainer.overlap.groups import Group, Groups
from grpo_rl.trainer.progress import Timer
from grpo_rl.trainer.sampled.selection import Selected
from grpo_rl.trainer.schedule import Context, training_sampling
from grpo_rl.trainer.sync import SyncSchedule
from grpo_rl.types import Metrics


class OverlappingSchedule(SyncSchedule):
    """A schedule that samples while it trains, without its `step`.

    The training of a batch runs in a thread. That thread alone uses the actor, the reference and the critic then, and
    nothing else: the main thread keeps the pool going, hands what ends to the rewards, and answers signals. Everything
    else happens in the main thread while no training is going on. A replica that comes back meanwhile gets its weights
    afterwards (`RolloutPool.keep_weights`): the ranks would hand out new ones under the old version, or meet in different
    collectives.
    """

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        n, greedy = self.config.actor_rollout_ref.rollout.n, "baselines" in self.advantage.needs
        timeline = context.output.timeline
        self.groups = Groups(
            self.rollout, n, lambda batch: training_sampling(self.config, batch), greedy=greedy, timeline=timeline
        )
        self.batch_size = self.config.data.train_batch_size

    def draw(self) -> None:
        """Draw the next batch of prompts."""
        self.groups.add(self.selection.prompts())

    def may_draw(self) -> bool:
        """Return whether prompts are left to draw, and steps in which they would be trained."""
        steps_left = self.context.total_steps - self.context.step + 1
        return not self.selection.exhausted and len(self.groups) + self.batch_size <= steps_left * self.batch_size

    def selected(self, groups: list[Group], timer: Timer) -> Selected:
        """Return what is trained of these groups, which leave the others; in the order in which their prompts were drawn."""
        self.groups.take(groups)
        rollouts = self.scored([rollout for group in groups for rollout in group.ordered()], timer)
        return self.selection.of_batch({group.prompt.uid: group.row for group in groups}, rollouts)

    def train_beside(self, selected: Selected, timer: Timer) -> Metrics:
        """Train on the rollouts while others are sampled, and return the metrics of the step."""
        staleness = staleness_metrics(selected.trained, self.actor.version)
        # A signal must not leave the main thread while the weights change: it is answered when the step is done.
        self.output.stop.finishing()
        with self.rollout.keep_weights():
            training = Aside("training", lambda: self.train(selected, timer))
            try:
                self.groups.wait_beside(training, self.context.progress.counting(self.rewarder.submit))
            finally:
                # Also where sampling has failed: the processes must not be ended below a thread that starts them again.
                training.ended(self.config.trainer.step_timeout_s)
        self.groups.record()
        waits = {"timing_s/rollout_waits_for_trainer": self.groups.idle_s()}
        return training.returned() | staleness | waits | timer.metrics()

    def ended(self) -> str | None:
        """Return why training ends early: as in `SyncSchedule`, once what was drawn is trained."""
        return None if len(self.groups) else super().ended()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of `SyncSchedule`, and the prompts that were drawn and not trained."""
        return super().state_dict() | {"groups": self.groups.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from this state; what was drawn and not trained is asked for again. Raises CheckpointError for other data.

        Where the data may have changed (data.allow_change) and have, the drawn prompts of the old data are left out.
        """
        same_data = self.selection.load_state_dict(state["sampler"])
        self.advantage.load_state_dict(state["advantage"])
        self.groups.load_state_dict(state["groups"], self.train_data.prompt if same_data else None)
