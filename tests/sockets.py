"""The listening TCP sockets of this machine, and those that some processes hold."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path


def listening() -> set[tuple[str, str]]:
    """Listening TCP sockets: local address and inode."""
    found = set()
    for name in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(name).read_text().splitlines()[1:]:
                parts = line.split()
                if parts[3] == "0A":
                    found.add((parts[1], parts[9]))
    return found


def ports_of(pids: Sequence[int]) -> set[tuple[str, str]]:
    """The listening sockets that these processes hold."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for entry in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    inodes.add(os.readlink(entry.path))
    return {(address, inode) for address, inode in listening() if f"socket:[{inode}]" in inodes}
