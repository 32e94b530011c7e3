"""What all recoveries share: the thread that notices workers which died or froze, the budget of restarts, the log of events."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import ray

from grpo_rl.background import Watch
from grpo_rl.cluster.processes.worker_group import Doing, Worker, WorkerGroup, cause_line, stack_of
from grpo_rl.config.schema.tree import TrainerConfig
from grpo_rl.errors import ClusterError
from grpo_rl.processes.family import state, waits_for_cpu
from grpo_rl.telemetry.metrics.timeline import Timeline
from grpo_rl.telemetry.status import Status
from grpo_rl.types import Metrics

MISSED_BEATS = 3
SLOWER_THAN_EVER = 10.0
"""A worker that is busy with one thing so many times longer than it ever was, and longer than the missed
beats, hangs; so is a phase of a step reported.
"""
_LOOK_S = 0.2


@dataclass(eq=False)
class Recoveries:
    """The failures of a run's workers: a budget for them, one loud line for each, and their numbers for the next step's metrics.

    The budget is `trainer.max_restarts` of one worker or role within `trainer.restart_window_s`.
    """

    trainer: TrainerConfig
    warn: Callable[[str], None]
    on_restart: Callable[[str, int | None], None] = lambda worker, pid: None
    """Called with the name of every worker that is lost and gets a new process, and None; later with that process's id."""
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.restarts = self.trainer.recover != "off"
        self.timeline = Timeline()
        self._spent: list[tuple[float, str, str]] = []
        self._since: Metrics = {}
        self._total = 0
        self._lock = threading.Lock()

    def failed(self, name: str, cause: str, then: str) -> None:
        """Allow one more restart of `name`, and report it. Raises ClusterError after too many."""
        max_restarts, window_s = self.trainer.max_restarts, self.trainer.restart_window_s
        with self._lock:
            current_time = self.clock()
            self._spent = [entry for entry in self._spent if current_time - entry[0] <= window_s]
            self._spent.append((current_time, name, cause))
            restarts = sum(other == name for _, other, _ in self._spent) - 1
            if restarts >= max_restarts:
                causes = [f"\n  {current_time - when:.0f} s ago, {failed}: {why}" for when, failed, why in self._spent]
                raise ClusterError(
                    f"{name} failed and is not started again: restarts so far: {restarts} (trainer.max_restarts={max_restarts} "
                    f"within trainer.restart_window_s={window_s:.0f}). Every failure in that time:{''.join(causes)}"
                )
        self.warn(f"recovery: {name} failed: {cause_line(cause)}; {then}")

    def recovered(self, name: str, kind: str, seconds: float, how: str) -> None:
        self.warn(f"recovery: {name} is back after {seconds:.1f} s: {how}")
        if kind == "rollout":
            self.timeline.ended("engines", f"{name} is replaced", seconds)
        self.count(f"{kind}_restarts", 1.0)
        self.count("seconds", seconds)
        self._total += 1

    def came_or_went(self, name: str, what: str, seconds: float, how: str) -> None:
        self.warn(f"engines: {name} {what} after {seconds:.1f} s: {how}")
        self.timeline.ended("engines", f"{name} {what}", seconds)
        self.count(f"engines_{what}", 1.0)

    def count(self, name: str, number: float) -> None:
        with self._lock:
            self._since[f"recovery/{name}"] = self._since.get(f"recovery/{name}", 0.0) + number

    def metrics(self) -> Metrics:
        with self._lock:
            since, self._since = self._since, {}
            return since | {"recovery/restarts_total": float(self._total)} if since else {}


def verdict(
    silent_s: float, activity: tuple[str, float, float | None] | None, heartbeat_s: float, first_s: float
) -> str | None:
    """Return why a worker is given up, from its last sign of life and what it reported with that; None: it is
    well.

    `first_s` is how long something may take that was never done before, or can compile.
    """
    limit_s = MISSED_BEATS * heartbeat_s
    if silent_s > limit_s:
        return f"the process froze: no heartbeat for {silent_s:.1f} s"
    if activity is not None:
        what, seconds, longest_s = activity
        allowed_s = first_s if longest_s is None else limit_s + SLOWER_THAN_EVER * longest_s
        if seconds > allowed_s:
            return f"the worker hangs: {what} for {seconds:.1f} s"
    return None


@dataclass(slots=True)
class _Watched:
    worker: Worker
    on_end: Callable[[Worker, str], None]
    ref: ray.ObjectRef
    last: float = field(default_factory=time.monotonic)
    waits: dict[str, float] = field(default_factory=dict)

    def waited_s(self) -> float:
        """Return for how long one of its threads had no core since the last sign of life: a worker is not late for lack of cores."""
        return max((waited - self.waits.get(thread, 0.0) for thread, waited in self._waits().items()), default=0.0)

    def answered(self) -> None:
        self.last, self.waits = time.monotonic(), self._waits()

    def _waits(self) -> dict[str, float]:
        return waits_for_cpu(self.worker.pid) if self.worker.pid is not None and self.worker.is_here else {}


class Supervisor(Watch):
    """Watches over the processes of one cluster: ends workers that are frozen, and reports every end.

    Every worker answers a call (`beat`) a heartbeat after it was made, in a thread of its own. A process that
    is stopped or whose interpreter is held cannot answer; one whose engine loops answers, and reports for how
    long it has been in one step; one that dies fails the answer that is on its way.
    """

    def __init__(self, trainer: TrainerConfig, recoveries: Recoveries) -> None:
        self.recoveries = recoveries
        self.start_timeout_s, self._heartbeat_s = trainer.start_timeout_s, trainer.heartbeat_s
        self.before_kill: Callable[[str], None] = lambda why: None
        """Called in this thread with the reason before a worker is given up."""
        self._watched: dict[Worker, _Watched] = {}
        self._lock = threading.Lock()
        super().__init__("heartbeats")

    @property
    def closed(self) -> bool:
        """True once the cluster is being ended: nothing is started again."""
        return self.stopping.is_set()

    def watch(self, worker: Worker, on_end: Callable[[Worker, str], None] = lambda worker, cause: None) -> None:
        """Watch this worker from now on; `on_end` is called in this thread, and has to be quick."""
        with self._lock:
            self._watched[worker] = _Watched(worker, on_end, worker.beat(0.0))

    def forget(self, worker: Worker) -> bool:
        with self._lock:
            return self._watched.pop(worker, None) is not None

    def run(self) -> None:
        looked = time.monotonic()
        while not self.closed:
            with self._lock:
                by_ref = {entry.ref: entry for entry in self._watched.values()}
            if not by_ref:
                self.stopping.wait(_LOOK_S)
                looked = time.monotonic()
                continue
            refs = list(by_ref)
            ray.wait(refs, num_returns=1, timeout=_LOOK_S)
            done, silent = ray.wait(refs, num_returns=len(refs), timeout=0)
            # When the controller itself stood still (Ctrl-Z, a busy machine), no worker is late.
            late_s = time.monotonic() - looked
            looked += late_s
            if late_s > self._heartbeat_s:
                for entry in by_ref.values():
                    entry.last += late_s
            for ref in done:
                self._answered(by_ref[ref])
            for ref in silent:
                self._judge(by_ref[ref], None)

    def _answered(self, entry: _Watched) -> None:
        try:
            activity = ray.get(entry.ref, timeout=10.0)
        except ray.exceptions.RayActorError as error:
            self._ended(entry, entry.worker.verdict or f"the process died ({cause_line(str(error)) or type(error).__name__})")
            return
        except ray.exceptions.RayError:
            activity = None  # a worker that is not built yet, or whose report failed: its process lives
        entry.answered()
        self._judge(entry, activity)
        entry.ref = entry.worker.beat(self._heartbeat_s)

    def _judge(self, entry: _Watched, activity: tuple[str, float, float | None] | None) -> None:
        if entry.worker.excused:
            entry.answered()
        silent_s = time.monotonic() - entry.last
        if silent_s > MISSED_BEATS * self._heartbeat_s:
            silent_s -= entry.waited_s()
        cause = verdict(silent_s, activity, self._heartbeat_s, self.start_timeout_s)
        if cause is not None:
            self.before_kill(f"{entry.worker.name} is given up: {cause}")
            entry.worker.kill(cause)
            self._ended(entry, cause)

    def _ended(self, entry: _Watched, cause: str) -> None:
        if self.forget(entry.worker):
            entry.on_end(entry.worker, cause)


# ---- what every process is doing, said once if a phase takes far too long, or before a worker is given up ----

PHASE_LOOK_S = 0.5
LEAST_S = 60.0
ANSWER_S = 2.0


class StuckReport(Watch):
    """Reports once what each process is doing if a phase of a step passes its deadline.

    The deadline is `trainer.stuck_s`; without one, ten times the longest that the phase ever took, at least a
    minute; of a new phase, half of the shortest time after which something would be given up.
    """

    join_timeout_s = 2 * ANSWER_S

    def __init__(
        self, trainer: TrainerConfig, status: Status, worker_groups: Sequence[WorkerGroup], warn: Callable[[str], None]
    ) -> None:
        self._given_s = trainer.stuck_s
        self._first_s = min(trainer.start_timeout_s, trainer.step_timeout_s, trainer.collective_timeout_s) / 2
        self._status, self._worker_groups, self._warn = status, worker_groups, warn
        self._longest: dict[str, float] = {}
        self._reported = ""
        self._lock = threading.Lock()
        super().__init__("stuck")

    def run(self) -> None:
        place, since = self._status.where(), time.monotonic()
        while not self.stopping.wait(PHASE_LOOK_S):
            current_place, seconds = self._status.where(), time.monotonic() - since
            phase = place.rpartition(", ")[2]
            if current_place != place:
                self._longest[phase] = max(self._longest.get(phase, 0.0), seconds)
                place, since = current_place, time.monotonic()
            elif self._status.has_begun and seconds > self.deadline(phase):
                self.report(f"{place} goes on for {seconds:.0f} s")

    def deadline(self, phase: str) -> float:
        longest = self._longest.get(phase)
        if self._given_s is not None:
            return self._given_s
        return self._first_s if longest is None else max(LEAST_S, SLOWER_THAN_EVER * longest)

    def report(self, why: str) -> None:
        """Print what each process is doing, once in each phase of each step. May be called in any thread."""
        with self._lock:
            place = self._status.where()
            if place == self._reported or self.stopping.is_set():
                return
            self._reported = place
            lines = [f"stuck? {why}. What each process is doing:", *self._controller(), *self._workers()]
        self._warn("\n".join(lines))

    def _controller(self) -> Iterator[str]:
        main, frames = threading.main_thread().ident, sys._current_frames()
        for ident in sorted(frames, key=lambda thread_id: thread_id != main):
            stack = stack_of(ident)
            if ident == main or any("/trainer/" in line for line in stack):
                yield f"  controller (pid {os.getpid()}): {self._status.where()}"
                yield from (f"    {line}" for line in stack)

    def _workers(self) -> Iterator[str]:
        workers = [worker for worker_group in self._worker_groups for worker in list(worker_group.workers)]
        calls = {worker.doing(): worker for worker in workers}
        answered, _ = ray.wait(list(calls), num_returns=len(calls), timeout=ANSWER_S) if calls else ([], [])
        for ref, worker in calls.items():
            name = f"  {worker.name} (pid {worker.pid})"
            if ref not in answered:
                method, since = worker.asked
                words = f", {state(worker.pid)}" if worker.pid is not None and worker.is_here else ""
                last = f"; asked for {method} {time.monotonic() - since:.1f} s ago" if method else ""
                yield f"{name}: no answer within {ANSWER_S:g} s{words}{last}"
                continue
            try:
                doing: list[Doing] = ray.get(ref, timeout=ANSWER_S)
            except ray.exceptions.RayError as error:
                yield f"{name}: {type(error).__name__}"
                continue
            if not doing:
                yield f"{name}: waits for a call"
            for what, seconds, stack in doing:
                yield f"{name}: {what} for {seconds:.1f} s"
                yield from (f"    {line}" for line in stack)
