"""Rewards computed beside the sampling, in supervised processes: a deadline for each, a kind for every failure."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from grpo_rl.config.schema.tree import RewardConfig
from grpo_rl.errors import RewardError
from grpo_rl.processes.child import KILL_S, OutputLog
from grpo_rl.rewards.combined import fail, stop_where_due
from grpo_rl.rewards.compose import RewardFunction, sample_of
from grpo_rl.rewards.contract import Outcome, RewardFailure
from grpo_rl.rewards.runtime.process import Job, RewardProcess, spared
from grpo_rl.types import Rollout

Key = tuple[str, int]
MOST_AT_ONCE = 64
LARGEST_AT_ONCE = 2**20
"""Responses, and characters of them, in one message to a process."""
SHARES = 2
"""The divisor of a process's share: it takes one of so many, for each process there is, of the responses that wait."""


class RewardRunner:
    """Scores rollouts in `reward.num_workers` processes as they are submitted; implements `protocols.Rewarder`.

    A response that is not scored within `reward.timeout_s` costs its process, which is killed with all that it started
    and replaced; so does one that kills it. What becomes of the rollout is set by `reward.on_failure`. No result
    depends on which process answers first: functions that take lists are called in `wait`, with all its rollouts in
    their order.
    """

    def __init__(
        self,
        function: RewardFunction,
        config: RewardConfig,
        *,
        data_sources: Iterable[str] = (),
        log_folder: Path | None = None,
        log_name: str = "reward",
    ) -> None:
        """Start the processes. They load what the rules for `data_sources` need, and print to `log_folder`/`log_name`-N.log."""
        self._function, self._config = function, config
        self.factors = function.factors
        self._singly = [component for component in function.components if not component.batched]
        self._batched = [component for component in function.components if component.batched]
        self._data_sources = list(data_sources)
        self._jobs: dict[Key, tuple[Rollout, Job]] = {}
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._closed = False
        self._ready: set[int] = set()
        """Places whose process can be asked."""
        self._broken: str | None = None
        self._workers: dict[int, RewardProcess] = {}
        """The process of each place."""
        self.on_busy: Callable[[float], None] = lambda _: None
        """A function called when nothing is left to score, from any thread, with the seconds for which there was something."""
        self._num_pending, self._busy_since = 0, 0.0
        places = range(config.num_workers)
        paths = [None if log_folder is None else log_folder / f"{log_name}-{place}.log" for place in places]
        self._threads = [threading.Thread(target=self._work, args=(i, path), daemon=True) for i, path in enumerate(paths)]
        for thread in self._threads:
            thread.start()

    @property
    def pids(self) -> dict[int, int]:
        """The process id of each place, for code that watches them."""
        return {number: worker.child.pid for number, worker in self._workers.items()}

    def check_started(self) -> None:
        """Return when every process is ready, also those that replace others. Raises RewardError, with the cause, when one cannot start."""
        with self._changed:
            while len(self._ready) < len(self._threads) and self._broken is None:
                self._changed.wait(1.0)
            if self._broken is not None:
                raise RewardError(self._broken)

    def submit(self, rollout: Rollout) -> None:
        """Start scoring; returns at once. The same rollout given again while it is pending is scored once."""
        if self._closed:
            raise RuntimeError("the reward runner is closed")
        pending = self._jobs.get(_key(rollout))
        if pending is None or not pending[0].same_response(rollout):
            job = Job([partial(sample_of, rollout)], self._singly, len(rollout.text), done=not self._singly)
            self._jobs[_key(rollout)] = rollout, job
            if not job.done:
                self._put([job])

    def wait(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """The same rollouts, each with `reward`, `reward_parts` and, where they are read, `steps`, or with `failure`.

        Submits those that were not. The reward of a failed one is chosen by `reward.on_failure`. Raises RewardError,
        with counts by kind and the first causes, when one failed and the run shall stop, and when all sampled ones
        have.
        """
        for rollout in rollouts:
            self.submit(rollout)
        jobs = [self._jobs[_key(rollout)][1] for rollout in rollouts]
        samples = [partial(sample_of, rollout) for rollout in rollouts]
        together = [Job(samples, [component]) for component in self._batched] if rollouts else []
        self._call(together, beside=jobs)
        further = [spared(job, self._call) for job in together]
        for rollout, job, *more in zip(rollouts, jobs, *further, strict=True):
            self._settle(rollout, [*job.outcomes, *more])
            self._jobs.pop(_key(rollout), None)
        stop_where_due(rollouts, self._config)
        return list(rollouts)

    def close(self) -> None:
        """Kill the processes and end the threads; what is pending is given up."""
        self._closed = True
        for _ in self._threads:
            self._queue.put(None)
        for worker in list(self._workers.values()):
            worker.child.kill()
        deadline = time.monotonic() + KILL_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _settle(self, rollout: Rollout, outcomes: Sequence[Outcome]) -> None:
        try:
            rollout.reward, rollout.reward_parts, rollout.steps = self._function.assemble(rollout, outcomes)
            rollout.failure = rollout.failure_cause = None
        except RewardFailure as failure:
            fail(rollout, failure.kind, failure.cause, self._config)

    def _call(self, jobs: Sequence[Job], beside: Sequence[Job] = ()) -> None:
        """Have new jobs done, and wait for them and those `beside`."""
        self._put(jobs)
        left = [*beside, *jobs]
        with self._changed:
            while True:
                while left and left[-1].done:
                    left.pop()
                if not left:
                    return
                if self._broken is not None:
                    raise RewardError(self._broken)
                self._changed.wait(1.0)

    def _put(self, jobs: Sequence[Job]) -> None:
        """Give new jobs to the processes."""
        with self._changed:
            if self._num_pending == 0 and jobs:
                self._busy_since = time.perf_counter()
            self._num_pending += len(jobs)
        for job in jobs:
            self._queue.put(job)

    def _work(self, number: int, log_path: Path | None) -> None:
        log = OutputLog(log_path)
        try:
            worker = self._start(number, log)
            while (job := self._queue.get()) is not None and not self._closed:
                if not worker.child.alive:
                    worker = self._start(number, log)
                left = worker.ask(self._with_others(job), partial(self._tell, number, worker))
                if left and not worker.child.alive:
                    # Another call may have broken it: a response answers only for a process that no other has used.
                    worker = self._start(number, log)
                    left = [*worker.ask(left[:1], partial(self._tell, number, worker)), *left[1:]]
                for job in left:
                    self._queue.put(job)
                if not worker.child.alive and not self._closed:
                    worker = self._start(number, log)
        except Exception as error:  # a thread's own exception would be lost
            self._break(f"reward processes: {error}")
        finally:
            if number in self._workers:
                self._workers[number].child.kill()
            log.close()

    def _with_others(self, first: Job) -> list[Job]:
        """The job, and as many that wait and call the same functions as leaves enough for every other process."""
        jobs, size = [first], first.size
        share = min(MOST_AT_ONCE, self._queue.qsize() // (SHARES * len(self._threads)))
        while len(jobs) < share and size < LARGEST_AT_ONCE and not first.is_joint:
            with contextlib.suppress(queue.Empty):
                job = self._queue.get_nowait()
                if job is not None and job.components is first.components and not job.is_joint:
                    jobs.append(job)
                    size += job.size
                    continue
                self._queue.put(job)
            break
        return jobs

    def _start(self, number: int, log: OutputLog) -> RewardProcess:
        """A process that can be asked. Raises RewardError when it cannot be started."""
        worker = self._workers[number] = RewardProcess(self._config, self._data_sources, log)
        if self._closed:
            worker.child.kill()
        if trouble := worker.child.wait_until_ready():
            limit = self._config.memory_limit_gb
            hint = "" if limit is None else f" (its memory ends at reward.memory_limit_gb={limit:g})"
            raise RewardError(f"the process of the reward functions cannot start: {trouble}{hint}")
        with self._changed:
            self._ready.add(number)
            self._changed.notify_all()
        return worker

    def _tell(self, number: int, worker: RewardProcess, jobs: Sequence[Job]) -> None:
        with self._changed:
            for job in jobs:
                job.done = True
            self._num_pending -= len(jobs)
            if jobs and self._num_pending == 0:
                self.on_busy(time.perf_counter() - self._busy_since)
            if not worker.child.alive:
                self._ready.discard(number)
            self._changed.notify_all()

    def _break(self, why: str) -> None:
        with self._changed:
            if not self._closed:
                self._broken = why
            self._changed.notify_all()


def _key(rollout: Rollout) -> Key:
    return rollout.prompt.uid, rollout.sample_index
