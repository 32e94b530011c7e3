"""Entries made in a process of their own, for data sets whose rows depend on how Python hashes strings."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

from grpo_rl import gym
from grpo_rl.errors import DataError
from grpo_rl.processes.child import Child, OutputLog, encode
from grpo_rl.processes.inside import Parent, serve

HASH_SEED = "0"
DEADLINE_S = 120.0
"""Seconds for one entry, and as many for the start of the process."""


def needs_own_process(name: str) -> bool:
    """Return whether entries made here could differ from those of another run."""
    return name in gym.HASH_DEPENDENT and os.environ.get("PYTHONHASHSEED") != HASH_SEED


class EntryProcess:
    """Makes entries under a fixed PYTHONHASHSEED; started with the first one, ended with this object."""

    def __init__(self, name: str, options: gym.Options, seed: int) -> None:
        self._what = f"reasoning_gym:{name}"
        self._setup = {"name": name, "options": options, "seed": seed}
        self._child: Child | None = None
        self._lock = threading.Lock()

    def entry(self, index: int) -> dict[str, Any]:
        """Entry `index`. Raises DataError when it cannot be made, or not within `DEADLINE_S`."""
        where = f"{self._what}, entry {index}"
        with self._lock:
            child = self._child or self._start(where)
            try:
                child.send(encode(index), DEADLINE_S)
                answer = child.receive(DEADLINE_S)
            except TimeoutError as error:
                child.kill()
                raise DataError(f"{where}: not made within {DEADLINE_S:g} s") from error
            except (OSError, EOFError, ValueError) as error:
                how = child.with_last_output(child.how_it_ended(error))
                raise DataError(f"{where}: the process that makes the rows has ended: {how}") from error
        if "error" in answer:
            raise DataError(f"{where}: {answer['error']}")
        return gym.decode(answer["entry"])

    def _start(self, where: str) -> Child:
        environment = {"PYTHONHASHSEED": HASH_SEED}
        child = Child(__name__, self._setup, OutputLog(), outlives_thread=True, environment=environment)
        weakref.finalize(self, child.kill)
        if trouble := child.wait_until_ready(DEADLINE_S):
            raise DataError(f"{where}: the process that makes the rows cannot start: {trouble}")
        self._child = child
        return child


def begin(setup: dict[str, Any], parent: Parent) -> Callable[[Any], None]:
    """Return what answers an entry's index."""
    options = tuple((key, text) for key, text in setup["options"])

    def handle(index: int) -> None:
        try:
            answer = {"entry": gym.encode(gym.make_entry(setup["name"], options, setup["seed"], index))}
        except Exception as error:  # sent to the other side, which names the row
            answer = {"error": f"{type(error).__name__}: {error}"}
        parent.send(answer)

    return handle


if __name__ == "__main__":
    serve(sys.argv[1:], begin)
