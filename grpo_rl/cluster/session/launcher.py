"""The launcher: the process that a user started, whose only child is the run's controller (docs/design.md,
section 7).

All processes of a session inherit GRPO_SESSION with the session's token, and are found by it whatever group
or parent they have; the forked controller shows no such variable. A process that was not launched (a test, a
notebook) has `python launcher.py TOKEN FOLDER PID` beside it, which waits for its end and cleans up: this
file imports Python's library alone.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

TOKEN = "GRPO_SESSION"
MARKER = "grpo_session"  # the file with the token of its session: no folder without it is removed
RUN = "run"  # the link to the run's folder
# Ray puts its sockets below, and a socket's path has at most 107 characters.
LONGEST_BASE = 15
CLEAN_S = 10.0
TRACKER_S = 2.0
PASSED_ON = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGTSTP, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True, slots=True)
class Session:
    """What belongs to a run: processes with this token, and a folder of this user's alone, which exists once there is a run."""

    token: str
    folder: Path

    @classmethod
    def new(cls) -> Session:
        token, base = secrets.token_hex(16), tempfile.gettempdir()
        return cls(token, Path(base if len(base) <= LONGEST_BASE else "/tmp", f"grpo-{token[:8]}"))

    def clean(self, but_not: int | None = None) -> list[int]:
        """End the processes of the session and remove its folder; return the ids of those that were still
        there.

        Python's trackers of shared memory get `TRACKER_S` to remove it, now that nothing uses it.
        """
        ended: set[int] = set()
        began = time.monotonic()
        while time.monotonic() < began + CLEAN_S:
            running = [pid for pid in processes(self.token) if pid != but_not]
            patient = time.monotonic() <= began + TRACKER_S
            for pid in running:
                if not (patient and is_tracker(pid)):
                    with contextlib.suppress(OSError):
                        os.kill(pid, signal.SIGKILL)
                        ended.add(pid)
            if not running:
                break
            time.sleep(0.05)
        with contextlib.suppress(OSError):
            if (self.folder / MARKER).read_text() == self.token:
                remove_segments(self.folder)
                shutil.rmtree(self.folder, ignore_errors=True)
        return sorted(ended)


launches = False
"""True in the process of a command; other callers of `launched` are the controller themselves."""
current: Session | None = None
"""The session of this process, if it is a controller below a launcher."""


def launched(work: Callable[[], int]) -> int:
    """Do the work of a run in a child of this process, the controller; return its exit code.

    Raises ClusterError for an end that the controller did not report. A process that has loaded torch or has
    threads does not survive a fork, and does the work itself.
    """
    global current
    if not launches or "torch" in sys.modules or threading.active_count() > 1:
        return work()
    from grpo_rl.processes.family import die_with, oom_kills

    session, launcher, oom_kills_before = Session.new(), os.getpid(), oom_kills()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # What comes before the child is known waits for that.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    controller = os.fork()
    if controller == 0:
        os.setsid()  # signals of the terminal and of the job's group reach the launcher alone, which passes them on
        die_with(launcher, signal.SIGTERM)
        current = session
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        sys.exit(work())

    def pass_on(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            if number != signal.SIGTSTP:
                os.kill(controller, number)
                return
            os.kill(controller, signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)  # until SIGCONT
            os.kill(controller, signal.SIGCONT)

    # Under nohup SIGHUP is ignored, here and in the child.
    numbers = [number for number in PASSED_ON if signal.getsignal(number) != signal.SIG_IGN]
    previous = {number: signal.signal(number, pass_on) for number in numbers}
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        code = os.waitstatus_to_exitcode(os.waitpid(controller, 0)[1])
        return _explained(code, controller, session, oom_kills() - oom_kills_before)
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
        record = session.folder.joinpath(RUN).resolve() / "session.json"
        session.clean()
        record.unlink(missing_ok=True)
        for number, answer in previous.items():
            signal.signal(number, answer)


def _explained(code: int, controller: int, session: Session, num_oom_kills: int) -> int:
    """Return the exit code of a controller that ended in good order. Raises ClusterError for any other.

    `num_oom_kills` are those of this machine since the controller began.
    """
    from grpo_rl.errors import EXIT_CODES, ClusterError, Preempted
    from grpo_rl.telemetry.status import Status, read_status

    run = (session.folder / RUN).resolve() if (session.folder / RUN).exists() else None
    fields = {} if run is None else read_status(run)
    if code in EXIT_CODES:
        if run is not None and fields.get("state") == "running":  # a second Ctrl-C ends the controller at once
            stopped = Preempted("interrupted again: ended at once")
            stopped.exit_code = code
            Status(run / "status.json", fields).end(stopped)
        return code
    if code == 1:  # `_Exit` of Ray's library, in whichever thread finds the connection to the raylet broken
        error = ClusterError("the Ray cluster is lost: its raylet on the controller's machine has ended")
    elif code < 0:
        cause = signal.Signals(-code).name
        if code == -signal.SIGKILL:
            cause += " of the kernel, as memory ran out on this machine" if num_oom_kills else ", and not for lack of memory"
        error = ClusterError(f"the run's controller (process {controller}) was ended by {cause}")
        error.exit_code = 128 - code
    else:
        error = ClusterError(f"the run's controller (process {controller}) ended with exit code {code}, without a word")
    if run is not None:
        if fields.get("state") != "running":  # it was being taken down
            return int((fields.get("error") or {}).get("exit_code", 0))
        status = Status(run / "status.json", fields)
        error.where, error.advice = status.where(), status.going_on()
        status.end(error)
        error.add_note(f"log: {run / 'logs' / 'console.log'}")
    raise error


def processes(token: str) -> Iterator[int]:
    """Yield the ids of all processes of the session with this token, zombies left out."""
    token_variable = f"{TOKEN}={token}".encode()
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):  # ended, or another user's
                if token_variable in Path(entry.path, "environ").read_bytes().split(b"\0"):
                    yield int(entry.name)


def remove_segments(folder: Path) -> None:
    """Remove shared memory of vLLM's that no tracker removes: it is named after a file in this folder."""
    for file in folder.glob("**/vllm_dist_*"):
        for segment in Path("/dev/shm").glob(f"{file.name}-*"):
            with contextlib.suppress(OSError):
                segment.unlink()


def is_tracker(pid: int) -> bool:
    try:
        return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def main(arguments: list[str]) -> None:
    """Run with `TOKEN FOLDER PID`: wait until standard input's pipe closes or process PID is gone, then clean."""
    session, controller = Session(arguments[0], Path(arguments[1])), int(arguments[2])
    while os.getppid() == controller:
        readable, _, _ = select.select([0], [], [], 1.0)
        if readable and not os.read(0, 1):
            break
    session.clean(but_not=controller if os.getppid() == controller else None)


if __name__ == "__main__":
    main(sys.argv[1:])
