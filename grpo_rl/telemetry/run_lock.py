"""The lock of a run's folder: one process at a time runs under one name, on one machine or several."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from grpo_rl.errors import ConfigError
from grpo_rl.run_files import parsed

LOCK_FILE = ".lock"
_STARTED = f"{datetime.now():%Y-%m-%d %H:%M:%S}"


class RunLock:
    """Keeps other processes out of a run's folder until `release`, or until this process ends, however it ends.

    The kernel's lock on the file `.lock` decides, on one machine and on network file systems that have locks. The file
    says whose it is, and decides on a file system without locks: an owner on another machine is taken to be alive there.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    @classmethod
    def take(cls, folder: Path, *, claim: bool = True) -> RunLock:
        """Return the lock of this folder; without `claim`, one that only shows that the folder is free.

        Raises ConfigError with the owner where another process has it.
        """
        descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_free = True
        except BlockingIOError:
            is_free = False
        except OSError:  # this file system has no locks
            is_free = not _is_alive(descriptor)
        if not is_free:
            owner = _owner(descriptor)
            os.close(descriptor)
            raise ConfigError(
                f"trainer.experiment_name={folder.name}: another process (pid {owner.get('pid')} on {owner.get('host')}, "
                f"since {owner.get('since')}) is running in {folder}; wait for it, stop it, or choose another name. Remove "
                f"{folder / LOCK_FILE} if that process is gone"
            )
        if claim:
            os.truncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(_myself()).encode(), 0)
        return cls(descriptor)

    def release(self) -> None:
        """Let other processes have the folder."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with suppress(OSError):
                if _owner(descriptor) == _myself():
                    os.truncate(descriptor, 0)
            os.close(descriptor)


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
    """Return whether the owner in the text may still be running, where the kernel's lock cannot say it."""
    owner = _owner(descriptor)
    if owner.get("host") == socket.gethostname():
        return owner.get("pid") != os.getpid() and Path(f"/proc/{owner.get('pid')}").exists()
    return bool(owner)
