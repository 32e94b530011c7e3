"""The handle on a progress bar, for the work that moves on. It loads nothing that draws: see `console.live_bars`."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from grpo_rl.telemetry.terminal.text import duration, safe_text

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class Bar:
    """A handle on one progress bar; safe to use from several threads, and after the bar has gone."""

    def __init__(
        self, progress: Progress | None = None, task: TaskID | None = None, title: str = "", total: float | None = None
    ) -> None:
        self._progress, self._task = progress, task
        self._began = time.monotonic()
        self._ends_at: float | None = None
        # A signal's exception may come out of any line of the main thread, which must not then wait for itself.
        self._lock = threading.RLock()
        self.title, self.total, self.note = title, total, ""
        self.done = 0.0

    def advance(self, k: float = 1, note: str | None = None) -> None:
        """Move on by `k`; `note` is shown beside the bar, and the last one on the closing line."""
        with self._lock:
            self.done += k
            if note is not None:
                self.note = safe_text(note, limit=120)
            self._show(advance=k, note=self.note)

    def left(self, seconds: float | None) -> None:
        """Set how long the rest of the work takes, for a bar whose own speed is no estimate of that."""
        with self._lock:
            self._ends_at = None if seconds is None else time.monotonic() + seconds
            self._show(ends_at=self._ends_at)

    def close(self) -> None:
        """Take the bar off the screen; later calls of the other methods show nothing."""
        with self._lock:
            progress, task, self._progress = self._progress, self._task, None
        if progress is not None and task is not None:
            progress.remove_task(task)

    def text(self) -> str:
        """Return where the work is, as one line of plain text."""
        count = f" {self.done:g} of {self.total:g}" if self.total is not None else ""
        left = f", about {duration(max(0.0, self._ends_at - time.monotonic()))} left" if self._ends_at is not None else ""
        note = f": {self.note}" if self.note else ""
        return f"{self.title}{count}{note}, {duration(time.monotonic() - self._began)} so far{left}"

    def _show(self, **fields: Any) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, **fields)
