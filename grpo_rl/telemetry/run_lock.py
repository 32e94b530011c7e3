"""The lock of a run's folder: one process at a time runs under one name, on one machine or several."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import tempfile
import threading
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from grpo_rl.errors import ConfigError
from grpo_rl.run_files import parsed

LOCK_FILE = ".lock"
SIGN_OF_LIFE_S = 10.0
DEAD_S = 60.0
"""Seconds of silence after which a process on another machine is taken for dead, where there are no locks."""
_STARTED = f"{datetime.now():%Y-%m-%d %H:%M:%S}"


class RunLock:
    """Keeps other processes out of a run's folder until `release`, or until this process ends, however it ends.

    The kernel's lock on the file `.lock` decides, on one machine and on network file systems that have locks. The file
    says whose it is. On a file system without locks the text decides: its process, where it is of this machine, and else
    its latest sign of life, which a thread gives every few seconds by touching the file.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._released = threading.Event()
        self._touching = threading.Lock()

    @classmethod
    def take(cls, folder: Path, *, claim: bool = True) -> RunLock:
        """Return the lock of this folder; without `claim`, one that only shows that the folder is free.

        Raises ConfigError with the owner where another process has it.
        """
        descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise _taken(folder, descriptor) from None
            except OSError:  # this file system has none
                if _is_alive(descriptor):
                    raise _taken(folder, descriptor) from None
        except BaseException:
            os.close(descriptor)
            raise
        lock = cls(descriptor)
        if claim:
            os.truncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(_myself()).encode(), 0)
            threading.Thread(target=lock._live, name="sign of life", daemon=True).start()
        return lock

    def release(self) -> None:
        """Let other processes have the folder."""
        with self._touching:
            if self._released.is_set():
                return
            self._released.set()
            with suppress(OSError):
                if _owner(self._descriptor) == _myself():
                    os.truncate(self._descriptor, 0)
            os.close(self._descriptor)

    def _live(self) -> None:
        while not self._released.wait(SIGN_OF_LIFE_S):
            # A descriptor that is closed may be another file's by now.
            with self._touching, suppress(OSError):
                if not self._released.is_set():
                    os.utime(self._descriptor)


def _myself() -> dict[str, Any]:
    return {"pid": os.getpid(), "host": socket.gethostname(), "since": _STARTED}


def _owner(descriptor: int) -> dict[str, Any]:
    """Return what the lock's file says of its owner; empty where it says nothing that can be read."""
    try:
        found = parsed(os.pread(descriptor, 1000, 0).decode("utf-8", errors="replace"))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _is_alive(descriptor: int) -> bool:
    """Return whether the owner in the text is still running, as far as can be seen without the kernel's lock."""
    owner = _owner(descriptor)
    if owner.get("host") == socket.gethostname():
        return owner.get("pid") != os.getpid() and Path(f"/proc/{owner.get('pid')}").exists()
    return bool(owner) and _silent_s(descriptor) < DEAD_S


def _silent_s(descriptor: int) -> float:
    """Return the seconds since the owner's latest sign of life, by the clock of the file system."""
    # Beside the run's folder: the run inside must not meet a file that comes and goes.
    folder = Path(os.readlink(f"/proc/self/fd/{descriptor}")).parent.parent
    with tempfile.TemporaryFile(dir=folder) as now:
        return max(0.0, os.fstat(now.fileno()).st_mtime - os.fstat(descriptor).st_mtime)


def _taken(folder: Path, descriptor: int) -> ConfigError:
    owner = _owner(descriptor)
    process = (
        f"pid {owner.get('pid', 'unknown')} on {owner.get('host', 'an unknown host')}, since {owner.get('since', 'unknown')}"
    )
    silent = ""
    with suppress(OSError):
        silent = f", last sign of life {_silent_s(descriptor):.0f} s ago"
    return ConfigError(
        f"trainer.experiment_name={folder.name}: another process ({process}{silent}) is running in {folder}; "
        "wait for it, stop it, or choose another name"
    )
