"""The reward processes of one machine, each replaced if it ends."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from grpo_rl.config.schema.reward import RewardConfig
from grpo_rl.errors import GrpoRlError, RewardError
from grpo_rl.processes.child import KILL_S, Child, OutputLog
from grpo_rl.rewards.runtime.process import Job, RewardProcess

MOST_AT_ONCE = 64
LARGEST_AT_ONCE = 2**20
"""Responses, and characters of them, in one message to a process."""
SHARES = 2
"""Of the responses that wait a process takes one of so many for each process that there is."""
Done = Callable[[Sequence[Job]], None]
Broken = Callable[[GrpoRlError], None]


class Processes:
    """Threads that keep a process each, for jobs. `done` is called with those that are settled, `broken` if
    none can start."""

    description: str

    def __init__(self, done: Done, broken: Broken, logs: Sequence[Path | None]) -> None:
        """What processes print goes to `logs`, a file each. To be called when all else is made."""
        self._done, self._give_up = done, broken
        self._changed = threading.Condition()
        self._closed = False
        self._ready: set[int] = set()  # places whose process can be asked
        self._broken: RewardError | None = None
        self._children: dict[int, Child] = {}
        self._threads = [threading.Thread(target=self._run, args=place, daemon=True) for place in enumerate(logs)]
        for thread in self._threads:
            thread.start()

    def _work(self, number: int, log: OutputLog) -> None:
        """Keep a process at this place until all are closed."""
        raise NotImplementedError

    @property
    def pids(self) -> dict[int, int]:
        return {number: child.pid for number, child in self._children.items()}

    def check_started(self) -> None:
        """Return when all processes, replacements too, are ready. Raises RewardError if one cannot start."""
        with self._changed:
            while len(self._ready) < len(self._threads) and self._broken is None:
                self._changed.wait(1.0)
            if self._broken is not None:
                raise self._broken

    def close(self) -> None:
        self._closed = True
        for child in list(self._children.values()):
            child.kill()
        deadline = time.monotonic() + KILL_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self, number: int, log_path: Path | None) -> None:
        log = OutputLog(log_path)
        try:
            self._work(number, log)
        except Exception as error:  # a thread's own exception would be lost
            self._break(error if isinstance(error, RewardError) else RewardError(f"{self.description}: {error}"))
        finally:
            if number in self._children:
                self._children[number].kill()
            log.close()

    def _start(self, number: int, child: Child) -> None:
        """Wait until a new process is ready. Raises RewardError if it cannot start."""
        self._children[number] = child
        if self._closed:
            child.kill()
        if trouble := child.wait_until_ready():
            raise RewardError(trouble)
        with self._changed:
            self._ready.add(number)
            self._changed.notify_all()

    def _break(self, why: RewardError) -> None:
        with self._changed:
            if not self._closed:
                self._broken = why
            self._changed.notify_all()
        if self._broken is not None:
            self._give_up(why)


class RewardProcesses(Processes):
    description = "reward processes"

    def __init__(
        self,
        config: RewardConfig,
        done: Done,
        broken: Broken,
        *,
        data_sources: Iterable[str] = (),
        logs: Sequence[Path] = (),
    ) -> None:
        """Processes load what the rules for `data_sources` need."""
        self._config, self._data_sources = config, list(data_sources)
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        super().__init__(done, broken, logs or [None] * (config.num_workers or 1))

    def put(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self._queue.put(job)

    def close(self) -> None:
        for _ in self._threads:
            self._queue.put(None)
        super().close()

    def _work(self, number: int, log: OutputLog) -> None:
        worker = self._started(number, log)
        while (job := self._queue.get()) is not None and not self._closed:
            if not worker.child.alive:
                worker = self._started(number, log)
            waiting = worker.ask(self._with_others(job), partial(self._tell, number, worker))
            if waiting and not worker.child.alive:
                # Another call may have broken it: a response answers only for a process that no other has used.
                worker = self._started(number, log)
                waiting = [*worker.ask(waiting[:1], partial(self._tell, number, worker)), *waiting[1:]]
            for job in waiting:
                self._queue.put(job)
            if not worker.child.alive and not self._closed:
                worker = self._started(number, log)

    def _with_others(self, first: Job) -> list[Job]:
        """Return the job, and as many alike that wait as leaves enough for every other process."""
        jobs, size = [first], first.size
        share = min(MOST_AT_ONCE, self._queue.qsize() // (SHARES * len(self._threads)))
        while len(jobs) < share and size < LARGEST_AT_ONCE and not first.is_joint:
            with contextlib.suppress(queue.Empty):
                job = self._queue.get_nowait()
                if job is not None and (job.functions, job.batched) == (first.functions, first.batched) and not job.is_joint:
                    jobs.append(job)
                    size += job.size
                    continue
                self._queue.put(job)
            break
        return jobs

    def _started(self, number: int, log: OutputLog) -> RewardProcess:
        worker = RewardProcess(self._config, self._data_sources, log)
        try:
            self._start(number, worker.child)
        except RewardError as error:
            limit = self._config.memory_limit_gb
            hint = "" if limit is None else f" (its memory ends at reward.memory_limit_gb={limit:g})"
            raise RewardError(f"the process of the reward functions cannot start: {error}{hint}") from None
        return worker

    def _tell(self, number: int, worker: RewardProcess, jobs: Sequence[Job]) -> None:
        if not worker.child.alive:
            with self._changed:
                self._ready.discard(number)
        self._done(jobs)
