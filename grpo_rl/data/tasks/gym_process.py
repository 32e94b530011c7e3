"""Entries made in a process of their own, for data sets whose rows depend on how Python hashes strings.

`python -m grpo_rl.data.tasks.gym_process NAME SEED OPTIONS` answers each line with an entry's index by one line of JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import weakref
from typing import Any

from grpo_rl import gym
from grpo_rl.errors import DataError

HASH_SEED = "0"
DEADLINE_S = 120.0
"""Seconds for one entry, the start of the process included."""


def needs_own_process(name: str) -> bool:
    """Return whether entries made here could differ from those of another run."""
    return name in gym.HASH_DEPENDENT and os.environ.get("PYTHONHASHSEED") != HASH_SEED


class EntryProcess:
    """Makes entries under a fixed PYTHONHASHSEED; started with the first one, ended with this object."""

    def __init__(self, name: str, options: gym.Options, seed: int) -> None:
        self._what = f"reasoning_gym:{name}"
        self._command = [sys.executable, "-m", __name__, name, str(seed), json.dumps(options)]
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = b""
        self._lock = threading.Lock()

    def entry(self, index: int) -> dict[str, Any]:
        """Entry `index`. Raises DataError when it cannot be made, or not within `DEADLINE_S`."""
        with self._lock:
            process = self._process or self._start()
            assert process.stdin is not None
            try:
                process.stdin.write(f"{index}\n".encode())
                process.stdin.flush()
            except OSError as error:
                raise DataError(f"{self._what}, entry {index}: the process that makes the rows has ended") from error
            answer = json.loads(self._line(process, index))
        if "error" in answer:
            raise DataError(f"{self._what}, entry {index}: {answer['error']}")
        return gym.decode(answer["entry"])

    def _start(self) -> subprocess.Popen[bytes]:
        environment = os.environ | {"PYTHONHASHSEED": HASH_SEED}
        process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        weakref.finalize(self, _end, process)
        self._process = process
        return process

    def _line(self, process: subprocess.Popen[bytes], index: int) -> bytes:
        assert process.stdout is not None
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([process.stdout], [], [], DEADLINE_S)
            if not ready:
                process.kill()
                raise DataError(f"{self._what}, entry {index}: not made within {DEADLINE_S:g} s")
            part = os.read(process.stdout.fileno(), 1 << 16)
            if not part:
                raise DataError(f"{self._what}, entry {index}: the process that makes the rows has ended")
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait(10)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


def serve(name: str, seed: int, options: gym.Options) -> None:
    """Answer indices on stdin until it is closed."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    # What a generator prints must not end up among the answers.
    sys.stdout = sys.stderr
    for line in sys.stdin:
        try:
            answer = {"entry": gym.encode(gym.make_entry(name, options, seed, int(line)))}
        except Exception as error:  # sent to the other side, which names the row
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), tuple((key, text) for key, text in json.loads(sys.argv[3])))
