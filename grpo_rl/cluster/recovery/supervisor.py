"""The parts of all recoveries: the monitor that notices failures, the budget of restarts, and the log of events."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from grpo_rl.cluster.recovery.health import Monitor
from grpo_rl.config.schema.tree import TrainerConfig
from grpo_rl.errors import ClusterError
from grpo_rl.types import Metrics


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
        self._max_restarts, self._window_s = trainer.max_restarts, trainer.restart_window_s
        self._warn, self._clock = warn, clock
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
        self._warn(f"recovery: {name} failed: {_first_line(cause)}; {then}")

    def recovered(self, name: str, kind: str, seconds: float, how: str) -> None:
        """Report that it works again, `seconds` after the failure was noticed."""
        self._warn(f"recovery: {name} is back after {seconds:.1f} s: {how}")
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

    def _message(self, name: str, restarts: int, now: float) -> str:
        allowed = f"trainer.max_restarts={self._max_restarts} within trainer.restart_window_s={self._window_s:.0f}"
        head = f"{name} failed and is not started again: restarts so far: {restarts} ({allowed}). Every failure in that time:"
        causes = [f"  {now - when:.0f} s ago, {failed}: {cause}" for when, failed, cause in self._spent]
        return "\n".join([head, *causes])


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
