"""Rewards computed beside the sampling: threads, a deadline for each reward, clear errors."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from grpo_rl.errors import RewardError
from grpo_rl.rewards.compose import RewardFunction, Scored
from grpo_rl.types import Rollout

Key = tuple[str, int]


@dataclass(slots=True)
class _Job:
    """One rollout on its way through a thread; every field but the rollout is guarded by the runner's lock."""

    rollout: Rollout
    started: float | None = None
    scored: Scored | None = None
    error: BaseException | None = None

    @property
    def done(self) -> bool:
        return self.scored is not None or self.error is not None


class RewardRunner:
    """Scores rollouts in `num_workers` threads as they are submitted; implements `roles.Rewarder`.

    A reward may run for `timeout_s` seconds. A thread cannot be stopped from outside: one that overran is
    left behind as a daemon, and `wait` raises.
    """

    def __init__(self, function: RewardFunction, num_workers: int, timeout_s: float) -> None:
        self._function, self._timeout_s = function, timeout_s
        self.factors = function.factors
        self._jobs: dict[Key, _Job] = {}
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._closed = False
        self._threads = [threading.Thread(target=self._work, name=f"reward-{i}", daemon=True) for i in range(num_workers)]
        for thread in self._threads:
            thread.start()

    def submit(self, rollout: Rollout) -> None:
        """Start scoring; returns at once. The same rollout given again while it is pending is scored once."""
        if self._closed:
            raise RuntimeError("the reward runner is closed")
        pending = self._jobs.get(_key(rollout))
        if pending is None or pending.rollout.response_ids != rollout.response_ids:
            job = self._jobs[_key(rollout)] = _Job(rollout)
            self._queue.put(job)

    def wait(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """The same rollouts, `reward`, `reward_parts` and, where they are read, `steps` filled. Submits those that were not.

        Raises RewardError, naming function, prompt and sample, for the first reward that failed, or as
        soon as one has run for longer than `timeout_s`.
        """
        for rollout in rollouts:
            self.submit(rollout)
        for rollout in rollouts:
            job = self._jobs[_key(rollout)]
            self._await(job)
            if job.error is not None:
                raise job.error
            assert job.scored is not None
            rollout.reward, rollout.reward_parts, rollout.steps = job.scored
        for rollout in rollouts:
            self._jobs.pop(_key(rollout), None)
        return list(rollouts)

    def close(self) -> None:
        """End the threads; one in the middle of a reward gets up to `timeout_s` for it, and is then left behind."""
        self._closed = True
        for _ in self._threads:
            self._queue.put(None)
        deadline = time.monotonic() + self._timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _await(self, job: _Job) -> None:
        """Return when the job is done; raise when any job overruns, because it may hold up this one."""
        with self._changed:
            while not job.done:
                now = time.monotonic()
                running = [other for other in self._jobs.values() if other.started is not None and not other.done]
                for other in running:
                    assert other.started is not None
                    if now - other.started > self._timeout_s:
                        raise RewardError(self._overrun(other.rollout))
                oldest = min((other.started for other in running if other.started is not None), default=now)
                # A hair more than the rest of the oldest job's time, so that the next look finds it over.
                self._changed.wait(max(0.0, oldest + self._timeout_s - now) + 0.01)

    def _overrun(self, rollout: Rollout) -> str:
        names = ", ".join(repr(component.name) for component in self._function.components)
        return (
            f"reward {names} for prompt {rollout.prompt.uid}, sample {rollout.sample_index} took longer than "
            f"reward.timeout_s={self._timeout_s:g} (response of {len(rollout.text)} characters)"
        )

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            with self._changed:
                job.started = time.monotonic()
                self._changed.notify_all()
            try:
                scored, error = self._function.score(job.rollout), None
            except BaseException as failure:  # carried to `wait`: a thread's own exception would be lost
                scored, error = None, failure
            with self._changed:
                job.scored, job.error = scored, error
                self._changed.notify_all()


def _key(rollout: Rollout) -> Key:
    return rollout.prompt.uid, rollout.sample_index
