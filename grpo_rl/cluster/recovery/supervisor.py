"""What all recoveries share: the monitor that notices workers which died or froze, the budget of restarts, the log of events."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import ray

from grpo_rl.cluster.processes.worker_group import Worker
from grpo_rl.config.schema.tree import TrainerConfig
from grpo_rl.errors import ClusterError
from grpo_rl.telemetry.metrics.timeline import Timeline
from grpo_rl.types import Metrics

MISSED_BEATS = 3
"""A worker without a sign of life for so many heartbeats is frozen."""
SLOWER_THAN_EVER = 10.0
"""A worker that is busy with one thing so many times longer than it ever was, and longer than the missed beats, hangs."""
_LOOK_S = 0.2


class Recoveries:
    """The failures of a run's workers: a budget for them, one loud line for each, and their numbers for the next step's metrics.

    The budget is `trainer.max_restarts` of one worker or role within `trainer.restart_window_s`.
    """

    def __init__(
        self,
        trainer: TrainerConfig,
        warn: Callable[[str], None],
        on_restart: Callable[[str, int | None], None] = lambda worker, pid: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.restarts = trainer.recover != "off"
        """True where a worker that failed is started again."""
        self.on_restart = on_restart
        """Called with the name of every worker that has a new process, and the process's id."""
        self.warn = warn
        self.timeline = Timeline()
        """The record of engines that came and went; the run sets its own."""
        self._max_restarts, self._window_s = trainer.max_restarts, trainer.restart_window_s
        self._clock = clock
        self._spent: list[tuple[float, str, str]] = []
        self._since: Metrics = {}
        self._total = 0
        self._lock = threading.Lock()

    def failed(self, name: str, cause: str, then: str) -> None:
        """Allow one more restart of `name`, and report why and what (`then`) is done. Raises ClusterError when there were too many."""
        with self._lock:
            now = self._clock()
            self._spent = [entry for entry in self._spent if now - entry[0] <= self._window_s]
            self._spent.append((now, name, cause))
            restarts = sum(1 for _, other, _ in self._spent if other == name) - 1
            if restarts >= self._max_restarts:
                raise ClusterError(self._message(name, restarts, now))
        self.warn(f"recovery: {name} failed: {_first_line(cause)}; {then}")

    def recovered(self, name: str, kind: str, seconds: float, how: str) -> None:
        """Report that it works again, `seconds` after the failure was noticed."""
        self.warn(f"recovery: {name} is back after {seconds:.1f} s: {how}")
        if kind == "rollout":
            self.timeline.ended("engines", f"{name} is replaced", seconds)
        with self._lock:
            self._total += 1
            self._add(f"recovery/{kind}_restarts", 1.0)
            self._add("recovery/seconds", seconds)

    def joined(self, name: str, kind: str, seconds: float, how: str) -> None:
        """Report that another engine serves, `seconds` after it was asked for."""
        self.warn(f"engines: {name} joined after {seconds:.1f} s: {how}")
        self.timeline.ended("engines", f"{name} joins", seconds)
        self.count("engines_joined", 1.0)

    def left(self, name: str, seconds: float, how: str) -> None:
        """Report that an engine has left, which took so long."""
        self.warn(f"engines: {name} has left: {how}")
        self.timeline.ended("engines", f"{name} leaves", seconds)
        self.count("engines_left", 1.0)

    def count(self, name: str, number: float) -> None:
        """Add to the number of this name until the next `metrics`."""
        with self._lock:
            self._add(f"recovery/{name}", number)

    def metrics(self) -> Metrics:
        """Return the counts noted since the last call; nothing where nothing happened."""
        with self._lock:
            since, self._since = self._since, {}
            return since | {"recovery/restarts_total": float(self._total)} if since else {}

    def _add(self, key: str, number: float) -> None:
        self._since[key] = self._since.get(key, 0.0) + number

    def _message(self, name: str, restarts: int, now: float) -> str:
        allowed = f"trainer.max_restarts={self._max_restarts} within trainer.restart_window_s={self._window_s:.0f}"
        head = f"{name} failed and is not started again: restarts so far: {restarts} ({allowed}). Every failure in that time:"
        causes = [f"  {now - when:.0f} s ago, {failed}: {cause}" for when, failed, cause in self._spent]
        return "\n".join([head, *causes])


def verdict(
    silent_s: float, activity: tuple[str, float, float | None] | None, heartbeat_s: float, first_s: float
) -> str | None:
    """Return why a worker is given up, from its last sign of life and what it reported with that; None: it is well.

    `first_s` is how long something may take of which no longest time is reported: it was never done before, or can compile.
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


class Monitor:
    """Ends workers that are frozen, and reports every end, whatever caused it.

    Every worker answers a call (`beat`) a heartbeat after it was made, in a thread of its own, and is called again at once.

    A process that is stopped or whose interpreter is held cannot answer; one whose engine loops answers, and reports for
    how long it has been in one step. A process that dies fails the answer that is on its way, so that is
    noticed at once.
    """

    def __init__(self, heartbeat_s: float, first_s: float) -> None:
        self.heartbeat_s = heartbeat_s
        self.first_s = first_s
        self.before_kill: Callable[[str], None] = lambda why: None
        """Called in the monitor's thread with the reason before a worker is given up."""
        self._watched: dict[Worker, _Watched] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeats", daemon=True)
        self._thread.start()

    def watch(self, worker: Worker, on_end: Callable[[Worker, str], None] = lambda worker, cause: None) -> None:
        """Watch this worker from now on; `on_end` is called in the monitor's thread, and has to be quick."""
        with self._lock:
            self._watched[worker] = _Watched(worker, on_end, worker.beat(0.0))

    def forget(self, worker: Worker) -> None:
        with self._lock:
            self._watched.pop(worker, None)

    def close(self) -> None:
        """Stop listening, before workers are ended in good order."""
        self._stop.set()
        self._thread.join(10.0)

    def _run(self) -> None:
        looked = time.monotonic()
        while not self._stop.is_set():
            with self._lock:
                watched = list(self._watched.values())
            if not watched:
                self._stop.wait(_LOOK_S)
                looked = time.monotonic()
                continue
            by_ref = {entry.ref: entry for entry in watched}
            refs = list(by_ref)
            ray.wait(refs, num_returns=1, timeout=_LOOK_S)
            done, silent = ray.wait(refs, num_returns=len(refs), timeout=0)
            # When the controller itself stood still (Ctrl-Z, a busy machine), no worker is late.
            late_s = time.monotonic() - looked
            looked += late_s
            if late_s > self.heartbeat_s:
                for entry in watched:
                    entry.last += late_s
            for ref in done:
                self._answered(by_ref[ref])
            for ref in silent:
                self._judge(by_ref[ref], None)

    def _answered(self, entry: _Watched) -> None:
        try:
            activity = ray.get(entry.ref, timeout=10.0)
        except ray.exceptions.RayActorError as error:
            first_line = next(iter(str(error).strip().splitlines()), type(error).__name__)
            self._ended(entry, entry.worker.verdict or f"the process died ({first_line})")
            return
        except ray.exceptions.RayError:
            activity = None  # a worker that is not built yet, or whose report failed: its process lives
        entry.last = time.monotonic()
        self._judge(entry, activity)
        entry.ref = entry.worker.beat(self.heartbeat_s)

    def _judge(self, entry: _Watched, activity: tuple[str, float, float | None] | None) -> None:
        if entry.worker.excused:
            entry.last = time.monotonic()
        cause = verdict(time.monotonic() - entry.last, activity, self.heartbeat_s, self.first_s)
        if cause is not None:
            self.before_kill(f"{entry.worker.name} is given up: {cause}")
            entry.worker.kill(cause)
            self._ended(entry, cause)

    def _ended(self, entry: _Watched, cause: str) -> None:
        with self._lock:
            known = self._watched.pop(entry.worker, None)
        if known is not None:
            entry.on_end(entry.worker, cause)


class Supervisor:
    """Watches over the processes of one cluster."""

    def __init__(self, trainer: TrainerConfig, recoveries: Recoveries) -> None:
        self.recoveries = recoveries
        self.closed = False
        """True once the cluster is being ended: nothing is started again."""
        self.start_timeout_s = trainer.start_timeout_s
        self.monitor = Monitor(trainer.heartbeat_s, trainer.start_timeout_s)

    def close(self) -> None:
        """Stop watching and starting again, before workers are ended in good order."""
        self.closed = True
        self.monitor.close()


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else "no reason given"
