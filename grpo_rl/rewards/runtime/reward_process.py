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
from typing import Any

from grpo_rl.child_processes import kill_tree, shielded
from grpo_rl.config.schema.tree import RewardConfig
from grpo_rl.rewards.runtime.messages import LENGTH, LONGEST_ANSWER, decode, encode, frame
from grpo_rl.rewards.runtime.reward_process_log import OutputLog

START_TIMEOUT_S = 120.0
"""Longest start of a process: it imports the user's files."""
PIECE = 2**16
KILL_S = 5.0
"""Seconds within which a killed process is gone, or is left to the system."""
STALL_S = 0.05
"""Seconds after which the calls behind a slow one are taken back and go to other processes."""
LAST_MOMENT_S = 0.2
"""Seconds within which a process that has closed its channel ends."""
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


@dataclass(slots=True)
class Reply:
    """The answers to a call: complete, or cut off, or never begun."""

    answers: list[Any] = field(default_factory=list)
    complete: bool = False
    ended: str | None = None
    """The reason why no further answer came: how the process died or was killed; None where all is well."""
    timed_out: bool = False


def setup_of(config: RewardConfig, data_sources: list[str]) -> dict[str, Any]:
    """Return what a process gets at its start: names, paths and options."""
    custom = config.custom_reward_function
    limit = config.memory_limit_gb
    return {
        "reward": {
            "functions": config.functions,
            "custom_reward_function": {"path": custom.path, "name": custom.name, "reward_kwargs": custom.reward_kwargs},
            "batched": config.batched,
            "function_kwargs": config.function_kwargs,
            # Options are checked against it.
            "timeout_s": config.timeout_s,
        },
        "data_sources": data_sources,
        "memory_limit": None if limit is None else int(limit * 2**30),
    }


class Worker:
    """One process in a session of its own. It dies with the thread that started it: start and call it in the same one."""

    def __init__(self, setup: dict[str, Any], log: OutputLog, stopping: Callable[[], bool] = lambda: False) -> None:
        """Start the process; `start_up` waits for it. A `stopping` that becomes true ends every wait."""
        self._log, self._stopping = log, stopping
        self._channel, theirs = socket.socketpair()
        self._buffer = bytearray()
        # The process takes one byte before each call after the first: whichever process takes a call's byte makes the call.
        ends = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._permits, self._permit = (open(end, mode, buffering=0) for end, mode in zip(ends, ("rb", "wb"), strict=True))  # noqa: SIM115
        words = [str(theirs.fileno()), str(ends[0]), str(os.getpid())]
        with theirs, shielded():
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-X", "faulthandler", "-m", "grpo_rl.rewards.runtime.reward_process_main", *words],
                pass_fds=[theirs.fileno(), ends[0]],
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
        self._setup = frame(encode(setup))
        self.num_answered = 0
        """Calls that it has answered, the start among them."""
        self.died_by_itself = False
        """True if the process ended in the last request, neither killed nor asked to end."""
        self._is_worn_out = False
        """True once it has announced that it ends after its answer."""

    def start_up(self) -> str | None:
        """Wait until the process can be asked: None, or why it cannot be."""
        self.ask(self._setup, [reply := Reply()], 1, START_TIMEOUT_S)
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

    def ask(
        self,
        request: bytes,
        replies: Sequence[Reply],
        num_answers: int,
        timeout_s: float,
        told: Callable[[], None] = lambda: None,
    ) -> None:
        """Send a request with one call for each of the `replies`, and fill these in their order.

        `told` is called after each reply that is complete. A call has `num_answers`, fewer where one is a failure, and
        `timeout_s` from the end of the one before it. At that deadline the process is killed, and where it ends before,
        the call that it was at has ended too. Replies whose call was not begun are left as they were: those behind such
        a call, and behind one that takes longer than `STALL_S`.
        """
        waiting = list(reversed(replies))
        self._permit.write(bytes(len(replies) - 1))
        try:
            self._exchange(memoryview(request), waiting, num_answers, timeout_s, told)
        except TimeoutError:
            waiting[-1].timed_out, waiting[-1].ended = True, f"killed after {timeout_s:g} s"
        except (OSError, ValueError) as error:
            waiting[-1].ended = self._obituary(error)
            self.died_by_itself = not self._stopping()
        if waiting or self._is_worn_out:
            self.kill()

    def kill(self) -> None:
        """End the process and everything it started; of those whose own parents ended first, all that it adopted."""
        if self._process.returncode is None:
            kill_tree(self.pid)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(KILL_S)
        for end in (self._channel, self._output, self._permits, self._permit):
            end.close()

    @property
    def alive(self) -> bool:
        return self._exit_code() is None

    def _exit_code(self) -> int | None:
        """Return the exit code as Popen does, without reaping: as long as its pid is taken, its group can be killed."""
        if self._process.returncode is not None:
            return self._process.returncode
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def _exchange(
        self, rest: memoryview, waiting: list[Reply], num_answers: int, timeout_s: float, told: Callable[[], None]
    ) -> None:
        """Fill the last of `waiting` and take it away, again and again, until none is left.

        Raises TimeoutError at the deadline, OSError when the process has gone, ValueError when it writes something else.
        """
        poller = select.poll()
        poller.register(self._channel, select.POLLIN | (select.POLLOUT if rest else 0))
        poller.register(self._output, select.POLLIN)
        begun = time.monotonic()
        while waiting:
            left = begun + timeout_s - time.monotonic()
            if left <= 0:
                raise TimeoutError
            if self._stopping():
                raise ConnectionAbortedError("the run is ending")
            if len(waiting) > 1:
                if left < timeout_s - STALL_S:
                    self._take_back(waiting)
                left = min(left, STALL_S)
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
                if event & ~select.POLLOUT and self._read_answers(waiting, num_answers):
                    begun = time.monotonic()
                    told()

    def _take_back(self, waiting: list[Reply]) -> None:
        """Take back the calls that have not begun: others shall not wait for the one that has."""
        del waiting[: len(self._permits.read(PIECE) or b"")]

    def _read_answers(self, waiting: list[Reply], num_answers: int) -> bool:
        """Take what has arrived; whether some reply is complete now."""
        data = self._channel.recv(2**20)
        if not data:
            raise ConnectionResetError("it closed its channel")
        self._buffer += data
        before = len(waiting)
        while waiting and len(self._buffer) >= LENGTH.size:
            size = LENGTH.unpack(self._buffer[: LENGTH.size])[0]
            if size > LONGEST_ANSWER:
                raise ValueError(f"an answer of {size} bytes; at most {LONGEST_ANSWER} are read")
            if len(self._buffer) < LENGTH.size + size:
                break
            body = self._buffer[LENGTH.size : LENGTH.size + size]
            del self._buffer[: LENGTH.size + size]
            reply = waiting[-1]
            reply.answers.append(answer := decode(body))
            failed = isinstance(answer, dict) and "failure" in answer
            if failed or len(reply.answers) == num_answers:
                reply.complete = True
                waiting.pop()
                self.num_answered += 1
            if failed and answer.get("exit"):
                self._is_worn_out = True
                waiting.clear()
        return len(waiting) < before

    def _read_output(self) -> bool:
        """Move what was printed to the log; False once nothing more can come."""
        try:
            data = os.read(self._output.fileno(), PIECE)
        except BlockingIOError:
            return True
        self._log.write(data)
        return bool(data)

    def _obituary(self, error: Exception) -> str:
        """Return how the process ended, or what it did instead of answering."""
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
