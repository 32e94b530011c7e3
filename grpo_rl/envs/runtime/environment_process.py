"""An environment process as its parent sees it: started, sent messages, read by a thread, and killed with all that it started."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

from grpo_rl.child_processes import kill_tree, shielded
from grpo_rl.rewards.runtime.messages import decode, encode, frame, receive_bounded
from grpo_rl.rewards.runtime.reward_process_log import OutputLog

KILL_S = 5.0
"""Seconds within which a killed process is gone, or is left to the system."""
SEND_S = 5
"""Seconds after which a process that takes no messages counts as lost."""
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class EnvironmentProcess:
    """One process in a session of its own. It ends with the thread that started it.

    What it sends, and that it has ended, is put into `inbox` as (process, message), with None for the end.
    """

    def __init__(self, number: int, setup: dict[str, Any], log: OutputLog, inbox: queue.SimpleQueue[Any]) -> None:
        self.number, self._log = number, log
        self.episodes: set[str] = set()
        """The episodes that it has."""
        self.is_ready = self.is_retired = False
        """`is_retired` is true once it gets no further episodes, because some work in it cannot be ended."""
        self._channel, theirs = socket.socketpair()
        # Where the process reads nothing more, a send must not wait for ever.
        self._channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_S, 0))
        words = [str(theirs.fileno()), str(os.getpid())]
        with theirs, shielded():
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-X", "faulthandler", "-m", "grpo_rl.envs.runtime.environment_process_main", *words],
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=_environment(),
            )  # fmt: skip
        self.pid = self._process.pid
        threading.Thread(target=self._read, args=(inbox.put,), daemon=True).start()
        threading.Thread(target=self._copy_output, daemon=True).start()
        self.send(setup)

    def send(self, message: dict[str, Any]) -> None:
        """Send a message. A process that is gone or takes nothing more is killed; that it has ended is in the inbox then.

        Raises ValueError or TypeError for what is no plain data.
        """
        data = frame(encode(message))
        try:
            self._channel.sendall(data)
        except OSError:
            self.kill()

    def kill(self) -> None:
        """End the process and everything it started."""
        if self._process.returncode is None:
            kill_tree(self.pid)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(KILL_S)
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)

    def obituary(self) -> str:
        """Return how the process ended, with the last that it printed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_S)
        code = self._process.returncode
        how = "does not answer any more" if code is None else f"exited with code {code}"
        if code is not None and code < 0:
            how = f"died of {signal.Signals(-code).name}"
        said = self._log.last
        return f"the environment process {how}" + (f"; its last output: {said}" if said else "")

    def _read(self, put: Callable[[Any], None]) -> None:
        """Put what arrives into the inbox, until the process has gone or writes something that is no message."""
        with contextlib.suppress(OSError, ValueError):
            while (body := receive_bounded(self._channel)) is not None:
                message = decode(body)
                if not isinstance(message, dict):
                    break
                put((self, message))
        self.kill()
        put((self, None))

    def _copy_output(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output, contextlib.suppress(OSError):
            while data := os.read(output.fileno(), 2**16):
                self._log.write(data)


def _environment() -> dict[str, str]:
    # The same modules as here; an order of sets that is the same in every process, as environments may depend on it.
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return {"PYTHONHASHSEED": "0"} | os.environ | ONE_THREAD | {"PYTHONPATH": path}
