"""A child process and its channel: started, sent messages, heard within a deadline, and killed with all below
it.

A message is a length of four bytes, then JSON: reading what a process that ran a user's code has written must
run no code.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from grpo_rl.config.secrets import HiddenLines, redact, remember_environment
from grpo_rl.processes.family import (
    KILLED_FOR_MEMORY,
    adopt_orphans,
    die_with,
    kill_tree,
    oom_kills,
    outlive_stop_signals,
    shielded,
    state,
)

START_S = 120.0  # a child imports the user's files
KILL_S = 5.0
"""After it a process that was killed is left to the system."""
LAST_MOMENT_S = 0.2
"""Within it a process that has closed its channel ends, and the last that it printed arrives."""
LONGEST_WAIT_S = 10.0**6
"""Of a reader that has nothing else to do. A socket without a timeout would let the other direction block as well."""
LONGEST_MESSAGE = 64 * 2**20
"""Bytes; a longer message from a child is refused before it is read."""
LOG_LIMIT = 4 * 2**20
"""Bytes of a child's output that are kept."""
LAST_CHARACTERS = 500
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
LENGTH = struct.Struct("!I")
STACK_S = 0.5
MOST_STACK_LINES = 30
CHILDREN: weakref.WeakSet[Child] = weakref.WeakSet()
"""The children of this process that have not been forgotten."""


def start(
    module: str,
    words: Sequence[str],
    output: int | IO[bytes] = subprocess.PIPE,
    pass_fds: Sequence[int] = (),
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a Python module in a session of its own, out of reach of the signals that are meant for the run."""
    with shielded():
        return subprocess.Popen(
            [sys.executable, "-u", "-X", "faulthandler", "-m", module, *words],
            pass_fds=pass_fds,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )


class Child:
    """One process with a channel, which `serve` runs at the other end.

    It dies with the thread that started it. `send` and `receive` may be called in two threads, and `kill` in any.
    """

    def __init__(self, module: str, setup: Any, log: OutputLog) -> None:
        """Start the process and send it its `setup`. Raises TypeError or ValueError for a setup that is no plain data."""
        body = encode(setup)
        self.log = log
        self._channel, child_socket = socket.socketpair()
        self._sender = self._channel.dup()  # with a timeout of its own
        self._buffer = bytearray()
        self._killing = threading.Lock()
        # The same modules as here; an order of sets that is the same in every process, as rewards may depend on it.
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        variables = {"PYTHONHASHSEED": "0"} | os.environ | ONE_THREAD | {"PYTHONPATH": path}
        self._stacks = tempfile.TemporaryFile()  # noqa: SIM115
        fds = child_socket.fileno(), self._stacks.fileno()
        with child_socket:
            self._process = start(module, [str(fds[0]), str(os.getpid()), str(fds[1])], pass_fds=fds, environment=variables)
        self._oom_kills = oom_kills()
        self.pid, self.name = self._process.pid, f"{module.split('.')[1].removesuffix('s')} process"
        self._last_message = time.monotonic()
        self._copying = threading.Thread(target=self._copy_output, daemon=True)
        self._copying.start()
        with contextlib.suppress(OSError):  # one that has ended already is reported by whoever waits for its start
            self.send(body, START_S)
        CHILDREN.add(self)

    def wait_until_ready(self) -> str | None:
        """Return None once the process has started, or why it has not; then it is killed."""
        try:
            answer = self.receive(START_S)
            if answer == {"ready": True}:
                return None
            reason = str(answer.get("failed", answer) if isinstance(answer, dict) else answer)
        except TimeoutError:
            reason = f"it did not start within {START_S:g} s"
        except (OSError, EOFError, ValueError) as error:
            reason = self.how_it_ended(error)
        self.kill()
        return self.with_last_output(reason)

    def send(self, body: bytes, timeout_s: float) -> None:
        """Send a message that `encode` has made. Raises OSError if the process is gone, TimeoutError if it takes nothing."""
        self._last_message = time.monotonic()
        self._sender.settimeout(timeout_s)
        self._sender.sendall(LENGTH.pack(len(body)) + body)

    def receive(self, timeout_s: float = LONGEST_WAIT_S) -> Any:
        """Return the next message; what has arrived of it is kept for the next call if the time is over
        before.

        Raises TimeoutError then, EOFError or another OSError if the process is gone, ValueError if it has
        written something else.
        """
        deadline = time.monotonic() + timeout_s
        while (size := self._size_of_message()) is None:
            self._channel.settimeout(max(0.001, deadline - time.monotonic()))
            if not (data := self._channel.recv(2**20)):
                raise EOFError("it closed its channel")
            self._buffer += data
        body = self._buffer[LENGTH.size : size]
        del self._buffer[:size]
        self._last_message = time.monotonic()
        return decode(body)

    @property
    def quiet_s(self) -> float:
        return time.monotonic() - self._last_message

    def stack(self) -> list[str]:
        """Return the Python stacks of its threads, innermost calls first; nothing if it is stopped or has not
        begun.

        `faulthandler` writes them from C when the signal comes, whatever holds the interpreter.
        """
        initial_size = os.fstat(self._stacks.fileno()).st_size
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR2)
        deadline, size = time.monotonic() + STACK_S, -1
        while time.monotonic() < deadline and size != (current_size := os.fstat(self._stacks.fileno()).st_size):
            size = current_size if current_size > initial_size else -1
            time.sleep(0.02)
        text = os.pread(self._stacks.fileno(), 2**16, initial_size).decode(errors="replace")
        return [line.strip() for line in text.splitlines() if line.strip()][:MOST_STACK_LINES]

    @property
    def has_message(self) -> bool:
        return self._size_of_message() is not None

    def kill(self) -> None:
        with self._killing:
            if self._process.returncode is None:
                kill_tree(self.pid)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(KILL_S)
            with contextlib.suppress(OSError):
                self._channel.shutdown(socket.SHUT_RDWR)
        self._copying.join(LAST_MOMENT_S)

    @property
    def alive(self) -> bool:
        return self._exit_code() is None

    def how_it_ended(self, error: Exception) -> str:
        """Return how the process has ended, or what it did instead of answering."""
        if isinstance(error, ValueError):
            return str(error)
        deadline = time.monotonic() + LAST_MOMENT_S
        while (code := self._exit_code()) is None and time.monotonic() < deadline:
            time.sleep(0.002)
        if code is None:
            return str(error)
        self._copying.join(LAST_MOMENT_S)
        if code == -signal.SIGKILL and oom_kills() > self._oom_kills:
            return KILLED_FOR_MEMORY
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"the process died of {signal.Signals(-code).name}"
        return f"the process exited with code {code}"

    def with_last_output(self, reason: str) -> str:
        return f"{reason}; its last output: {self.log.last}" if self.log.last else reason

    def _exit_code(self) -> int | None:
        """Return the exit code without reaping: as long as its pid is taken, its group can be killed."""
        with self._killing:
            if self._process.returncode is not None:
                return self._process.returncode
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def _size_of_message(self) -> int | None:
        """Return the bytes of the first message with its length, None if it has not arrived as a whole."""
        if len(self._buffer) < LENGTH.size:
            return None
        size = LENGTH.unpack(self._buffer[: LENGTH.size])[0]
        if size > LONGEST_MESSAGE:
            raise ValueError(f"an answer of {size} bytes; at most {LONGEST_MESSAGE} are read")
        return LENGTH.size + size if len(self._buffer) >= LENGTH.size + size else None

    def _copy_output(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output, contextlib.suppress(OSError):
            while data := os.read(output.fileno(), 2**16):
                self.log.write(data)


def doing() -> list[tuple[str, float, list[str]]]:
    """Return what each child of this process does, the seconds since its last message, and its stacks."""
    alive = [child for child in sorted(CHILDREN, key=lambda child: child.pid) if child.alive]
    return [(f"its {child.name} (pid {child.pid}) {state(child.pid)}, silent", child.quiet_s, child.stack()) for child in alive]


class OutputLog:
    """What children print, up to `LOG_LIMIT` bytes, in a file; errors quote the end. Secrets are hidden."""

    def __init__(self, path: Path | None = None) -> None:
        self._file = None if path is None else path.open("ab")
        self._room = LOG_LIMIT
        self._lines = HiddenLines()
        self._last = b""
        self._writing = threading.Lock()

    def write(self, data: bytes) -> None:
        with self._writing:
            self._last = (self._last + data)[-4 * LAST_CHARACTERS :]
            if self._file is None or self._file.closed or self._room <= 0:
                return
            self._file.write(self._lines.feed(data[: self._room]))
            self._room -= len(data)
            if self._room <= 0:
                self._file.write(self._lines.rest() + b"\n[all further output is dropped]\n")
            self._file.flush()

    @property
    def last(self) -> str:
        return redact(self._last.decode(errors="replace"))[-LAST_CHARACTERS:].strip()

    def close(self) -> None:
        with self._writing:
            if self._file is not None and not self._file.closed:
                self._file.write(self._lines.rest())
                self._file.close()


def encode(message: Any) -> bytes:
    try:
        return json.dumps(message, default=_plain).encode("ascii")
    except RecursionError as error:
        raise ValueError("it is nested too deep to be sent") from error


def decode(body: bytes | bytearray) -> Any:
    try:
        return json.loads(body)
    except RecursionError as error:
        raise ValueError("it is nested too deep to be read") from error


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is no plain data (numbers, text, lists and dicts are)")


# ---- in the child, without torch ----

LONGEST_CAUSE = 2000


class Parent:
    """The process that started this one. Messages are sent to it from any thread."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._sending = threading.Lock()
        self._pid = os.getpid()

    def send(self, message: Any) -> None:
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
    message. If it raises, the parent is told why, and the process ends.
    """
    descriptor, parent_pid, stacks = map(int, arguments)
    remember_environment()
    die_with(parent_pid)
    adopt_orphans()
    channel = socket.socket(fileno=descriptor)
    parent = Parent(channel)
    setup = parent.receive()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # an event loop takes three files
    if (memory := setup.get("memory_limit")) is not None:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))

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
