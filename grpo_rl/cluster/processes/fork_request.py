"""What Ray runs in place of Python where workers are copies of one process: it asks for one, `SOCKET SCRIPT ARGUMENT ...`.

When nobody answers, or says no, it becomes the Python that Ray wanted. It needs nothing but Python, since it runs for
every worker.
"""

from __future__ import annotations

import array
import json
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

# The first who asks waits for the imports. Ray waits longer for its worker (`session.py`).
ANSWER_S = 40.0


def granted(address: str, words: Sequence[str]) -> bool:
    """Whether there is a copy now that runs these words with all that this process has. Raises OSError."""
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
    """`SOCKET SCRIPT ARGUMENT ...`"""
    address, *words = arguments
    try:
        if granted(address, words):
            return
    except OSError:
        pass
    os.execv(sys.executable, [sys.executable, *words])


if __name__ == "__main__":
    main(sys.argv[1:])
