"""The parts of all recoveries: the monitor that notices failures, the budget of restarts, and the log of events."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from grpo_rl.cluster.recovery.health import Monitor
from grpo_rl.config.schema.tree import TrainerConfig
from grpo_rl.errors import ClusterError
from grpo_rl.telemetry.terminal.console import Console
from grpo_rl.types import Metrics


class Budget:
    """A limit of `max_restarts` of one worker or worker set within `window_s`; beyond it, an error with every cause."""

    def __init__(self, max_restarts: int, window_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_restarts = max_restarts
        self.window_s = window_s
        self._clock = clock
        self._spent: list[tuple[float, str, str]] = []
        self._lock = threading.Lock()

    def spend(self, name: str, cause: str) -> None:
        """Allow one more restart of `name`. Raises ClusterError when there were too many."""
        with self._lock:
            now = self._clock()
            self._spent = [entry for entry in self._spent if now - entry[0] <= self.window_s]
            self._spent.append((now, name, cause))
            restarts = sum(1 for _, other, _ in self._spent if other == name) - 1
            if restarts >= self.max_restarts:
                raise ClusterError(self._message(name, restarts, now))

    def _message(self, name: str, restarts: int, now: float) -> str:
        allowed = f"trainer.max_restarts={self.max_restarts} within trainer.restart_window_s={self.window_s:.0f}"
        head = f"{name} failed and is not started again: restarts so far: {restarts} ({allowed}). Every failure in that time:"
        causes = [f"  {now - when:.0f} s ago, {failed}: {cause}" for when, failed, cause in self._spent]
        return "\n".join([head, *causes])


@dataclass(slots=True)
class RecoveryLog:
    """A log with one loud line for each event, and its numbers for the next step's metrics."""

    warn: Callable[[str], None]
    on_restart: Callable[[str, int | None], None] = lambda worker, pid: None
    """Called with the name of every worker that has a new process, and the process's id."""
    _since: Metrics = field(default_factory=dict)
    _total: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def failed(self, name: str, cause: str, then: str) -> None:
        """Report that a worker or worker set has failed, and what (`then`) is done about it."""
        self.warn(f"recovery: {name} failed: {_first_line(cause)}; {then}")

    def recovered(self, name: str, kind: str, seconds: float, how: str) -> None:
        """Report that it works again, `seconds` after the failure was noticed."""
        self.warn(f"recovery: {name} is back after {seconds:.1f} s: {how}")
        with self._lock:
            self._total += 1
            self._add(f"recovery/{kind}_restarts", 1.0)
            self._add("recovery/seconds", seconds)

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


class Supervisor:
    """Watches over all workers of a run."""

    def __init__(
        self,
        trainer: TrainerConfig,
        console: Console,
        on_restart: Callable[[str, int | None], None] = lambda worker, pid: None,
    ) -> None:
        self.mode = trainer.recover
        self.closed = False
        """True once the run is over: nothing is started again."""
        self.writes_checkpoints = trainer.save_freq > 0
        self.memory_bytes = trainer.recover_memory_gib * 2**30
        self.start_timeout_s = trainer.start_timeout_s
        self.budget = Budget(trainer.max_restarts, trainer.restart_window_s)
        self.log = RecoveryLog(console.warn, on_restart)
        self.monitor = Monitor(trainer.heartbeat_s, trainer.start_timeout_s)

    @property
    def restarts(self) -> bool:
        """Return whether a worker that failed is started again."""
        return self.mode != "off"

    def close(self) -> None:
        """Stop watching and starting again, before workers are ended in good order."""
        self.closed = True
        self.monitor.close()


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else "no reason given"
