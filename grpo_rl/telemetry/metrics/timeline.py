"""timeline.jsonl: which role was busy when, one interval per line."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

from grpo_rl.run_files import write_whole
from grpo_rl.telemetry.metrics.metrics_file import LineFile, Say, dump_line, is_number, read_records

Role = Literal["rollout", "reward", "actor", "reference", "critic", "weights", "engines", "controller", "wait", "step"]
"""`wait`: the side in `what` waits; `step`: a whole step; `engines`: one joins, leaves or is replaced."""
_logger = logging.getLogger(__name__)
CLOSED_GAP_S = 0.02  # such close intervals of one activity become one: rewards end by the thousand


class Interval(NamedTuple):
    """A stretch in which a role did one thing, in seconds since the run's first start."""

    step: int
    role: str
    what: str
    start: float
    end: float


class Timeline:
    """Records intervals from any thread; `write` appends them to a file. Without a path they are dropped.
    Seconds count from a run's first start, without the pauses before a resume."""

    def __init__(self, path: Path | None = None, warn: Say = _logger.warning) -> None:
        self._file = None if path is None else LineFile(path, warn)
        self.step = 0  # of intervals that are recorded without one
        self._origin = time.perf_counter()
        self._waiting: list[Interval] = []
        self._newest: dict[tuple[int, str, str], int] = {}  # index in `_waiting` by step, role, activity
        self._lock = threading.Lock()

    def now(self) -> float:
        """Return the seconds since the run's first start, for `record`."""
        return time.perf_counter() - self._origin

    def record(self, role: Role, what: str, start: float, end: float, step: int | None = None) -> None:
        if self._file is None:
            return
        interval = Interval(self.step if step is None else step, role, what, start, max(start, end))
        with self._lock:
            place = self._newest.get(interval[:3], -1)
            previous = self._waiting[place] if place >= 0 else None
            if previous is not None and previous.start <= start <= previous.end + CLOSED_GAP_S:
                self._waiting[place] = previous._replace(end=max(previous.end, interval.end))
            else:
                self._newest[interval[:3]] = len(self._waiting)
                self._waiting.append(interval)

    def ended(self, role: Role, what: str, seconds: float) -> None:
        """Record an interval that ends now."""
        end = self.now()
        self.record(role, what, end - seconds, end)

    @contextmanager
    def span(self, role: Role, what: str, step: int | None = None) -> Iterator[None]:
        start = self.now()
        try:
            yield
        finally:
            self.record(role, what, start, self.now(), step)

    def write(self) -> None:
        with self._lock:
            intervals, self._waiting, self._newest = self._waiting, [], {}
        if self._file is not None and intervals:
            self._file.append(map(_record, intervals))

    def truncate_after(self, step: int) -> None:
        """Drop later steps, and go on where the last interval ended; to be called before any is recorded."""
        if self._file is None:
            return
        intervals = [interval for interval in read_timeline(self._file.path) if interval.step <= step]
        self._origin = time.perf_counter() - max((interval.end for interval in intervals), default=0.0)
        write_whole(self._file.path, "".join(dump_line(_record(interval)) for interval in intervals))


def read_timeline(path: Path, last_steps: int | None = None) -> list[Interval]:
    """Return the intervals by their start, of the last steps only if asked; an absent file has none."""
    spans = []
    for record in read_records(path):
        start, end = record.get("start"), record.get("end")
        if is_number(start) and is_number(end) and math.isfinite(start + end):
            spans.append(Interval(record["step"], str(record.get("role")), str(record.get("what")), float(start), float(end)))
    if last_steps is not None and spans:
        first = max(interval.step for interval in spans) - last_steps
        spans = [interval for interval in spans if interval.step > first]
    return sorted(spans, key=lambda interval: interval.start)


def _record(interval: Interval) -> dict[str, Any]:
    return interval._asdict() | {"start": round(interval.start, 6), "end": round(interval.end, 6)}
