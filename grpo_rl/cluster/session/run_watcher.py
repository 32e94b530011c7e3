"""Ends what a run leaves behind: run beside it, as a process of its own that needs nothing but Python.

Every process that a run starts inherits the environment variable GRPO_SESSION with the run's own random token, so
that they are found among all others, whatever session or parent they have. When the controller ends, in
whichever way, its end of a pipe closes: then all processes with the token are killed, and the temporary folder goes.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

TOKEN = "GRPO_SESSION"
MARKER = "grpo_session"
"""The file in a temporary folder with the token of its run: no other folder is ever removed."""
CLEAN_S = 10.0
TRACKER_S = 2.0


def processes(token: str) -> Iterator[int]:
    """Yield the ids of all processes of the session with this token, zombies left out."""
    wanted = f"{TOKEN}={token}".encode()
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):  # ended, or another user's
                if wanted in Path(entry.path, "environ").read_bytes().split(b"\0"):
                    yield int(entry.name)


def clean(token: str, folder: Path, but_not: int | None = None) -> list[int]:
    """End the processes of a session and remove its folder; return the ids of those that were still there.

    Python's own trackers of shared memory get some time to remove it, now that nothing uses it; then they end too.
    """
    ended: list[int] = []
    began = time.monotonic()
    while time.monotonic() < began + CLEAN_S:
        left = [pid for pid in processes(token) if pid != but_not]
        trackers = [pid for pid in left if is_tracker(pid)]
        victims = [pid for pid in left if pid not in trackers]
        if time.monotonic() > began + TRACKER_S:
            victims = left
        for pid in victims:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                ended.append(pid)
        if not left:
            break
        time.sleep(0.05)
    with contextlib.suppress(OSError):
        if (folder / MARKER).read_text() == token:
            remove_segments(folder)
            shutil.rmtree(folder, ignore_errors=True)
    return sorted(set(ended))


def remove_segments(folder: Path) -> None:
    """Remove shared memory of vLLM's processes that no tracker removes: it has the name of a file of theirs in this folder."""
    for file in folder.glob("**/vllm_dist_*"):
        for segment in Path("/dev/shm").glob(f"{file.name}-*"):
            with contextlib.suppress(OSError):
                segment.unlink()


def is_tracker(pid: int) -> bool:
    """Return whether this is one of Python's trackers, which remove the shared memory of a process that was killed."""
    try:
        return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def main(arguments: list[str]) -> None:
    """Run with `TOKEN FOLDER PID`: wait until standard input's pipe closes or process PID is gone, then clean."""
    token, folder, controller = arguments[0], Path(arguments[1]), int(arguments[2])
    while os.getppid() == controller:
        readable, _, _ = select.select([0], [], [], 1.0)
        if readable and not os.read(0, 1):
            break
    clean(token, folder, but_not=controller if os.getppid() == controller else None)


if __name__ == "__main__":
    main(sys.argv[1:])
