"""A reward process as its parent sees it: started, asked, and killed at its deadline with all that it started itself."""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_rl.config.hiding import HiddenLines
from grpo_rl.config.schema import RewardConfig
from grpo_rl.config.secrets import redact
from grpo_rl.rewards.wire import LENGTH, LONGEST_ANSWER, decode, encode

START_TIMEOUT_S = 120.0
"""Longest start of a process: it imports the user's files."""
LOG_LIMIT = 4 * 2**20
"""Bytes of what a process prints that are kept."""
LAST_LINES = 500
"""Characters of its log that an error quotes."""
PIECE = 2**16
KILL_S = 5.0
"""A killed process is gone within this time, or is left to the system."""
LAST_MOMENT_S = 0.2
"""A process that has closed its channel is about to end, which takes no longer."""
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


@dataclass(slots=True)
class Reply:
    """What came back for a request."""

    answers: list[Any] = field(default_factory=list)
    ended: str | None = None
    """Why no further answer came: the process had died or was killed, and this is what happened; None where all is well."""
    timed_out: bool = False


def setup_of(config: RewardConfig, data_sources: list[str]) -> dict[str, Any]:
    """What a process is told at its start: names, paths and options."""
    custom = config.custom_reward_function
    limit = config.memory_limit_gb
    return {
        "reward": {
            "functions": config.functions,
            "custom_reward_function": {"path": custom.path, "name": custom.name, "reward_kwargs": custom.reward_kwargs},
            "batched": config.batched,
            "function_kwargs": config.function_kwargs,
        },
        "data_sources": data_sources,
        "memory_limit": None if limit is None else int(limit * 2**30),
    }


class OutputLog:
    """What the processes in one place print, up to `LOG_LIMIT` bytes, in a file; without one it is only remembered for errors.

    Secrets are hidden in both.
    """

    def __init__(self, path: Path | None) -> None:
        self._file = None if path is None else path.open("ab")
        self._room = LOG_LIMIT
        self._lines = HiddenLines()
        self._last = b""

    def write(self, data: bytes) -> None:
        """Keep the data as far as there is room; the rest is dropped, which is noted once."""
        self._last = (self._last + data)[-4 * LAST_LINES :]
        if self._file is None or self._room <= 0:
            return
        self._file.write(self._lines.feed(data[: self._room]))
        self._room -= len(data)
        if self._room <= 0:
            self._file.write(self._lines.rest() + b"\n[all further output is dropped]\n")
        self._file.flush()

    @property
    def last(self) -> str:
        """The last `LAST_LINES` characters."""
        return redact(self._last.decode(errors="replace"))[-LAST_LINES:].strip()

    def close(self) -> None:
        if self._file is not None:
            self._file.write(self._lines.rest())
            self._file.close()


class Worker:
    """One process in a session of its own. It dies with the thread that started it: start and call it in the same one."""

    def __init__(self, setup: dict[str, Any], log: OutputLog, stopping: Callable[[], bool] = lambda: False) -> None:
        """Start the process; `start_up` waits for it. A `stopping` that becomes true ends every wait."""
        self._log, self._stopping = log, stopping
        self._channel, theirs = socket.socketpair()
        self._buffer = bytearray()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-X", "faulthandler", "-m", "grpo_rl.rewards.pool_worker", str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=_environment(),
            )  # fmt: skip
        assert self._process.stdout is not None
        self._output = self._process.stdout
        self._channel.setblocking(False)
        os.set_blocking(self._output.fileno(), False)
        self.pid = self._process.pid
        self._setup = encode(setup)
        self.num_asked = 0
        """Requests, the start among them."""
        self.died_by_itself = False
        """In the last request: neither killed nor asked to end."""

    def start_up(self) -> str | None:
        """Wait until the process can be asked: None, or why it cannot be."""
        reply = self.ask(self._setup, 1, START_TIMEOUT_S)
        answer = reply.answers[0] if reply.answers else None
        if reply.timed_out:
            reason = f"it did not start within {START_TIMEOUT_S:g} s"
        elif reply.ended is not None:
            reason = reply.ended
        elif isinstance(answer, dict) and "ready" in answer:
            return None
        else:
            reason = str(answer.get("failed", answer)) if isinstance(answer, dict) else str(answer)
        self.kill()
        said = self._log.last
        return f"{reason}; its last output: {said}" if said else reason

    def ask(self, request: bytes, num_answers: int, timeout_s: float) -> Reply:
        """Send the request and collect its answers, fewer where one says `failure`. At the deadline the process is killed."""
        reply = Reply()
        self.num_asked += 1
        try:
            self._exchange(memoryview(request), num_answers, time.monotonic() + timeout_s, reply)
        except TimeoutError:
            reply.timed_out, reply.ended = True, f"killed after {timeout_s:g} s"
        except (OSError, ValueError) as error:
            reply.ended = self._obituary(error)
            self.died_by_itself = not self._stopping()
        if reply.ended is not None:
            self.kill()
        return reply

    def kill(self) -> None:
        """End the process and everything it started; of those whose own parents ended first, all that it adopted."""
        if self._process.returncode is None:
            _kill_tree(self.pid)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(KILL_S)
        self._channel.close()
        self._output.close()

    @property
    def alive(self) -> bool:
        return self._exit_code() is None

    def _exit_code(self) -> int | None:
        """As Popen's, without reaping: as long as its pid is taken, its group can be named to be killed."""
        if self._process.returncode is not None:
            return self._process.returncode
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def _exchange(self, rest: memoryview, num_answers: int, deadline: float, reply: Reply) -> None:
        """Raises TimeoutError at the deadline, OSError when the process has gone, ValueError when it writes something else."""
        poller = select.poll()
        poller.register(self._channel, select.POLLIN | (select.POLLOUT if rest else 0))
        poller.register(self._output, select.POLLIN)
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            if self._stopping():
                raise ConnectionAbortedError("the run is ending")
            # In pieces, so that the end of the run is seen.
            for descriptor, event in poller.poll(math.ceil(1000 * min(left, 0.5))):
                if descriptor == self._output.fileno():
                    if not self._read_output():
                        poller.unregister(descriptor)
                    continue
                if event & select.POLLOUT:
                    rest = rest[self._channel.send(rest[: 2**20]) :]
                    if not rest:
                        poller.modify(descriptor, select.POLLIN)
                if event & ~select.POLLOUT and self._read_answers(num_answers, reply):
                    return

    def _read_answers(self, num_answers: int, reply: Reply) -> bool:
        """Take what has arrived; whether the last answer is among it."""
        data = self._channel.recv(2**20)
        if not data:
            raise ConnectionResetError("it closed its channel")
        self._buffer += data
        while len(self._buffer) >= LENGTH.size:
            size = LENGTH.unpack(self._buffer[: LENGTH.size])[0]
            if size > LONGEST_ANSWER:
                raise ValueError(f"an answer of {size} bytes; at most {LONGEST_ANSWER} are read")
            if len(self._buffer) < LENGTH.size + size:
                return False
            body = self._buffer[LENGTH.size : LENGTH.size + size]
            del self._buffer[: LENGTH.size + size]
            reply.answers.append(answer := decode(body))
            if len(reply.answers) == num_answers or (isinstance(answer, dict) and "failure" in answer):
                return True
        return False

    def _read_output(self) -> bool:
        """Move what was printed to the log; False once nothing more can come."""
        try:
            data = os.read(self._output.fileno(), PIECE)
        except BlockingIOError:
            return True
        self._log.write(data)
        return bool(data)

    def _obituary(self, error: Exception) -> str:
        """How the process ended, or what it did instead of answering."""
        if isinstance(error, ValueError):
            return str(error)
        deadline = time.monotonic() + LAST_MOMENT_S
        while (code := self._exit_code()) is None and time.monotonic() < deadline:
            time.sleep(0.002)
        with contextlib.suppress(OSError):
            while self._read_output() and select.select([self._output], [], [], 0)[0]:
                pass
        if code is None:
            return str(error)
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"the process died of {signal.Signals(-code).name}"
        return f"the process exited with code {code}"


def _environment() -> dict[str, str]:
    # The same modules as here; an order of sets that is the same in every process, as rewards may depend on it.
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return {"PYTHONHASHSEED": "0"} | os.environ | ONE_THREAD | {"PYTHONPATH": path}


def _kill_tree(pid: int) -> None:
    """Kill the process, its group, and all below it in other groups."""
    below: set[int] = set()
    # Stopped first, and looked at again until nobody is new: a process that forks is not outrun otherwise.
    while new := {pid, *_descendants(pid)} - below:
        below |= new
        for other in new:
            _signal(os.kill, other, signal.SIGSTOP)
    for other in below:
        _signal(os.kill, other, signal.SIGKILL)
    _signal(os.killpg, pid, signal.SIGKILL)


def _descendants(pid: int) -> Sequence[int]:
    found, waiting = [], [pid]
    while waiting:
        tasks = Path(f"/proc/{waiting.pop()}/task")
        with contextlib.suppress(OSError):
            for task in tasks.iterdir():
                with contextlib.suppress(OSError):
                    waiting += (children := [int(child) for child in (task / "children").read_text().split()])
                    found += children
    return found


def _signal(send: Callable[[int, int], None], target: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        send(target, number)
