"""Signals that ask a run to stop: when it may, what it must finish first, and how long it has."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

from grpo_rl.errors import Preempted

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
INTERRUPTIBLE = frozenset({"start", "gen", "reward", "testing"})
"""Phases that nothing is lost by leaving: no rank is in the middle of something that others wait for, no weight has changed."""
SLACK = 1.5
LEAVE_AGAIN_S = 2.0
INTERRUPTED_CODE, PREEMPTED_CODE = 130, 75


class Stop:
    """A request to stop from outside, and the time left to follow it.

    The first signal starts the grace period. A step that will end in time is finished; a longer one is left where
    that is possible, by raising Preempted in the main thread. When the grace period is over the process ends,
    whatever it is doing: what was committed is safe. A second SIGINT ends it at once.
    """

    def __init__(self, grace_s: float = 30.0, on_deadline: Callable[[], None] = lambda: None) -> None:
        self.grace_s = grace_s
        self.on_deadline = on_deadline
        """Called by another thread just before the grace period ends the process."""
        self.signal: str | None = None
        self._deadline = float("inf")
        self._interruptible = True
        self._step_started: float | None = None
        self._step_s = self._save_s = float("inf")
        self._next_leave = 0.0
        self._watcher: threading.Thread | None = None
        self._previous: dict[int, object] = {}
        self._over = threading.Event()

    # ---- what a run tells ----------------------------------------------------------------------------------

    def listen(self) -> None:
        """Answer the signals from now on; again after a library has taken them for itself."""
        for number in SIGNALS:
            previous = signal.signal(number, self._on_signal)
            self._previous.setdefault(number, previous)

    def close(self) -> None:
        """Leave the signals to who had them before."""
        self._interruptible = False
        self._over.set()
        if self._watcher is not None:
            self._watcher.join(2.0)  # a signal of its own must not meet the handlers of before
        for number, previous in self._previous.items():
            signal.signal(number, previous)  # type: ignore[arg-type]
        self._previous = {}

    def phase(self, name: str) -> None:
        """A phase begins. Raises Preempted where the run is to stop here."""
        self._interruptible = name in INTERRUPTIBLE
        self._leave_if_due()

    def step_begins(self) -> None:
        """A step begins. Raises Preempted when the run is to stop: between two steps it always can."""
        if self.signal is not None:
            self._leave()
        self._step_started = time.monotonic()

    def step_ends(self, save_s: float | None = None) -> None:
        """A step has ended; how long it took tells whether the next one will fit into the grace period."""
        if self._step_started is not None:
            self._step_s = time.monotonic() - self._step_started
        if save_s is not None:
            self._save_s = save_s

    def finishing(self) -> None:
        """From here on a signal interrupts nothing: what is left to do is short, or is saving."""
        self._interruptible = False

    # ---- what a signal does ----------------------------------------------------------------------------------

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.signal is not None:
            if number == signal.SIGINT and self.signal == "SIGINT":
                _say("interrupted again: ended at once")
                os._exit(INTERRUPTED_CODE)
            self._leave_if_due()
            return
        self.signal = name
        self._deadline = time.monotonic() + self.grace_s
        # Written without the console: this may run in the middle of one of its prints.
        _say(f"{name}: stopping within {self.grace_s:g} s (trainer.grace_s)")
        self._watcher = threading.Thread(target=self._watch, name="grace", daemon=True)
        self._watcher.start()
        self._leave_if_due()

    def _leave_if_due(self) -> None:
        if self.signal is not None and self._interruptible and not self._fits() and time.monotonic() >= self._next_leave:
            self._leave()

    def _leave(self) -> None:
        # Raised in the middle of somebody's destructor it would be lost: then it comes again, until `finishing` is called.
        self._next_leave = time.monotonic() + LEAVE_AGAIN_S
        raise Preempted(f"by {self.signal}")

    def _fits(self) -> bool:
        """Whether this step, if it takes as long as the last one or a little longer, ends with time left to save."""
        if self._step_started is None:
            return False
        save_s = self._save_s if self._save_s < float("inf") else self.grace_s / 4
        end = self._step_started + SLACK * self._step_s
        return time.monotonic() < end and end + SLACK * save_s < self._deadline

    def _watch(self) -> None:
        """Leave a step that takes longer than it should have; at the deadline end the process."""
        while not self._over.wait(0.2):
            if time.monotonic() > self._deadline:
                self.on_deadline()
                os._exit(PREEMPTED_CODE)
            if self._interruptible and not self._fits():
                # Python runs handlers in the main thread, and only there an exception reaches the training loop.
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)


def _say(text: str) -> None:
    os.write(2, f"\n{text}\n".encode())
