"""Sampling beside training: groups in flight, training in a thread of its own, and the schedules `one_step_off` and `async`.

In the asynchronous schedule every group has a *deadline*: the version of the weights at which it must be trained at the latest, so
that none of its tokens is more than `max_staleness` versions old. A version trains one batch. So, of the groups with a deadline up
to d, all but those that the batches of the versions up to d can hold have to be in this batch already; the trainer waits for them,
however long they are. The other places go to the groups that ended first. No group is trained too late this way, as long
as it was asked for within the bound (`room`): the deadlines can be met when they are given, and every batch keeps that so
(earliest deadline first is optimal for one machine, Liu and Layland, JACM 20, 1973, section 7).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_rl.protocols import RolloutPool
from grpo_rl.telemetry.metrics.timeline import Timeline
from grpo_rl.trainer.background import BackgroundThread
from grpo_rl.trainer.metrics import staleness_metrics
from grpo_rl.trainer.progress import Timer
from grpo_rl.trainer.sampled.selection import Selected
from grpo_rl.trainer.schedule import Context, training_sampling
from grpo_rl.trainer.sync import SyncSchedule
from grpo_rl.types import GREEDY, Metrics, Prompt, Rollout, Sampling

LOOK_S = 0.05
"""Seconds for which responses are waited for before another look at the training beside which they are sampled."""

OnEnd = Callable[[Rollout], None]


@dataclass(slots=True, eq=False)
class Group:
    """The responses to one prompt, from the draw to the training."""

    batch: int
    """The number, from 1, of the batch of prompts that it was drawn in, with which its sampling is seeded."""
    row: int
    prompt: Prompt
    asked_at: int | None = None
    """The version of the engines' weights when it was asked for: none of its tokens is older. None: not asked for yet."""
    ids: Sequence[str] = ()
    """The names of its responses in the pool."""
    missing: int = 0
    """The number of responses that have not ended."""
    rollouts: list[Rollout] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Return whether all of its responses have ended."""
        return self.asked_at is not None and self.missing == 0

    @property
    def oldest_version(self) -> int | None:
        """The version of the oldest weights that a trained token was sampled with; None where there is no such token."""
        versions = [rollout.oldest_version for rollout in self.rollouts if rollout.sample_index != GREEDY]
        return min((version for version in versions if version is not None), default=None)

    def ordered(self) -> list[Rollout]:
        """Return the responses by sample, the greedy one last, in whatever order they ended."""
        return sorted(self.rollouts, key=lambda rollout: (rollout.sample_index == GREEDY, rollout.sample_index))


class GroupsInFlight:
    """All groups between draw and training, in the order in which their prompts were drawn.

    It is part of a checkpoint as a list of prompts: a run that resumes asks for all of them again, so that none is lost and
    none is trained twice.
    """

    def __init__(
        self,
        pool: RolloutPool,
        n: int,
        sampling: Callable[[int], Sampling],
        *,
        greedy: bool = False,
        timeline: Timeline | None = None,
    ) -> None:
        """`sampling` returns the parameters of a batch of prompts, by its number; `timeline` records when there are requests."""
        self.pool, self.n, self.greedy, self.sampling = pool, n, greedy, sampling
        self.timeline = timeline or Timeline()
        self._busy_since: float | None = None
        self.waiting: list[Group] = []
        """The groups that were not taken."""
        self.num_batches = 0
        """The number of batches of prompts that were drawn."""
        self.asked: Counter[int] = Counter()
        """The groups that were asked for and not taken, by the engines' version then."""
        self.complete: Counter[int] = Counter()
        """Those of them of which all responses have ended."""
        self.finished: list[Group] = []
        """The groups that are complete, in the order in which they were completed."""
        self.unfinished = 0
        """The number of responses that were asked for and have not ended."""
        self._by_uid: dict[str, Group] = {}
        self._idle_since: float | None = None
        self._idle_s = 0.0

    def __len__(self) -> int:
        return len(self.waiting)

    # ---- asking --------------------------------------------------------------------------------------------

    def add(self, drawn: Iterable[tuple[int, Prompt]]) -> None:
        """Take in the next batch of prompts, each with its row; `ask` asks for their responses."""
        self.num_batches += 1
        self.waiting += [Group(self.num_batches, row, prompt) for row, prompt in drawn]

    def ask(self, most: int) -> None:
        """Ask for the responses of the first `most` groups, where that was not done before."""
        new = [group for group in self.waiting[: max(0, most)] if group.asked_at is None]
        for batch in dict.fromkeys(group.batch for group in new):
            self._submit(batch, [group for group in new if group.batch == batch])

    def retry(self, groups: Collection[Group]) -> None:
        """Forget the responses of these groups, which cannot be trained, and ask for others."""
        self._uncount(groups)
        for group in groups:
            self._submit(group.batch, [group])

    def _submit(self, batch: int, groups: Sequence[Group]) -> None:
        version = self.pool.version
        size = self.n + self.greedy
        ids = self.pool.submit([group.prompt for group in groups], self.n, self.sampling(batch), greedy=self.greedy)
        for number, group in enumerate(groups):
            group.asked_at, group.missing, group.rollouts = version, size, []
            group.ids = ids[number * size : (number + 1) * size]
            self._by_uid[group.prompt.uid] = group
        self.asked[version] += len(groups)
        self.unfinished += len(groups) * size
        if self._busy_since is None:
            self._busy_since = self.timeline.now()
        if self._idle_since is not None:
            self._idle_s += time.monotonic() - self._idle_since
            self._idle_since = None

    # ---- taking in -----------------------------------------------------------------------------------------

    def wait(self, enough: Callable[[], bool], on_end: OnEnd) -> None:
        """Take in responses as they end, until there are enough; `on_end` is called with each."""
        if not enough():
            for rollout in self.pool.completed():
                self._take_in(rollout)
                on_end(rollout)
                if self._by_uid[rollout.prompt.uid].is_complete and enough():
                    return
        assert enough(), "all that was asked for has ended, and it was asked for enough"

    def wait_beside(self, going: BackgroundThread[Any], on_end: OnEnd) -> None:
        """Take in responses as they end, until `going` has ended, in whose thread other work is done."""
        while not going.ended(0.0 if self.unfinished else LOOK_S):
            if self.unfinished:
                for rollout in self.pool.completed(LOOK_S):
                    self._take_in(rollout)
                    on_end(rollout)
                    if going.ended(0.0):
                        return

    def _take_in(self, rollout: Rollout) -> None:
        group = self._by_uid[rollout.prompt.uid]
        group.rollouts.append(rollout)
        group.missing -= 1
        self.unfinished -= 1
        if group.missing == 0:
            assert group.asked_at is not None
            self.complete[group.asked_at] += 1
            self.finished.append(group)
        if self.unfinished == 0:
            self.record()
            self._idle_since = time.monotonic()

    # ---- taking out ----------------------------------------------------------------------------------------

    def take(self, groups: Collection[Group]) -> None:
        """Let go of these groups, which are complete and are trained now."""
        self._uncount(groups)
        taken = set(groups)
        self.waiting = [group for group in self.waiting if group not in taken]
        for group in groups:
            del self._by_uid[group.prompt.uid]

    def _uncount(self, groups: Collection[Group]) -> None:
        taken = set(groups)
        self.finished = [group for group in self.finished if group not in taken]
        for group in groups:
            assert group.asked_at is not None and group.is_complete
            self.asked[group.asked_at] -= 1
            self.complete[group.asked_at] -= 1
        self.asked, self.complete = +self.asked, +self.complete

    def record(self) -> None:
        """Record in the timeline that there were requests until now; to be called once in a step, where they may never end."""
        if self._busy_since is not None:
            now = self.timeline.now()
            self.timeline.record("rollout", "gen", self._busy_since, now)
            self._busy_since = now if self.unfinished else None

    def idle_s(self) -> float:
        """Return for how many seconds, since the last call, nothing was there to sample before more was asked for."""
        seconds, self._idle_s = self._idle_s, 0.0
        return seconds

    # ---- a checkpoint ----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the prompts that were drawn and not trained: batch, row and uid of each."""
        return {
            "num_batches": self.num_batches,
            "waiting": [[group.batch, group.row, group.prompt.uid] for group in self.waiting],
        }

    def load_state_dict(self, state: dict[str, Any], prompt: Callable[[int, str], Prompt] | None) -> None:
        """Go on with the prompts of this state, none of which is asked for yet; with none of them where `prompt` is None.

        `prompt` returns that of a row, by its uid. Responses that are being sampled are forgotten.
        """
        if going := [one for group in self.waiting if group.missing for one in group.ids]:
            self.pool.forget(going)
        self.num_batches = int(state["num_batches"])
        rows = [(int(batch), int(row), str(uid)) for batch, row, uid in state["waiting"]]
        self.waiting = [] if prompt is None else [Group(batch, row, prompt(row, uid)) for batch, row, uid in rows]
        self.asked, self.complete, self.finished, self.unfinished = Counter(), Counter(), [], 0
        self._by_uid, self._idle_since, self._idle_s, self._busy_since = {}, None, 0.0, None


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
        self.groups = GroupsInFlight(
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
            training = BackgroundThread("training", lambda: self.train(selected, timer))
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


# ---- the asynchronous schedule -----------------------------------------------------------------------------------------


def room(max_staleness: int, batch_size: int, lag: int) -> int:
    """Return how many groups may be asked for and not trained, while the engines' weights are `lag` versions old.

    While the engines have version v, at most (v + max_staleness + 1) batches are ever asked for.
    """
    return max(0, max_staleness + 1 - lag) * batch_size


def urgent(waiting: Mapping[int, int], version: int, batch_size: int) -> dict[int, int]:
    """Return, for each deadline, how many groups with it or an earlier one have to be in the batch of `version`.

    `waiting` has the number of groups that are not trained yet, by deadline.
    """
    found, so_far = {}, 0
    for deadline in sorted(waiting):
        so_far += waiting[deadline]
        # A deadline that has passed already cannot be kept any more: the next batch is the best that there is.
        batches_to_come = max(0, deadline - version)
        found[deadline] = min(batch_size, max(0, so_far - batches_to_come * batch_size))
    return found


def is_enough(complete: Mapping[int, int], needed: Mapping[int, int], batch_size: int) -> bool:
    """Return whether a batch can be made of the groups that are complete, counted by deadline."""
    so_far = 0
    for deadline in sorted({*complete, *needed}):
        so_far += complete.get(deadline, 0)
        if so_far < needed.get(deadline, 0):
            return False
    return so_far >= batch_size


def choose(deadlines: Sequence[int], needed: Mapping[int, int], batch_size: int) -> list[int]:
    """Return the places, ascending, of the groups to train, of those that are complete.

    `deadlines` are theirs, in the order in which they were completed.
    """
    chosen: set[int] = set()
    for deadline in sorted(needed):
        eligible = [place for place, own in enumerate(deadlines) if own <= deadline]
        missing = needed[deadline] - sum(place in chosen for place in eligible)
        chosen.update([place for place in eligible if place not in chosen][: max(0, missing)])
    rest = [place for place in range(len(deadlines)) if place not in chosen]
    return sorted([*chosen, *rest[: batch_size - len(chosen)]])


class AsyncSchedule(OverlappingSchedule):
    """Sampling and training side by side, with weights that are updated under unfinished responses.

    No trained token is more than `trainer.asynchronous.max_staleness` versions older than the weights that it trains
    (see above). Every prompt is trained exactly once, however long its responses take; with
    max_staleness=0 the weights are those of the synchronous schedule, bit for bit. The ways of AReaL (arXiv 2505.24298,
    section 5) and of PipelineRL (arXiv 2509.19128, section 4), with a hard bound.
    """

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.settings = self.config.trainer.asynchronous
        self._has_sent = False
        """True once the engines have had weights in this start of the run."""

    def step(self) -> Metrics:
        """Send the weights, ask for as much as the bound allows, wait for a batch, and train on it."""
        timer = self.context.progress.timer()
        if not self._has_sent or self.actor.version - self.rollout.version >= self.settings.sync_every:
            with timer("sync_weights"):
                self.rollout.sync_weights(self.actor)
            self._has_sent = True
        self._ask()
        with timer("wait_for_rollouts"):
            batch, num_dropped = self._next_batch()
        metrics = self.train_beside(self.selected(batch, timer), timer)
        return metrics | {"rollouts/dropped_stale": float(num_dropped)}

    def _ask(self) -> None:
        """Draw prompts and ask for their responses, as many as the bound allows."""
        most = room(self.settings.max_staleness, self.batch_size, self.actor.version - self.rollout.version)
        while len(self.groups) + self.batch_size <= most and self.may_draw():
            self.draw()
        self.groups.ask(max(most, self.batch_size))

    def _next_batch(self) -> tuple[list[Group], int]:
        """Return the groups to train on, as they were drawn, and how many rollouts were too old and are asked for again."""
        num_dropped = 0
        while True:
            batch = self._complete_batch()
            oldest = self.actor.version - self.settings.max_staleness
            stale = [group for group in batch if group.oldest_version is not None and group.oldest_version < oldest]
            if not stale:
                return batch, num_dropped
            num_dropped += sum(len(group.rollouts) for group in stale)
            self.groups.retry(stale)

    def _complete_batch(self) -> list[Group]:
        """Wait until a batch can be made of complete groups that keeps the bound for all others, and return it."""
        groups, staleness = self.groups, self.settings.max_staleness
        size = min(self.batch_size, sum(groups.asked.values()))
        needed = urgent(_later(groups.asked, staleness), self.actor.version, size)
        on_end = self.context.progress.counting(self.rewarder.submit, groups.unfinished)
        groups.wait(lambda: is_enough(_later(groups.complete, staleness), needed, size), on_end)
        deadlines = [group.asked_at + staleness for group in groups.finished if group.asked_at is not None]
        chosen = {id(groups.finished[place]) for place in choose(deadlines, needed, size)}
        return [group for group in groups.waiting if id(group) in chosen]


def _later(counts: dict[int, int], staleness: int) -> dict[int, int]:
    """Return counts by deadline, of counts by the version at which groups were asked for."""
    return {version + staleness: number for version, number in counts.items()}
