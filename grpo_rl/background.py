"""Daemon threads: a call beside others, as a commit or a save beside the training, and periodic checks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, ClassVar, TypeVar

Result = TypeVar("Result")


def in_background(name: str, call: Callable[[], Result]) -> Future[Result]:
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class Watch(threading.Thread):
    """A daemon thread that ends soon after `stopping` is set. It starts in `__init__`, which a subclass calls last."""

    join_timeout_s: ClassVar[float] = 10.0

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.stopping = threading.Event()
        self.start()

    def close(self) -> None:
        self.stopping.set()
        self.join(self.join_timeout_s)


def has_ended(future: Future[Any], wait_s: float) -> bool:
    wait([future], wait_s)
    return future.done()
