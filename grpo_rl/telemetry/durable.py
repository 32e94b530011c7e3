"""Local files of metrics on a disk that fails: a step never does, and nothing is lost once there is room again."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from grpo_rl.telemetry.metrics_file import MetricsFile

MOST_KEPT = 10_000


class DurableMetrics:
    """metrics.jsonl, behind a memory of the steps that could not be written yet. Told once, and again when it works."""

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
        """Have every line that could be written survive a power cut. Raises OSError where the disk refuses that."""
        self._open().flush()

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


class Optional:
    """A sink whose failure switches it off, told once: the metrics are in metrics.jsonl too."""

    def __init__(self, name: str, sink: Any, warn: Callable[[str], None]) -> None:
        self.name = name
        self._sink = sink
        self._warn = warn
        self._has_failed = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._guard(self._sink.log, step, metrics)

    def truncate_after(self, step: int) -> None:
        self._guard(self._sink.truncate_after, step)

    def close(self) -> None:
        self._guard(self._sink.close)

    def _guard(self, action: Callable[..., None], *args: Any) -> None:
        if self._has_failed:
            return
        try:
            action(*args)
        except Exception as error:  # whatever a library of its own raises must not reach the training
            self._has_failed = True
            self._warn(f"{self.name} failed and is switched off: {type(error).__name__}: {error}; metrics.jsonl has everything")
