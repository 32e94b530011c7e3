"""The other end of a `Child`: what a process does at its start, before it runs code of a user's, and its loop.

It loads no torch.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

from grpo_rl.config.secrets import redact, remember_environment
from grpo_rl.processes.child import LENGTH, decode, encode
from grpo_rl.processes.family import adopt_orphans, die_with, outlive_stop_signals

LONGEST_CAUSE = 2000
"""Characters of an exception's text that are sent."""


class Parent:
    """The process that started this one: messages from it and to it, the latter from any thread."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._sending = threading.Lock()
        self._pid = os.getpid()

    def send(self, message: Any) -> None:
        """Send a message. Raises TypeError or ValueError for what is no plain data."""
        body = encode(message)
        if os.getpid() != self._pid:
            os._exit(0)  # a user's function that forked has returned in the fork
        with self._sending:
            self._channel.sendall(LENGTH.pack(len(body)) + body)

    def receive(self) -> Any:
        """Return the next message; ends this process once the parent is gone."""
        size = LENGTH.unpack(self._exactly(LENGTH.size))[0]
        return decode(self._exactly(size))

    def _exactly(self, size: int) -> bytearray:
        data = bytearray()
        while len(data) < size:
            piece = self._channel.recv(min(size - len(data), 2**20))
            if not piece:
                os._exit(0)
            data += piece
        return data


def serve(arguments: Sequence[str], begin: Callable[[Any, Parent], Callable[[Any], None]]) -> None:
    """Serve until the parent is gone; never returns.

    `begin` gets the setup, in which `memory_limit` may bound the address space in bytes, and returns what is called with each
    message. Where it raises, the parent is told why, and the process ends.
    """
    descriptor, parent_pid, stacks = map(int, arguments)
    remember_environment()
    if parent_pid:
        die_with(parent_pid)
    adopt_orphans()
    channel = socket.socket(fileno=descriptor)
    parent = Parent(channel)
    setup = parent.receive()
    _limit(setup.get("memory_limit"))

    def in_a_fork() -> None:
        channel.close()
        die_with(os.getppid())

    os.register_at_fork(after_in_child=in_a_fork)
    outlive_stop_signals()
    faulthandler.register(signal.SIGUSR2, stacks)
    try:
        handle = begin(setup, parent)
    except BaseException as error:  # a user's file may even exit: the parent needs the cause
        parent.send({"failed": redact(f"{type(error).__name__}: {error}")[:LONGEST_CAUSE]})
        os._exit(1)
    parent.send({"ready": True})
    while True:
        handle(parent.receive())


def _limit(memory: int | None) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # an event loop takes three files
    if memory is not None:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
