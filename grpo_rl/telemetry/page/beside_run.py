"""The process beside a run that writes its page: the run pays for its start only, and waits for the last page
alone. It has idle priority, a time limit, and dies with the run. Its page is stale at worst."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from grpo_rl.processes.child import start
from grpo_rl.processes.family import die_with

LIMIT_S = 300  # after which a process ends itself
SHARE = 0.05  # of the time for writing pages: one that takes 3 s begins a minute after the last
LAST_S = 20.0  # wait at the end of a run, for a page begun beside export and pictures
FAILED_S = 3.0  # wait at the end of a failed run, whose page may outlive it
LOG = "logs/page.log"
IDLE = "idle"  # in place of a state: the run goes on


class PageBeside:
    """Without a folder no page is written."""

    def __init__(self, run: Path | None = None, every: int = -1, warn: Callable[[str], None] = lambda _: None) -> None:
        self.run = run if every > 0 else None
        self.every = every
        self._warn = warn
        self._process: subprocess.Popen[bytes] | None = None
        self._began = self._took = 0.0
        self._has_failed = False
        if self.run is not None:
            # Chunks of this run's earlier pages are kept, but what lies there already may come from
            # elsewhere.
            with contextlib.suppress(OSError):
                (self.run / "page_files/index.js").unlink()

    def step(self, step: int) -> None:
        """Begin a page if one is due and none is under way. Takes milliseconds."""
        if self.run is None or step == 0 or step % self.every:
            return
        if self._is_writing() or time.monotonic() - self._began < self._took / SHARE:
            return
        self._start(self.run, IDLE, str(os.getpid()))

    def last(self, state: str = "", *, outlives: bool = False) -> None:
        """Begin the last page, with this state or that of status.json."""
        if self.run is None:
            return
        if self._is_writing() and self._process is not None:
            self._process.kill()  # a page file is replaced as a whole or not at all
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
            self._process = None
        self._start(self.run, state, "" if outlives else str(os.getpid()))

    def wait(self, seconds: float) -> None:
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
            self._is_writing()

    def _start(self, run: Path, state: str, parent: str) -> None:
        environment = {key: value for key, value in os.environ.items() if parent or key != "GRPO_SESSION"}
        try:
            with (run / LOG).open("wb") as log:
                self._process = start(__name__, [str(run), state, parent], log, environment=environment)
        except OSError as error:
            self._failed(str(error.strerror or error))
        self._began = time.monotonic()

    def _is_writing(self) -> bool:
        """Return whether a process is at work, and report one that failed."""
        if self._process is None or self.run is None:
            return False
        code = self._process.poll()
        if code is None:
            return True
        self._took = time.monotonic() - self._began
        self._process, log = None, self.run / LOG
        with contextlib.suppress(OSError):
            if code == 0:
                log.unlink()
            else:
                words = log.read_text(errors="replace").strip().splitlines()
                self._failed(words[-1][:300] if words else f"its process ended with {code}")
        return False

    def _failed(self, why: str) -> None:
        if not self._has_failed:
            self._warn(f"the page could not be written: {why}; training goes on, and `python -m grpo_rl page` writes it later")
        self._has_failed = True


def main(arguments: Sequence[str]) -> int:
    """Arguments: the run's folder, the state to show, and the process to die with, which may be empty."""
    run, state, parent = arguments
    signal.alarm(LIMIT_S)
    if state == IDLE:
        os.nice(19)
        with contextlib.suppress(OSError, AttributeError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    if parent:
        die_with(int(parent))
    # Only now: what is imported is most of the work.
    from grpo_rl.errors import GrpoRlError
    from grpo_rl.telemetry.page.page_file import write_page

    try:
        write_page([Path(run)], state=None if state in ("", IDLE) else state, keep=True, trusted=True)
    except GrpoRlError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
