"""The server that imports what workers need, once, and makes every worker a copy of itself: run beside a controller, as
its own process.

A worker spends most of its start on importing torch and transformers: four seconds of a processor for each. A copy (a
fork) of a process that has done that starts in less than one, and shares the memory of what was imported.

How a worker comes about: Ray's raylet starts this file in place of Python, with a socket and its own words. That client connects
to the server, sends the descriptors, environment and words that it was started with, and waits. The server forks; the copy answers
READY, and when the client answers TAKEN it takes over what was sent and runs Ray's worker script (`become`). The client needs
nothing but Python's own library, since it runs for every worker. Other users reach neither end: the socket's folder is this user's
alone, which both check. `forks.py` starts the server and says which workers are copied.

Ray's C++ part reads its variables when it is imported. They are those of a session's workers, which only Ray has, so
that `later` modules are imported when the first worker is asked for, with its variables.
"""

from __future__ import annotations

import array
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import stat
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOOK_S = 60.0
REQUEST_S = 10.0
READY, TAKEN = b"ready", b"taken"
"""A copy's message to the client, and the answer. A client that receives nothing starts a process from nothing."""
PIECE = 1 << 16


@dataclass(frozen=True)
class ForkRequest:
    """The process that Ray asked for: what it would have inherited, and what it would have run."""

    words: list[str]
    environment: dict[str, str]
    folder: str
    umask: int
    priority: int
    oom_score: str
    descriptors: Sequence[int]
    """Standard input, output and error."""

    @property
    def of_ray(self) -> dict[str, str]:
        """Ray's own variables."""
        return {name: value for name, value in self.environment.items() if name.startswith("RAY_")}


def main(order: dict[str, Any]) -> None:
    """Serve on `listener`, a descriptor, with Python's `path`, until the pipe on standard input ends; `modules` are imported now."""
    # A million objects that stay: a collection looks at all of them, and writes into pages that copies share.
    gc.disable()
    sys.path[:] = order["path"]
    listener = socket.socket(fileno=order["listener"])
    import_all(order["modules"])
    request = serve(listener, order["later"])
    if request is not None:
        listener.close()
        become(request)


def serve(listener: socket.socket, later: Sequence[str]) -> ForkRequest | None:
    """Make copies until the controller is gone. Returns a request in each copy, and None here at the end."""
    # Copies that have ended leave no zombies behind, although nothing waits for them.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listener.settimeout(REQUEST_S)
    of_ray: dict[str, str] | None = None
    while True:
        readable, _, _ = select.select([0, listener.fileno()], [], [], LOOK_S)
        if 0 in readable and not os.read(0, PIECE):
            return None
        if listener.fileno() not in readable:
            continue
        try:
            connection, _ = listener.accept()
        except OSError:
            continue  # the client has gone
        with connection:
            connection.settimeout(REQUEST_S)
            try:
                request = receive(connection)
            except (OSError, ValueError, TypeError):
                continue  # the client notices that the connection ends
            if of_ray is None:
                of_ray = request.of_ray
                os.environ.update(of_ray)
                import_all(later)
                gc.collect()
                gc.freeze()
            try:
                is_copy = request.of_ray == of_ray and may_fork() and os.fork() == 0
            except OSError:
                is_copy = False  # no room for another process now
            if is_copy:
                if is_wanted(connection):
                    return request
                os._exit(0)
            for descriptor in request.descriptors:
                os.close(descriptor)


def is_wanted(connection: socket.socket) -> bool:
    """Return, in a copy, whether its client still waits. There must never be two processes of one worker."""
    with contextlib.suppress(OSError):
        connection.settimeout(REQUEST_S)
        connection.sendall(READY)
        return connection.recv(len(TAKEN)) == TAKEN
    return False


def receive(connection: socket.socket) -> ForkRequest:
    """Return the request that a client sends, with three descriptors. Raises OSError, ValueError or TypeError."""
    descriptors = array.array("i")
    data, ancillary, _, _ = connection.recvmsg(PIECE, socket.CMSG_SPACE(3 * descriptors.itemsize))
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(content)
    while not data.endswith(b"\n"):
        connection.settimeout(REQUEST_S)
        more = connection.recv(PIECE)
        if not more:
            raise ValueError("half a request")
        data += more
    return ForkRequest(**json.loads(data), descriptors=list(descriptors))


def become(request: ForkRequest) -> None:
    """Turn this copy into the process that Ray asked for: what a process inherits becomes what the client sent."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, descriptor in enumerate(request.descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    # Ray ends a worker with its group of processes.
    os.setpgid(0, 0)
    os.chdir(request.folder)
    os.umask(request.umask)
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, request.priority)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(request.oom_score)
    os.environ.clear()
    os.environ.update(request.environment)
    if "numpy" in sys.modules:
        # Python seeds its own generator anew in a copy; numpy does not.
        sys.modules["numpy"].random.seed()
    sys.argv = list(request.words)
    runpy.run_path(sys.argv[0], run_name="__main__")


def may_fork() -> bool:
    """Return whether a copy would work: a fork has one thread only, and a GPU's driver does not survive in it."""
    if len(os.listdir("/proc/self/task")) > 1:
        return False
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith("/dev/nvidia"):
                return False
    return True


def import_all(modules: Sequence[str]) -> None:
    """Import all of these that can be; a worker that needs another imports it again, and fails with the cause."""
    for name in modules:
        with contextlib.suppress(Exception):
            importlib.import_module(name)


# ---- the client: run by Ray in place of Python ----------------------------------------------------------

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
        if connection.recv(64) != READY:
            return False
        connection.sendall(TAKEN)
        return True


def ask_for_a_copy(arguments: Sequence[str]) -> None:
    """Run in place of Python with the words `SOCKET SCRIPT ARGUMENT ...`; without a server, become the Python that Ray asked for."""
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
    if sys.argv[1].startswith("{"):
        main(json.loads(sys.argv[1]))
    else:
        ask_for_a_copy(sys.argv[1:])
