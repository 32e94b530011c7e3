"""The program that Ray runs in place of Python where workers are copies of one process, made by the fork server.

Ray starts a worker as `PYTHON SCRIPT ARGUMENT ...`. Here it starts `PYTHON fork_client.py SOCKET SCRIPT ARGUMENT
...`, which sends what a process inherits (words, environment, folder, the three standard descriptors) to the server at
SOCKET and ends once a copy has taken its place. When no server answers or it refuses, this process becomes the
Python that Ray asked for. It needs nothing but Python's own library, since it runs for every worker. Other users reach
neither end: the socket's folder is this user's alone, which both ends check.
"""

from __future__ import annotations

import array
import json
import os
import socket
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

# The first request waits for the server's imports. Ray waits longer for its worker (`ray_session.py`).
ANSWER_S = 40.0


class NotOurs(Exception):
    """An error: a folder that another user made, or can look or write into."""


def refuse_shared(folder: str | Path) -> None:
    """Raise NotOurs for a folder of another user, or one that others may look or write into; OSError where there is none."""
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise NotOurs(f"{folder} is not this user's alone (owner {found.st_uid}, mode {stat.S_IMODE(found.st_mode):o})")


def granted(address: str, words: Sequence[str]) -> bool:
    """Return whether a copy now exists which runs these words with all that this process has. Raises NotOurs; OSError without a server."""
    umask = os.umask(0)
    os.umask(umask)
    request = {
        "words": list(words),
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "umask": umask,
        "priority": os.getpriority(os.PRIO_PROCESS, 0),
        "oom_score": Path("/proc/self/oom_score_adj").read_text(),
    }
    refuse_shared(Path(address).parent)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(ANSWER_S)
        connection.connect(address)
        data = json.dumps(request).encode() + b"\n"
        sent = connection.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))])
        connection.sendall(data[sent:])
        # READY and TAKEN of fork_server.py, which this does not import: it would load a package for two words.
        if connection.recv(64) != b"ready":
            return False
        connection.sendall(b"taken")
        return True


def main(arguments: Sequence[str]) -> None:
    """Run with the words `SOCKET SCRIPT ARGUMENT ...`."""
    address, *words = arguments
    try:
        if granted(address, words):
            return
    except NotOurs as error:
        print(f"no copy of a process: {error}", file=sys.stderr, flush=True)
    except OSError:
        pass
    os.execv(sys.executable, [sys.executable, *words])


if __name__ == "__main__":
    main(sys.argv[1:])
