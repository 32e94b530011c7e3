"""Small workers that do in a Ray process what a test asks of them. Imported there, so it loads nothing heavy."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from grpo_rl.columns import Block
from grpo_rl.errors import CheckpointError, ConfigError
from grpo_rl.rollout.reports import Report, pack
from grpo_rl.types import Completion, Request


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


class TinyEngine:
    """A rollout replica whose response to a prompt is the prompt backwards, one after the other."""

    def __init__(self, version: int, seconds: float) -> None:
        self.version = version
        self.seconds = seconds
        self.waiting: list[Request] = []
        self.num_done = 0

    def submit(self, requests: Sequence[Request]) -> None:
        self.waiting += requests

    def poll(self, timeout_s: float) -> list[Completion]:
        if not self.waiting:
            time.sleep(min(timeout_s, 0.05))
            return []
        time.sleep(self.seconds)
        request = self.waiting.pop(0)
        self.num_done += 1
        ids = request.prompt_ids[::-1]
        versions, text = ((self.version, len(ids)),), " ".join(map(str, ids))
        return [Completion(request.request_id, ids, [-0.5] * len(ids), "stop", versions, text=text)]

    def report(self, timeout_s: float, *_: float) -> tuple[list[Report], Block]:
        return pack(self.poll(timeout_s))

    def done(self) -> int:
        return self.num_done


def make_worker(*arguments: Any) -> TinyWorker:
    return TinyWorker(*arguments)


def make_engine(*arguments: Any) -> TinyEngine:
    return TinyEngine(*arguments)
