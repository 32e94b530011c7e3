"""timeline.jsonl: which role was busy when, one interval per line, for the picture of a run and for benchmarks."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

from grpo_rl.run_files import append_lines, write_whole
from grpo_rl.telemetry.metrics.metrics_file import dump_line, is_number, read_records

Role = Literal["rollout", "reward", "actor", "reference", "critic", "weights", "engines", "controller", "wait", "step"]
"""The rows of a timeline. `wait`: one side does nothing because of the other, `what` names the side; `step`: a whole training
step, which marks its bounds; `engines`: one joins, leaves or is replaced."""
CLOSED_GAP_S = 0.02
"""Intervals of one role that do the same in the same step become one if the gap between them is shorter: rewards end by
the thousand."""

_logger = logging.getLogger(__name__)


class Interval(NamedTuple):
    """A stretch of time in which a role did one thing, in seconds since the run's first start."""

    step: int
    role: str
    what: str
    start: float
    end: float


class Timeline:
    """Records intervals from any thread; `write` appends them to a file. Without a path they are dropped.

    The seconds count from the first start of a run; a resumed run goes on at the end of its last kept interval, so the
    pause between the two is not in it. A file that cannot be written costs its lines and one warning, never a step.
    """

    def __init__(self, path: Path | None = None, warn: Callable[[str], None] = _logger.warning) -> None:
        self.path = path
        self.step = 0
        """The step to which intervals without a number of their own belong; the run sets it."""
        self._warn = warn
        self._origin = time.perf_counter()
        self._waiting: list[Interval] = []
        self._newest: dict[tuple[int, str, str], int] = {}
        """The place among the waiting ones of the newest interval of each step, role and activity."""
        self._lock = threading.Lock()
        self._has_failed = False

    def now(self) -> float:
        """Return the seconds since the run's first start: the scale of `record`."""
        return time.perf_counter() - self._origin

    def record(self, role: Role, what: str, start: float, end: float, step: int | None = None) -> None:
        """Keep one interval between two values of `now`; without `step` it belongs to the one that is going on."""
        if self.path is None:
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
        """Keep an interval that ends now and took so long."""
        end = self.now()
        self.record(role, what, end - seconds, end)

    @contextmanager
    def span(self, role: Role, what: str, step: int | None = None) -> Iterator[None]:
        """Record the time that the body takes, also if it raises."""
        start = self.now()
        try:
            yield
        finally:
            self.record(role, what, start, self.now(), step)

    def write(self) -> None:
        with self._lock:
            intervals, self._waiting, self._newest = self._waiting, [], {}
        if self.path is None or not intervals:
            return
        try:
            append_lines(self.path, map(_line, intervals))
        except OSError as error:
            self._failed(error)

    def truncate_after(self, step: int) -> None:
        """Drop the intervals of later steps, and go on where the last kept one ended. To be called before any is recorded."""
        if self.path is None:
            return
        intervals = [interval for interval in read_timeline(self.path) if interval.step <= step]
        self._origin = time.perf_counter() - max((interval.end for interval in intervals), default=0.0)
        try:
            write_whole(self.path, "".join(map(_line, intervals)))
        except OSError as error:
            self._failed(error)

    def _failed(self, error: OSError) -> None:
        if not self._has_failed:
            self._warn(f"{self.path} cannot be written: {error.strerror or error}; intervals are lost, training goes on")
        self._has_failed = True


def read_timeline(path: Path, last_steps: int | None = None) -> list[Interval]:
    """Return the intervals of a timeline.jsonl by their start, those of the last steps only if asked; broken lines are left out.

    An absent file is an empty list.
    """
    spans = []
    for record in read_records(path):
        start, end = record.get("start"), record.get("end")
        if is_number(start) and is_number(end) and math.isfinite(start) and math.isfinite(end):
            spans.append(Interval(record["step"], str(record.get("role")), str(record.get("what")), float(start), float(end)))
    if last_steps is not None and spans:
        first = max(interval.step for interval in spans) - last_steps
        spans = [interval for interval in spans if interval.step > first]
    return sorted(spans, key=lambda interval: interval.start)


def _line(interval: Interval) -> str:
    rounded = {"start": round(interval.start, 6), "end": round(interval.end, 6)}
    return dump_line(interval._asdict() | rounded)
