"""Rewards computed beside the sampling, by processes that score single responses."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from grpo_rl.config.schema.reward import JudgeConfig, RewardConfig
from grpo_rl.errors import GrpoRlError
from grpo_rl.rewards.combined import fail, stop_where_due
from grpo_rl.rewards.compose import JUDGE, RewardFunction, sample_of
from grpo_rl.rewards.contract import Outcome, RewardFailure
from grpo_rl.rewards.models.judge_question import judge_sample
from grpo_rl.rewards.runtime.process import Job, spared
from grpo_rl.rewards.runtime.processes import Broken, Done, RewardProcesses
from grpo_rl.types import Rollout

Key = tuple[str, int]


class JobPool(Protocol):
    """Processes that do jobs, here or on all nodes. They call what they were made with in any thread."""

    def put(self, jobs: Sequence[Job]) -> None: ...

    def check_started(self) -> None:
        """Return when every process is ready. Raises RewardError if one cannot start."""

    def close(self) -> None: ...


class JobRunner:
    def __init__(self, start: Callable[[Done, Broken], JobPool]) -> None:
        self._jobs: dict[Key, tuple[Rollout, Job]] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._broken: GrpoRlError | None = None
        self.on_busy: Callable[[float], None] = lambda _: None
        """Called in any thread when nothing is left to score, with the seconds that scoring took."""
        self._num_pending, self._busy_since = 0, 0.0
        self.processes = start(self._tell, self._break)
        self.check_started = self.processes.check_started

    def job_of(self, rollout: Rollout) -> Job:
        raise NotImplementedError

    def submit(self, rollout: Rollout) -> None:
        """Start scoring; returns at once. The same rollout given again while it is pending is scored once."""
        if self._closed:
            raise RuntimeError("the runner is closed")
        pending = self._jobs.get(_key(rollout))
        if pending is None or not pending[0].same_response(rollout):
            job = self.job_of(rollout)
            self._jobs[_key(rollout)] = rollout, job
            if not job.done:
                self._put([job])

    def close(self) -> None:
        self._closed = True
        self.processes.close()

    def _take(self, rollouts: Sequence[Rollout], beside: Sequence[Job] = ()) -> list[Job]:
        """Return the jobs of these rollouts once they and new ones `beside` are done; submits those that were not."""
        for rollout in rollouts:
            self.submit(rollout)
        jobs = [self._jobs[_key(rollout)][1] for rollout in rollouts]
        self._call(beside, beside=jobs)
        for rollout in rollouts:
            self._jobs.pop(_key(rollout), None)
        return jobs

    def _call(self, jobs: Sequence[Job], beside: Sequence[Job] = ()) -> None:
        """Have new jobs done, and wait for them and those `beside`."""
        self._put(jobs)
        pending_jobs = [*beside, *jobs]
        with self._changed:
            while True:
                while pending_jobs and pending_jobs[-1].done:
                    pending_jobs.pop()
                if not pending_jobs:
                    return
                if self._broken is not None:
                    raise self._broken
                self._changed.wait(1.0)

    def _put(self, jobs: Sequence[Job]) -> None:
        with self._changed:
            if self._num_pending == 0 and jobs:
                self._busy_since = time.perf_counter()
            self._num_pending += len(jobs)
        self.processes.put(jobs)

    def _tell(self, jobs: Sequence[Job]) -> None:
        with self._changed:
            for job in jobs:
                job.done = True
            self._num_pending -= len(jobs)
            if jobs and self._num_pending == 0:
                self.on_busy(time.perf_counter() - self._busy_since)
            self._changed.notify_all()

    def _break(self, why: GrpoRlError) -> None:
        with self._changed:
            if not self._closed:
                self._broken = why
            self._changed.notify_all()


class RewardRunner(JobRunner):
    """Scores rollouts in reward processes; implements `protocols.Rewarder`.

    A response that is not scored within `reward.timeout_s`, or that kills its process, costs that process,
    which is replaced. No result depends on which process answers first: functions of lists are called in
    `wait`, with all rollouts in their order.
    """

    def __init__(
        self,
        function: RewardFunction,
        config: RewardConfig,
        start: Callable[[Done, Broken], JobPool] | None = None,
        **options: Any,
    ) -> None:
        """Without `start` the processes are on this machine, made with `options`."""
        self._function, self._config = function, config
        self.factors = function.factors
        self._singly = [component.name for component in function.components if not component.batched]
        self._batched = [component.name for component in function.components if component.batched]
        super().__init__(start or partial(RewardProcesses, config, **options))

    def job_of(self, rollout: Rollout) -> Job:
        return Job([partial(sample_of, rollout)], self._singly, size=len(rollout.text), done=not self._singly)

    def wait(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Return the rollouts, each with `reward`, `reward_parts` and, if they are read, `steps`, or with
        `failure`.

        The reward of a failed one is chosen by `reward.on_failure`. Raises RewardError, with counts by kind
        and the first causes, if one failed and the run shall stop, or if all sampled ones have.
        """
        samples = [partial(sample_of, rollout) for rollout in rollouts]
        batched_jobs = [Job(samples, [name], batched=True) for name in self._batched] if rollouts else []
        jobs = self._take(rollouts, batched_jobs)
        further = [spared(job, self._call) for job in batched_jobs]
        for rollout, job, *batched_outcomes in zip(rollouts, jobs, *further, strict=True):
            try:
                reward, parts, steps = self._function.assemble(rollout, [*job.outcomes, *batched_outcomes])
                rollout.reward, rollout.reward_parts, rollout.steps = reward, parts, steps
                rollout.failure = rollout.failure_cause = None
            except RewardFailure as failure:
                fail(rollout, failure, self._config)
        stop_where_due(rollouts, self._config)
        return list(rollouts)


class JudgeRunner(JobRunner):
    """The judge's marks; implements `combined.ModelReward`. A judgement has `reward.judge.deadline_s`."""

    name = JUDGE

    def __init__(self, config: JudgeConfig, start: Callable[[Done, Broken], JobPool]) -> None:
        self.weight = config.weight
        super().__init__(start)

    def job_of(self, rollout: Rollout) -> Job:
        return Job([partial(judge_sample, rollout)], [], size=len(rollout.text))

    def wait(self, rollouts: Sequence[Rollout]) -> list[Outcome]:
        return [job.outcomes[0] for job in self._take(rollouts)]


def _key(rollout: Rollout) -> Key:
    return rollout.prompt.uid, rollout.sample_index
