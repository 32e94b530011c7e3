"""Signals that ask a run to stop: what it leaves, what it finishes first, and how long it has."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from grpo_rl.errors import Preempted
from grpo_rl.telemetry.terminal.standard_streams import write_now

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""Those of a batch system, of Ctrl-C, of a closed terminal, and a scheduler's early warning."""
INTERRUPTIBLE = frozenset({"start", "gen", "wait_for_rollouts", "reward", "testing"})
"""Phases that can be left: no rank is in a call that others wait for, no weight has changed."""
NOT_INSIDE = ("rich.", "grpo_rl.telemetry.")
"""Modules whose functions are not left half-way: they hold the locks of printing and logging."""
SLACK = 1.5
LEAVE_AGAIN_S = 2.0
LOOK_S = 0.2
NOTICE_S = 1.0
ONE_PRESS_S = 0.5  # seconds in which signals count as one Ctrl-C, which `timeout` and srun pass on once more
INTERRUPTED_CODE, PREEMPTED_CODE = 130, 75


class Stop:
    """A request to stop from outside, and the time left to follow it.

    After the first signal a step that will end in time is finished; a longer one is left if possible, by
    raising Preempted in the main thread. After the grace period, or a second SIGINT, the process ends. The
    handler runs between any two lines of the main thread, which may hold any lock, so that another thread
    prints for it.
    """

    def __init__(
        self,
        grace_s: float = 30.0,
        on_deadline: Callable[[], None] = lambda: None,
        notice: Callable[[str], None] = lambda text: write_now(f"\n{text}\n"),
        give_back_terminal: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_deadline` is called by another thread just before the grace period ends the process, `notice` shows a line by another
        thread, `give_back_terminal` is called before the process ends, and takes no lock."""
        self.grace_s, self.notice, self.give_back_terminal = grace_s, notice, give_back_terminal
        self._at_deadline = [on_deadline]
        self.signal: str | None = None
        self._deadline = float("inf")
        self._interruptible = True
        self._step_started = self._step_s = self._save_s = float("inf")
        self._next_leave = 0.0
        self._interrupted_at = float("inf")
        self._watcher: threading.Thread | None = None
        self._previous: dict[int, object] = {}
        self._came: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._over = threading.Event()

    def listen(self) -> None:
        """Answer the signals from now on; to be called again after a library has taken them for itself."""
        if self._watcher is None:
            self._watcher = threading.Thread(target=self._watch, name="grace", daemon=True)
            self._watcher.start()
        for number in SIGNALS:
            # Under nohup SIGHUP is ignored, and the run goes on.
            if number == signal.SIGHUP and number not in self._previous and signal.getsignal(number) == signal.SIG_IGN:
                continue
            previous = signal.signal(number, self._on_signal)
            self._previous.setdefault(number, previous)

    @contextmanager
    def calling_at_deadline(self, call: Callable[[], None]) -> Iterator[None]:
        """Do `call` too, before what is called otherwise, if the grace period ends within the block."""
        self._at_deadline.insert(0, call)
        try:
            yield
        finally:
            self._at_deadline.remove(call)

    def close(self) -> None:
        """Give the signals back to the handlers that they had before."""
        self._interruptible = False
        self._over.set()
        if self._watcher is not None:
            self._came.put("")
            self._watcher.join(2.0)  # its own signal must not meet the previous handlers
        for number, previous in self._previous.items():
            signal.signal(number, previous)  # type: ignore[arg-type]
        self._previous = {}

    def phase(self, name: str) -> None:
        """Note that a phase begins. Raises Preempted if the run is to stop here."""
        self._interruptible = name in INTERRUPTIBLE
        self._leave_if_due()

    def step_begins(self) -> None:
        """Note that a step begins. Raises Preempted if the run is to stop: between two steps it always can."""
        if self.signal is not None:
            self._leave()
        self._step_started = time.monotonic()

    def step_ends(self, save_s: float | None = None) -> None:
        if self._step_started < float("inf"):
            self._step_s = time.monotonic() - self._step_started
        if save_s is not None:
            self._save_s = save_s

    def finishing(self) -> None:
        """Let signals interrupt nothing from now on."""
        self._interruptible = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        name, current_time = signal.Signals(number).name, time.monotonic()
        if number == signal.SIGINT:
            self._interrupted_at = min(self._interrupted_at, current_time)
        if self.signal is None:
            self.signal, self._deadline = name, current_time + self.grace_s
            self._came.put(name)
        elif number == signal.SIGINT and current_time > self._interrupted_at + ONE_PRESS_S:
            self.give_back_terminal()
            write_now("\ninterrupted again: ended at once\n")
            os._exit(INTERRUPTED_CODE)
        modules = (str(inner.f_globals.get("__name__", "")) for inner, _ in traceback.walk_stack(frame))
        # Otherwise `_watch` sends a signal again, a moment later.
        if not any(module.startswith(NOT_INSIDE) for module in modules):
            self._leave_if_due()

    def _leave_if_due(self) -> None:
        if self.signal is not None and self._interruptible and not self._fits() and time.monotonic() >= self._next_leave:
            self._leave()

    def _leave(self) -> None:
        # Raised in a destructor it is lost: it comes again, until `finishing` is called.
        self._next_leave = time.monotonic() + LEAVE_AGAIN_S
        raise Preempted(f"by {self.signal}")

    def _fits(self) -> bool:
        """Return whether this step, if it takes a little longer than the last one, leaves time to save."""
        save_s = self._save_s if self._save_s < float("inf") else self.grace_s / 4
        end = self._step_started + SLACK * self._step_s
        return time.monotonic() < end < self._deadline - SLACK * save_s

    def _watch(self) -> None:
        name = self._came.get()
        if not name:  # the run has ended
            return
        # A terminal that is held up (Ctrl-S) must not hold up the deadline.
        message = f"{name}: stopping within {self.grace_s:g} s (trainer.grace_s)"
        notice = threading.Thread(target=self.notice, args=(message,), name="notice", daemon=True)
        notice.start()
        while not self._over.wait(LOOK_S):
            if time.monotonic() > self._deadline:
                self.give_back_terminal()
                for call in tuple(self._at_deadline):
                    call()
                write_now("\nthe grace period is over: ended in the middle of a phase; the last commit is untouched\n")
                os._exit(PREEMPTED_CODE)
            if self._interruptible and not self._fits():
                # Python runs handlers in the main thread, and only there an exception reaches the training loop.
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        notice.join(NOTICE_S)
