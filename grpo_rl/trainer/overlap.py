"""Sampling beside training: groups in flight, training in a thread of its own, and the schedules `one_step_off` and `async`.

With `algorithm.filter_groups` and refilling, groups are scored as they end, in another thread, and one without a signal gives its
place to a further prompt. Which groups are trained follows from the order in which they were drawn, never from their length.

In the asynchronous schedule every group has a *deadline*: the version of the weights at which it must be trained at the latest, so
that none of its tokens is more than `max_staleness` versions old. A version trains one batch. So, of the groups with a deadline up
to d, all but those that the batches of the versions up to d can hold have to be in this batch already; the trainer waits for them,
however long they are. The other places go to the groups that ended first. No group is trained too late this way, as long
as it was asked for within the bound (`AsyncSchedule.room`): the deadlines can be met when they are given, and every batch keeps that so
(earliest deadline first is optimal for one machine, Liu and Layland, JACM 20, 1973, section 7).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from grpo_rl.background import has_ended, in_background
from grpo_rl.config.derived import gen_batch_size
from grpo_rl.errors import DataError, NoRewardError, WeightVersionError
from grpo_rl.trainer.metrics import staleness_metrics
from grpo_rl.trainer.progress import Timer
from grpo_rl.trainer.sampled.selection import Selected, by_uid
from grpo_rl.trainer.schedule import Context, training_sampling
from grpo_rl.trainer.sync import SyncSchedule
from grpo_rl.types import GREEDY, Metrics, Prompt, Rollout

LOOK_S = 0.05
"""Seconds for which responses are waited for before another look at the training beside which they are sampled."""


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
    """The number of responses that were asked for and have not ended."""
    rollouts: list[Rollout] = field(default_factory=list)

    def ordered(self) -> list[Rollout]:
        """Return the responses by sample, the greedy one last, in whatever order they ended."""
        return sorted(self.rollouts, key=lambda rollout: (rollout.sample_index == GREEDY, rollout.sample_index))


class OverlappingSchedule(SyncSchedule):
    """A schedule that samples while it trains, without its `step`.

    The training of a batch runs in a thread. That thread alone uses the actor, the reference and the critic then, and
    nothing else: the main thread keeps the pool going, hands what ends to the rewards, and answers signals. Everything
    else happens in the main thread while no training is going on. A replica that comes back meanwhile gets its weights
    afterwards (`RolloutPool.keep_weights`): the ranks would hand out new ones under the old version, or meet in different
    collectives.

    With refilling, the groups that have ended are scored in one more thread, one lot of them at a time.

    The groups between draw and training are part of a checkpoint as a list of prompts: a run that resumes asks for all of them
    again, so that none is lost and none is trained twice.
    """

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        own = self.config.algorithm.filter_groups
        self.n, self.greedy = self.config.actor_rollout_ref.rollout.n, "baselines" in self.advantage.needs
        self.refills, self.max_draws = own.enable and own.refill, own.max_num_gen_batches
        self.batch_size, self.draw_size = self.config.data.train_batch_size, gen_batch_size(self.config)
        self.max_staleness, self.in_batches = 1, True
        """True where a batch is sampled as a whole: it has the first groups that were drawn and have a signal, and further ones of the
        last draw are dropped, as in `SyncSchedule`."""
        self.num_batches = 0
        """The number of batches of prompts that were drawn."""
        self._begin_step()
        self._set_groups([])

    def _begin_step(self) -> None:
        self._version, self._num_taken = self.actor.version, 0
        """The version that the step trains, and 1 once its batch was taken: what is drawn then is for later steps."""

    def _set_groups(self, groups: list[Group]) -> None:
        self.groups = groups
        """The groups that were not taken, in the order in which their prompts were drawn."""
        self.ready: dict[Group, None] = {}
        """Those that can be trained, in the order in which that was known: all of their responses have ended, and where that is
        asked for they have a signal."""
        self._unjudged: list[Group] = []
        """Those whose responses have ended, and of which nobody has looked yet whether they can be trained."""
        self._judging: tuple[list[Group], Future[list[Rollout]]] | None = None
        self._untrained: list[Group] = []
        """The groups without a signal that were found for the batch that is taken next."""
        self._num_draws = self._num_surplus = self._num_failed = 0
        self._by_uid: dict[str, Group] = {}
        self._unfinished = 0
        """The number of responses that were asked for and have not ended."""
        self._since: float | None = None
        """The moment since which there are requests, or none."""
        self._idle_s = 0.0

    # ---- asking ------------------------------------------------------------------------------------------------

    def room(self) -> int:
        """Return how many groups may be asked for and not trained."""
        return self.batch_size

    def top_up(self) -> None:
        """Draw prompts and ask for their responses, as many as there is room for and steps in which they would be trained.

        Raises DataError for a row that cannot be used, and where too few groups have a signal; never beside a training, which
        ends with the weights of its step: the next step meets the same row.
        """
        most, steps_left = self.room(), self.context.total_steps - self.context.step + 1 - self._num_taken
        wanted, num_before = min(most, steps_left * self.batch_size), len(self.groups)
        try:
            while len(self.groups) < wanted and not self.selection.exhausted:
                if self.refills and len(self._untrained) > self.max_draws * self.draw_size - self.batch_size:
                    raise self._too_few()
                drawn = self.selection.prompts()
                self.num_batches, self._num_draws = self.num_batches + 1, self._num_draws + 1
                # Of one step all that is drawn has the same seed where it is refilled, as in `SyncSchedule`.
                number = self.context.step if self.refills else self.num_batches
                self.groups += [Group(number, row, prompt) for row, prompt in drawn]
            if self.refills and len(self.groups) < min(self.batch_size, wanted):
                raise self._too_few("; all other prompts are retired")
        except DataError:
            if not self._num_taken:
                raise
        is_refilled = self.refills and self.in_batches and len(self.groups) > num_before
        self._ask([group for group in self.groups[: None if is_refilled else max(0, most)] if group.asked_at is None])

    def _too_few(self, more: str = "") -> DataError:
        num_ready, num_untrained = len(self.ready), len(self._untrained)
        return DataError(self.selection.too_few(num_ready, num_ready + num_untrained, self._num_draws) + more)

    def _ask(self, new: list[Group]) -> None:
        size = self.n + self.greedy
        for batch in dict.fromkeys(group.batch for group in new):
            groups, version = [group for group in new if group.batch == batch], self.rollout.version
            sampling = training_sampling(self.config, batch)
            ids = self.rollout.submit([group.prompt for group in groups], self.n, sampling, greedy=self.greedy)
            for number, group in enumerate(groups):
                group.asked_at, group.missing = version, size
                group.ids = ids[number * size : (number + 1) * size]
                self._by_uid[group.prompt.uid] = group
        if new:
            self._count(len(new) * size)

    def _count(self, change: int) -> None:
        """Count so many more responses that have not ended, and note when they become none or some."""
        if not self._unfinished or self._unfinished + change == 0:
            self._note_load()
        self._unfinished += change

    def _note_load(self) -> None:
        """Record how long there were requests until now, or add up how long there were none."""
        now = self.output.timeline.now()
        if self._since is not None and self._unfinished:
            self.output.timeline.record("rollout", "gen", self._since, now)
        elif self._since is not None:
            self._idle_s += now - self._since
        self._since = now

    def _forget(self, groups: Iterable[Group]) -> None:
        """Let the pool forget the responses of these groups that are being sampled."""
        going = [group for group in groups if group.missing]
        if going:
            self.rollout.forget([one for group in going for one in group.ids])
            self._count(-sum(group.missing for group in going))

    # ---- which groups can be trained -----------------------------------------------------------------------------

    def wait(self, enough: Callable[[], bool], training: Future[Any] | None = None) -> None:
        """Take in responses as they end, hand them to the rewards, and look which groups can be trained, until there is enough.

        `training` is the work that is done meanwhile, whose end is to be noticed when it comes.
        """
        on_end = self.context.progress.counting(self.rewarder.submit, None if self.refills or training else self._unfinished)
        while True:
            idle_s = 0.0 if self._unfinished else LOOK_S
            is_judging = self._look(0.0 if training else idle_s)
            if training:
                has_ended(training, idle_s)
            if enough():
                return
            assert self._unfinished or is_judging or training, "all that was asked for has ended, and it was asked for enough"
            # While something is judged, more may be wanted although nothing ends: then the wait is a short one.
            for rollout in self.rollout.completed(LOOK_S if is_judging or training else None) if self._unfinished else ():
                group = self._by_uid[rollout.prompt.uid]
                group.rollouts.append(rollout)
                group.missing -= 1
                self._count(-1)
                on_end(rollout)
                if group.missing == 0:
                    self._unjudged.append(group)
                    if self._look(0.0) != is_judging or enough():
                        break

    def _look(self, wait_s: float) -> bool:
        """Take in the rewards of groups that have ended, and replace those without a signal; return whether others are being scored.

        It waits `wait_s` at most.
        """
        if not self.refills:  # all are trained
            self.ready |= dict.fromkeys(self._unjudged)
            self._unjudged = []
            return False
        if self._judging is not None and has_ended(self._judging[1], wait_s):
            (groups, scoring), self._judging = self._judging, None
            self._judge(groups, scoring)
            self.top_up()
        if self._judging is None and self._unjudged:
            groups, self._unjudged = self._unjudged, []
            rollouts = [rollout for group in groups for rollout in group.ordered()]
            self._judging = groups, in_background("rewards", lambda: self.rewarded(rollouts))
        return self._judging is not None

    def _judge(self, groups: list[Group], scoring: Future[list[Rollout]]) -> None:
        try:
            rewarded = by_uid(scoring.result(0))
            self._num_failed = 0
        except NoRewardError:
            # Of a whole batch of groups it is an error, and of a few that ended together it may happen.
            self._num_failed += len(groups)
            if self._num_failed >= self.batch_size:
                raise
            rewarded = by_uid([one for group in groups for one in group.ordered() if one.sample_index != GREEDY])
        groups = [group for group in groups if self._by_uid.get(group.prompt.uid) is group]
        for group in groups:
            group.rollouts = rewarded[group.prompt.uid]
        useful = self.selection.judged({group.prompt.uid: group.row for group in groups}, _rollouts(groups))
        self.ready |= dict.fromkeys(group for group in groups if group.prompt.uid in useful)
        useless = [group for group in groups if group.prompt.uid not in useful]
        self._remove(useless)
        self._untrained += useless

    # ---- a batch -----------------------------------------------------------------------------------------------

    def next_batch(self) -> list[Group] | None:
        """Return the groups of the next batch, as they were drawn; None while one of them is not ready."""
        first = self.groups[: self.batch_size]
        return first if all(group in self.ready for group in first) else None

    def take(self) -> list[Group]:
        """Wait for the groups of the next batch, and return them; they leave the others."""
        self.wait(lambda: self.next_batch() is not None)
        batch = self.next_batch()
        assert batch is not None
        self._remove(batch)
        self._num_taken = 1
        if self.refills and self.in_batches:
            surplus = [group for group in self.groups if group.asked_at is not None]
            self._num_surplus = len(surplus)
            # What was scored shows how good the policy is, as in a batch of the synchronous schedule.
            self._untrained += [group for group in surplus if group in self.ready]
            self._remove(surplus)
        return batch

    def _remove(self, groups: Collection[Group]) -> None:
        """Let go of these groups; responses of theirs that are being sampled are forgotten."""
        self._forget(groups)
        for group in groups:
            self._by_uid.pop(group.prompt.uid, None)
            self.ready.pop(group, None)
        gone = set(groups)
        self.groups = [group for group in self.groups if group not in gone]
        self._unjudged = [group for group in self._unjudged if group not in gone]

    def selected(self, groups: list[Group], timer: Timer) -> Selected:
        """Return what is trained of these groups, which were taken; in the order in which their prompts were drawn."""
        if not self.refills:
            rollouts = self.scored([rollout for group in groups for rollout in group.ordered()], timer)
            return self.selection.of_batch({group.prompt.uid: group.row for group in groups}, rollouts)
        selected = self.selection.refilled(_rollouts(groups), _rollouts([*groups, *self._untrained]), self._num_draws)
        selected.metrics["filter_groups/surplus_groups"] = float(self._num_surplus)
        self._untrained, self._num_draws, self._num_surplus = [], 0, 0
        return selected

    def train_beside(self, selected: Selected, timer: Timer) -> Metrics:
        """Train on the rollouts while others are sampled, and return the metrics of the step."""
        staleness = staleness_metrics(selected.trained, self.actor.version)
        if (oldest := staleness.get("staleness/max", 0.0)) > self.max_staleness:
            raise WeightVersionError(
                f"a token was sampled with weights {oldest:g} versions older than those it trains; at most {self.max_staleness} are allowed"
            )
        # A signal must not leave the main thread while the weights change: it is answered when the step is done.
        self.output.stop.finishing()
        with self.rollout.keep_weights():
            training = in_background("training", lambda: self.train(selected, timer))
            try:
                self.wait(training.done, training)
            finally:
                # Also where sampling has failed: the processes must not be ended below a thread that starts them again.
                has_ended(training, self.config.trainer.step_timeout_s)
        if self._unfinished:
            self._note_load()
        waits, self._idle_s = {"timing_s/rollout_waits_for_trainer": self._idle_s}, 0.0
        return training.result(0) | staleness | waits | timer.metrics()

    # ---- the rest of the contract --------------------------------------------------------------------------------

    def ended(self) -> str | None:
        """Return why training ends early: as in `SyncSchedule`, once what was drawn is trained."""
        return None if len(self.groups) >= (self.batch_size if self.refills else 1) else super().ended()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of `SyncSchedule`, and the prompts that were drawn and not trained: batch, row and uid of each."""
        waiting = [[group.batch, group.row, group.prompt.uid] for group in self.groups]
        return super().state_dict() | {"groups": {"num_batches": self.num_batches, "waiting": waiting}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from this state; what was drawn and not trained is asked for again. Raises CheckpointError for other data.

        Where the data may have changed (data.allow_change) and have, the drawn prompts of the old data are left out.
        """
        same_data = self.selection.load_state_dict(state["sampler"])
        self.advantage.load_state_dict(state["advantage"])
        self._forget(self.groups)
        self.num_batches = int(state["groups"]["num_batches"])
        rows = [(int(batch), int(row), str(uid)) for batch, row, uid in state["groups"]["waiting"]]
        self._set_groups([Group(batch, row, self.train_data.prompt(row, uid)) for batch, row, uid in rows] if same_data else [])


def _rollouts(groups: Iterable[Group]) -> list[Rollout]:
    return [rollout for group in groups for rollout in group.rollouts]


class OneStepOffSchedule(OverlappingSchedule):
    """Sampling and training side by side, a batch apart: every batch is trained by the policy after the one that sampled it.

    The staleness of every token is exactly 1, and 0 in the first batch of a start. What is sampled does not depend on
    timing: a batch is sampled as a whole with the same weights.
    """

    def step(self) -> Metrics:
        """Wait for this step's batch, begin to sample the next one with the newest weights, and train."""
        timer = self.context.progress.timer()
        self._begin_step()
        if not any(group.asked_at is not None for group in self.groups):
            # The first batch of a start: there is none that was sampled beside a training.
            with timer("sync_weights"):
                self.rollout.sync_weights(self.actor)
        self.top_up()
        with timer("wait_for_rollouts"):
            batch = self.take()
        with timer("sync_weights"):
            self.rollout.sync_weights(self.actor)
        selected = self.selected(batch, timer)
        self.top_up()
        return self.train_beside(selected, timer)

    def evaluate(self) -> Metrics:
        """Validate the current policy. What is being sampled is sampled to its end first: new weights would come into it."""
        if self.context.validates:
            self.wait(lambda: self._unfinished == 0 and self._judging is None)
        return super().evaluate()


# ---- the asynchronous schedule -----------------------------------------------------------------------------------------


def choose(ready: Sequence[int], waiting: Iterable[int], version: int, batch_size: int) -> list[int] | None:
    """Return the places, ascending, of the groups to train in the batch of `version`, of those that are ready; None while it is too early.

    `ready` are their deadlines, in the order in which they became ready, `waiting` those of all groups that are not trained yet.
    """
    if len(ready) < batch_size:
        return None
    chosen: set[int] = set()
    num_until = 0
    for deadline, number in sorted(Counter(waiting).items()):
        num_until += number
        # A deadline that has passed already cannot be kept any more: the next batch is the best that there is.
        batches_to_come = max(0, deadline - version)
        needed = min(batch_size, num_until - batches_to_come * batch_size)
        eligible = [place for place, own in enumerate(ready) if own <= deadline and place not in chosen]
        if len(chosen) + len(eligible) < needed:
            return None
        chosen.update(eligible[: max(0, needed - len(chosen))])
    rest = [place for place in range(len(ready)) if place not in chosen]
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
        self.max_staleness = self.config.trainer.asynchronous.max_staleness
        self.in_batches = self.max_staleness == 0
        self._has_sent = False
        """True once the engines have had weights in this start of the run."""

    def step(self) -> Metrics:
        """Send the weights, ask for as much as the bound allows, wait for a batch, and train on it."""
        timer = self.context.progress.timer()
        self._begin_step()
        if not self._has_sent or self.actor.version - self.rollout.version >= self.config.trainer.asynchronous.sync_every:
            with timer("sync_weights"):
                self.rollout.sync_weights(self.actor)
            self._has_sent = True
        self.top_up()
        with timer("wait_for_rollouts"):
            batch = self.take()
        return self.train_beside(self.selected(batch, timer), timer)

    def room(self) -> int:
        """Return how many groups may be asked for and not trained: at most (v + max_staleness + 1) batches while the engines have version v."""
        lag = self._version + self._num_taken - self.rollout.version
        return max(0, self.max_staleness + 1 - lag) * self.batch_size

    def next_batch(self) -> list[Group] | None:
        """Return the groups of a batch that keeps the bound for all others; None while it cannot be made of those that are ready."""
        if self.in_batches:
            return super().next_batch()
        asked = [self._deadline(group) for group in self.groups if group.asked_at is not None]
        size = min(self.batch_size, len(self.groups) if self.refills else len(asked))
        ready = list(self.ready)
        places = choose([self._deadline(group) for group in ready], asked, self.actor.version, size)
        if places is None:
            return None
        chosen = {ready[place] for place in places}
        return [group for group in self.groups if group in chosen]

    def _deadline(self, group: Group) -> int:
        """Return the version at which this group has to be trained at the latest."""
        assert group.asked_at is not None
        return group.asked_at + self.max_staleness
