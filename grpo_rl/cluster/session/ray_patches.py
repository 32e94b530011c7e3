"""All parts of Ray that are replaced here, because Ray has no setting for them. Tried with Ray 2.60.0, and refused with any other.

| Replaced | Why |
|---|---|
| `ray._private.services.ConsolePopen` | Ray's processes are in the controller's process group: a SIGTERM or SIGHUP to the group ended Ray's head, and with it the run that was about to save its state |
| `ray._private.ray_constants.ENABLE_RAY_CLUSTER` | Ray replaces 127.0.0.1 by the machine's address on the network, where others reach it |
| `ray._private.worker.print_to_stdstream` | a raylet reports each worker that was ended on purpose as a victim of the OOM killer, on the screen |
| `_Exit` in the table of functions of `_raylet.so` | Ray ends a process that hands an object to a raylet that has gone, with code 1 and without a word |
| the answer to SIGTERM that `ray.init` sets | it aborts the process, where a run saves its state |

Tests look at what is started: sessions, blocked signals, listening sockets, and what is printed (`tests/integration/test_ray_access.py`,
`tests/faults/test_cluster_lost.py`).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import signal
import struct
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from grpo_rl.errors import ClusterError
from grpo_rl.processes.family import shielded

TRIED = "2.60.0"
RAYLET_GONE = "the Ray cluster is lost: its raylet on the controller's machine has ended"
SIGACTION_BYTES = 512
"""More than a struct sigaction has on any system."""
_WRITABLE = 3
"""PROT_READ | PROT_WRITE of mprotect(2)."""


def check_version() -> None:
    """Raise ClusterError for another version of Ray than the one that these replacements were tried with."""
    found = version("ray")
    if found != TRIED:
        raise ClusterError(
            f"Ray {found} is installed, and this program replaces parts of Ray that have no setting, as they are in Ray {TRIED} "
            f"(grpo_rl/cluster/session/ray_patches.py lists them): install ray=={TRIED}"
        )


@contextmanager
def started_apart() -> Iterator[None]:
    """Make `ray.init` start its processes in sessions of their own, shielded from signals, and listening on loopback only."""
    from ray._private import services

    popen = services.ConsolePopen

    class Apart(popen):  # type: ignore[misc, valid-type]
        """A process of Ray's, which nothing but SIGKILL ends."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            if options.get("stdin") is None:
                options["stdin"] = subprocess.DEVNULL  # not the controller's terminal
            with shielded():
                super().__init__(*arguments, **options | {"start_new_session": True})

        def terminate(self) -> None:
            # Ray waits for a second after SIGTERM, which is blocked, before it kills. Workers have ended by then.
            self.kill()

    with _replaced(services, "ConsolePopen", Apart), on_loopback():
        yield


@contextmanager
def on_loopback() -> Iterator[None]:
    """Make Ray take 127.0.0.1 as this node's address, to listen there and to find what listens there.

    The constant is meant for other systems than Linux.
    """
    from ray._private import ray_constants

    with _replaced(ray_constants, "ENABLE_RAY_CLUSTER", False):
        yield


@contextmanager
def errors_logged(log: Path) -> Iterator[None]:
    """Redirect what Ray's own processes report to `log`. What matters of it is in the errors that calls to workers raise."""
    from ray._private import worker

    def write(data: Any, ignore_prefix: bool) -> None:
        with log.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(f"({data.get('pid')}) {line}\n" for line in data["lines"])

    with _replaced(worker, "print_to_stdstream", write):
        yield


@contextmanager
def own_answer_to_sigterm() -> Iterator[None]:
    """Restore the present answer to SIGTERM after the block. By sigaction: Python's `signal` works in a main thread only."""
    libc, answer = ctypes.CDLL(None), ctypes.create_string_buffer(SIGACTION_BYTES)
    libc.sigaction(signal.SIGTERM, None, answer)
    try:
        yield
    finally:
        libc.sigaction(signal.SIGTERM, answer, None)


@contextmanager
def called_at_exit_of_ray(on_lost: Callable[[str], None]) -> Iterator[None]:
    """Call `on_lost`, with the cause, where Ray's C++ part would end this process; it is to end the process itself.

    Ray calls the C library's `_Exit` in whichever thread finds the connection to the raylet broken (`QuickExit` in its sources).
    Its library holds the function's address in a table of its own, where the address of ours stands meanwhile; Python itself
    and other libraries have tables of theirs.
    """
    libc = ctypes.CDLL(None)

    @ctypes.CFUNCTYPE(None, ctypes.c_int)
    def last_words(code: int) -> None:
        try:
            on_lost(RAYLET_GONE)
        finally:
            os._exit(code)

    theirs, ours = (struct.pack("P", ctypes.cast(call, ctypes.c_void_p).value) for call in (libc._Exit, last_words))
    places = list(_places_of(theirs, "_raylet.so"))
    for place in places:
        libc.mprotect(ctypes.c_void_p(place & -mmap.PAGESIZE), mmap.PAGESIZE, _WRITABLE)
        ctypes.memmove(place, ours, len(ours))
    try:
        yield
    finally:
        for place in places:
            ctypes.memmove(place, theirs, len(theirs))


def _places_of(address: bytes, library: str) -> Iterator[int]:
    """Yield where the data of a loaded library hold this address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, mode, *_ = line.split()
        if line.endswith(library) and mode.startswith("r") and "x" not in mode:
            begin, end = (int(bound, 16) for bound in span.split("-"))
            data = ctypes.string_at(begin, end - begin)
            yield from (begin + found.start() for found in re.finditer(re.escape(address), data))


@contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)
