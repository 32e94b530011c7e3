"""The listening TCP sockets of this machine, those that some processes hold, and a free port."""

from __future__ import annotations

import contextlib
import os
import random
import socket
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


def free_port() -> int:
    """A free port from 20000 to 31999, below those that the kernel gives away by itself: one of those may be somebody's when it is used."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port
