"""The groups that a session samples ahead.

Which are trained follows from the order of the draws and the schedule, never from length. With
`filter_groups.refill` groups are scored in another thread as they end, and one without a signal gives its
place to a further prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from grpo_rl.background import has_ended, in_background
from grpo_rl.errors import DataError, NoRewardError
from grpo_rl.trainer.parts import training_sampling
from grpo_rl.trainer.sampled.selection import by_uid
from grpo_rl.types import GREEDY, Metrics, Prompt, Rollout

if TYPE_CHECKING:
    from grpo_rl.trainer.session import Session

LOOK_S = 0.05  # seconds for which responses are waited for before another look at the training that goes on


@dataclass(slots=True, eq=False)
class Group:
    """The responses to one prompt, from the draw to the training."""

    batch: int  # the number, from 1, of its batch of prompts, with which its sampling is seeded
    row: int
    prompt: Prompt
    asked_at: int = -1
    """The engines' version when it was asked for: none of its tokens is older. -1: not asked for yet."""
    ids: Sequence[str] = ()  # the names of its responses in the pool
    missing: int = 0
    rollouts: list[Rollout] = field(default_factory=list)

    def ordered(self) -> list[Rollout]:
        """Return the responses by sample, the greedy one last."""
        return sorted(self.rollouts, key=lambda rollout: (rollout.sample_index == GREEDY, rollout.sample_index))


Choose = Callable[[Sequence[Group], Sequence[Group], int], list[Group] | None]
"""`choose(ready, asked, size)`: `size` groups of those that are ready, of all that were asked for; None while it is too early."""


class InFlight:
    """The groups between draw and training, whose prompts a checkpoint has: a resumed run asks for them
    again.
    """

    def __init__(self, session: Session) -> None:
        self.session, self.selection = session, session.selection
        self.batch_size = session.config.data.train_batch_size
        self.room = 0  # the number of groups that may be asked for and not trained
        self.in_order = True
        """True if a batch has the first groups that were drawn, and with refilling the whole of a draw is asked for."""
        self.has_taken = False  # True once the batch of the step was taken: what is drawn then is for later steps
        self.rejected: list[Rollout] = []  # what was scored for the batch that was taken last, and is not trained
        self.refilling: Metrics = {}  # how the batch that was taken last came about
        self.num_batches = 0  # the number of batches of prompts that were drawn
        self._set_groups([])

    def _set_groups(self, groups: Iterable[Group]) -> None:
        self.groups = {group.prompt.uid: group for group in groups}
        """All groups by the uid of their prompt, in the order in which they were drawn."""
        self.ready: dict[Group, None] = {}  # those that can be trained, in the order in which that was known
        self._unjudged: list[Group] = []  # those that have ended, and of which nobody knows yet whether they have a signal
        self._judging: tuple[list[Group], Future[list[Rollout]]] | None = None
        self._untrained: list[Group] = []  # the groups without a signal that were found for the batch that is taken next
        self._num_draws = self._num_failed = 0
        self._unfinished = 0  # the number of responses that were asked for and have not ended
        self._since: float | None = None  # the moment since which there are requests, or none
        self._idle_s = 0.0

    def top_up(self) -> None:
        """Draw prompts and ask for their responses, as many as there is room for and the steps left train.

        Raises DataError for a row that cannot be used, and if too few groups have a signal, unless the batch
        of the step was taken: the next step meets the same row.
        """
        session, refills = self.session, self.selection.refills
        steps_left = session.total_steps - session.step + 1 - self.has_taken
        num_wanted, num_groups = min(self.room, steps_left * self.batch_size), len(self.groups)
        most_useless = self.selection.filters.max_num_gen_batches * session.config.gen_batch_size - self.batch_size

        def too_few(suffix: str = "") -> DataError:
            num_ready = len(self.ready)
            return DataError(self.selection.too_few(num_ready, num_ready + len(self._untrained), self._num_draws) + suffix)

        try:
            while len(self.groups) < num_wanted and not self.selection.exhausted:
                if refills and len(self._untrained) > most_useless:
                    raise too_few()
                drawn = self.selection.prompts()
                self.num_batches, self._num_draws = self.num_batches + 1, self._num_draws + 1
                # With refilling all draws of a step have the same seed, as in `sync`.
                number = session.step if refills else self.num_batches
                self.groups |= {prompt.uid: Group(number, row, prompt) for row, prompt in drawn}
            if refills and len(self.groups) < min(self.batch_size, num_wanted):
                raise too_few("; all other prompts are retired")
        except DataError:
            if not self.has_taken:
                raise
        asks_all = refills and self.in_order and len(self.groups) > num_groups
        self._ask([group for group in list(self.groups.values())[: None if asks_all else self.room] if group.asked_at < 0])

    def _ask(self, new: list[Group]) -> None:
        session, n = self.session, self.session.config.rollout.n
        size = n + session.samples_greedily
        for batch in dict.fromkeys(group.batch for group in new):
            groups, version = [group for group in new if group.batch == batch], session.rollout.version
            prompts, sampling = [group.prompt for group in groups], training_sampling(session.config, batch)
            ids = session.rollout.submit(prompts, n, sampling, greedy=session.samples_greedily)
            for number, group in enumerate(groups):
                group.asked_at, group.missing = version, size
                group.ids = ids[number * size : (number + 1) * size]
        if new:
            self._count(len(new) * size)

    def _count(self, change: int) -> None:
        """Add to the number of responses that have not ended."""
        if not self._unfinished or self._unfinished + change == 0:
            self._note_load()
        self._unfinished += change

    def _note_load(self) -> None:
        """Record the time with requests until now, or add up the time without any."""
        timeline = self.session.output.timeline
        now_s = timeline.now()
        if self._since is not None and self._unfinished:
            timeline.record("rollout", "gen", self._since, now_s)
        elif self._since is not None:
            self._idle_s += now_s - self._since
        self._since = now_s

    def wait(self, enough: Callable[[], bool], training: Future[Any] | None = None) -> None:
        """Take in responses and hand them to the rewards until there is enough, or `training`, the work beside it, has failed."""
        session = self.session
        total = None if self.selection.refills or training else self._unfinished
        on_end = session.progress.counting(session.rewarder.submit, total)
        while True:
            idle_s = 0.0 if self._unfinished else LOOK_S
            is_judging = self._look(0.0 if training else idle_s)
            if training:
                has_ended(training, idle_s)
            if enough():
                return
            assert self._unfinished or is_judging or training, "all that was asked for has ended, and it was asked for enough"
            # While something is judged, more may be wanted although nothing ends.
            wait_s = LOOK_S if is_judging or training else None
            for rollout in session.rollout.completed(wait_s) if self._unfinished else ():
                group = self.groups[rollout.prompt.uid]
                group.rollouts.append(rollout)
                group.missing -= 1
                self._count(-1)
                on_end(rollout)
                if group.missing == 0:
                    self._unjudged.append(group)
                    if self._look(0.0) != is_judging or enough():
                        break

    def finish(self) -> None:
        """Wait until all that was asked for has ended."""
        self.wait(lambda: self._unfinished == 0 and self._judging is None)

    def sample_beside(self, training: Future[Metrics]) -> Metrics:
        """Keep sampling until the training has ended. Returns its metrics, and how long there was nothing to sample."""
        try:
            self.wait(training.done, training)
        finally:
            # Also if sampling has failed: the processes must not be ended below a thread that starts them again.
            has_ended(training, self.session.config.trainer.step_timeout_s)
        if self._unfinished:
            self._note_load()
        waits, self._idle_s = {"timing_s/rollout_waits_for_trainer": self._idle_s}, 0.0
        return training.result(0) | waits

    def _look(self, wait_s: float) -> bool:
        """Wait `wait_s` for rewards, and replace the groups without a signal. Returns whether others are being scored."""
        if not self.selection.refills:  # all are trained
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
            self._judging = groups, in_background("rewards", lambda: self.session.rewarded(rollouts))
        return self._judging is not None

    def _judge(self, groups: list[Group], scoring: Future[list[Rollout]]) -> None:
        try:
            rewarded = by_uid(scoring.result(0))
            self._num_failed = 0
        except NoRewardError:
            # Of a few groups that ended together it may happen, of a whole batch it is an error.
            self._num_failed += len(groups)
            if self._num_failed >= self.batch_size:
                raise
            rewarded = by_uid([rollout for rollout in _rollouts(groups) if rollout.sample_index != GREEDY])
        groups = [group for group in groups if self.groups.get(group.prompt.uid) is group]
        for group in groups:
            group.rollouts = rewarded[group.prompt.uid]
        self.selection.note({group.prompt.uid: group.row for group in groups}, _rollouts(groups))
        useful = {group[0].prompt.uid for group in self.selection.with_signal(_rollouts(groups))}
        self.ready |= dict.fromkeys(group for group in groups if group.prompt.uid in useful)
        useless = [group for group in groups if group.prompt.uid not in useful]
        self._remove(useless)
        self._untrained += useless

    def take(self, choose: Choose | None) -> list[Group]:
        """Wait for the groups of the next batch, and return them as they were drawn."""
        batch: list[Group] | None = None

        def is_there() -> bool:
            nonlocal batch
            batch = self._next(choose)
            return batch is not None

        self.wait(is_there)
        assert batch is not None
        self._remove(batch)
        self.has_taken, self.room = True, max(0, self.room - self.batch_size)
        if self.selection.refills:
            # Further groups of the last draw are dropped, and those that were scored count in the metrics, as in `sync`.
            surplus = self.requested() if self.in_order else []
            self._untrained += [group for group in surplus if group in self.ready]
            self._remove(surplus)
            self.rejected = _rollouts(self._untrained)
            num_groups = len(batch) + len(self._untrained)
            self.refilling = self.selection.metrics(len(batch), num_groups, self._num_draws)
            self.refilling["filter_groups/surplus_groups"] = float(len(surplus))
            self._untrained, self._num_draws = [], 0
        return batch

    def _next(self, choose: Choose | None) -> list[Group] | None:
        if choose is None:
            first = list(self.groups.values())[: self.batch_size]
            return first if all(group in self.ready for group in first) else None
        requested = self.requested()
        size = min(self.batch_size, len(self.groups if self.selection.refills else requested))
        chosen = choose(list(self.ready), requested, size)
        return None if chosen is None else [group for group in self.groups.values() if group in chosen]

    def requested(self) -> list[Group]:
        """Return the groups that were asked for and not handed over."""
        return [group for group in self.groups.values() if group.asked_at >= 0]

    def _remove(self, groups: Iterable[Group]) -> None:
        self._forget(groups)
        for group in groups:
            self.groups.pop(group.prompt.uid)
            self.ready.pop(group, None)
        self._unjudged = [group for group in self._unjudged if group.prompt.uid in self.groups]

    def _forget(self, groups: Iterable[Group]) -> None:
        """Let the pool forget the responses of these groups that are being sampled."""
        unfinished = [group for group in groups if group.missing]
        if unfinished:
            self.session.rollout.forget([name for group in unfinished for name in group.ids])
            self._count(-sum(group.missing for group in unfinished))

    @property
    def has_batch(self) -> bool:
        """Return whether what was drawn is enough for another step."""
        return len(self.groups) >= (self.batch_size if self.selection.refills else 1)

    def state_dict(self) -> dict[str, Any]:
        """Return the prompts that were drawn and not trained: batch, row and uid of each."""
        waiting = [[group.batch, group.row, group.prompt.uid] for group in self.groups.values()]
        return {"num_batches": self.num_batches, "waiting": waiting}

    def load_state_dict(self, state: dict[str, Any], *, same_data: bool) -> None:
        """Go on from this state, without prompts of data that have changed."""
        self._forget(self.groups.values())
        self.num_batches = int(state["num_batches"])
        rows = [(int(batch), int(row), str(uid)) for batch, row, uid in state["waiting"]] if same_data else []
        self._set_groups(Group(batch, row, self.selection.data.prompt(row, uid)) for batch, row, uid in rows)


def _rollouts(groups: Iterable[Group]) -> list[Rollout]:
    return [rollout for group in groups for rollout in group.rollouts]
