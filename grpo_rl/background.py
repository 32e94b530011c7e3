"""A call in a daemon thread: a commit or a save beside the training, the training beside the sampling."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

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


def has_ended(future: Future[Any], wait_s: float) -> bool:
    wait([future], wait_s)
    return future.done()
