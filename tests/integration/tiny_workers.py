"""Small workers that do in a Ray process what a test asks of them. Imported there, so it loads nothing heavy."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any

from grpo_rl.errors import CheckpointError, ConfigError


class Unpicklable(RuntimeError):
    """An error that cannot travel: it holds a lock."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = threading.Lock()


class TinyWorker:
    """Answers, fails, hangs or dies on request."""

    def __init__(self, rank: int, fails: bool = False) -> None:
        self.rank = rank
        if fails:
            raise MemoryError(f"no room for rank {rank}")

    def add(self, left: int, right: int, seconds: float = 0.0) -> tuple[int, int]:
        """Rank and sum, after some time."""
        time.sleep(seconds)
        return self.rank, left + right

    def fail(self, kind: str, message: str) -> None:
        errors = {"ValueError": ValueError, "ConfigError": ConfigError, "CheckpointError": CheckpointError}
        raise (errors | {"Unpicklable": Unpicklable})[kind](message)

    def die(self, how: str, last_words: str) -> None:
        print(last_words, flush=True)
        if how == "exit":
            os._exit(3)
        sys.exit(3)

    def die_or_notice(self) -> None:
        """Rank 1 dies; the others report what one sees of that."""
        if self.rank == 1:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        raise ConnectionResetError("connection closed by peer")

    def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    def write_below_python(self, text: str) -> None:
        os.write(1, text.encode())
        os.write(2, text.upper().encode())

    def say_and_sleep(self, words: str, seconds: float) -> None:
        print(words, flush=True)
        time.sleep(seconds)


def make_worker(*arguments: Any) -> TinyWorker:
    return TinyWorker(*arguments)
