"""metrics.jsonl on a disk that fails: a step never fails, and nothing is lost once there is room again."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

from grpo_rl.telemetry.metrics.metrics_file import MetricsFile

MOST_KEPT = 10_000


class DurableMetrics:
    """metrics.jsonl, with the steps that could not be written yet. Warnings report the failure and its end."""

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self.path = path
        self._warn = warn
        self._file: MetricsFile | None = MetricsFile(path)
        self._waiting: deque[tuple[int, dict[str, float]]] = deque(maxlen=MOST_KEPT)
        self._is_failing = False
        self.num_dropped = 0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the metrics of `step`, after those that are still waiting."""
        self.num_dropped += len(self._waiting) == MOST_KEPT
        self._waiting.append((step, dict(metrics)))
        try:
            self._write()
        except OSError as error:
            # What the failed write left in its buffer must not come after the lines that are written again.
            self._abandon()
            if not self._is_failing:
                self._warn(
                    f"{self.path} cannot be written: {error.strerror or error}; metrics are kept in memory, training goes on"
                )
            self._is_failing = True
            return
        if self._is_failing:
            self._warn(f"{self.path} can be written again; {self.num_dropped or 'no'} steps are missing in it")
        self._is_failing = False

    def flush(self) -> None:
        """Make every line that could be written survive a power cut. Raises OSError where the disk refuses that.

        Any thread may ask for it while others write lines.
        """
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def truncate_after(self, step: int) -> None:
        """Drop the lines of later steps."""
        self._open().truncate_after(step)

    def close(self) -> None:
        """Write what is waiting, if that is possible now; say how many steps are lost."""
        try:
            self._write()
            self._open().close()
        except OSError:
            self._abandon()
        lost = self.num_dropped + len(self._waiting)
        if lost:
            self._warn(f"{self.path}: {lost} steps could not be written and are lost")

    def _write(self) -> None:
        while self._waiting:
            self._open().log(*self._waiting[0])
            self._waiting.popleft()

    def _open(self) -> MetricsFile:
        if self._file is None:
            self._file = MetricsFile(self.path)
        return self._file

    def _abandon(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
        self._file = None
