"""The end of a process and of everything that it started."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path


def kill_tree(pid: int) -> None:
    """Kill the process, its group, and all below it in other groups."""
    below: set[int] = set()
    # Stopped first, and looked at again until nobody is new: a process that forks is not outrun otherwise.
    while new := {pid, *_descendants(pid)} - below:
        below |= new
        for other in new:
            _signal(os.kill, other, signal.SIGSTOP)
    for other in below:
        _signal(os.kill, other, signal.SIGKILL)
    _signal(os.killpg, pid, signal.SIGKILL)


def _descendants(pid: int) -> Sequence[int]:
    found, waiting = [], [pid]
    while waiting:
        tasks = Path(f"/proc/{waiting.pop()}/task")
        with contextlib.suppress(OSError):
            for task in tasks.iterdir():
                with contextlib.suppress(OSError):
                    waiting += (children := [int(child) for child in (task / "children").read_text().split()])
                    found += children
    return found


def _signal(send: Callable[[int, int], None], target: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        send(target, number)
