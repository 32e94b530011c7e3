"""A call in a background thread: a commit beside the training, the training beside the sampling."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Result = TypeVar("Result")


class BackgroundThread(Generic[Result]):
    """A call in a background thread; its result or error is kept until it is asked for."""

    def __init__(self, name: str, call: Callable[[], Result]) -> None:
        self._call = call
        self._result: list[Result] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def ended(self, wait_s: float) -> bool:
        """Return whether the call has ended, waiting `wait_s` at most."""
        self._thread.join(wait_s)
        return not self._thread.is_alive()

    def returned(self) -> Result:
        """Return what the call returned, or raise what it raised."""
        if self._error is not None:
            raise self._error
        return self._result[0]

    def _run(self) -> None:
        try:
            self._result.append(self._call())
        except BaseException as error:
            self._error = error
