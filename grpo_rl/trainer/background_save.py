"""A save that goes on while the next steps are trained: ranks write, the commit follows, then older checkpoints go."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from grpo_rl.checkpoint.files import Files
from grpo_rl.checkpoint.store import CheckpointStore, Committed, Draft
from grpo_rl.protocols import Actor, Critic

Result = TypeVar("Result")


class BackgroundSave:
    """One save, from the moment its ranks have begun to write. Only `advance` moves it on, and it costs the caller no disk."""

    def __init__(
        self,
        draft: Draft,
        store: CheckpointStore,
        roles: Sequence[Actor | Critic],
        flush: Callable[[], None],
        committed: Callable[[Path], None],
    ) -> None:
        self.draft, self.store, self.roles = draft, store, roles
        self.flush, self.committed = flush, committed
        self.is_committed = False
        self._publishing: Aside[Committed] | None = None
        self._clearing: Aside[None] | None = None

    def advance(self, wait_s: float) -> bool:
        """Return whether all of it is done, waiting about `wait_s` at most. Raises the error that ended the save."""
        if self._publishing is None:
            written = self._written(wait_s)
            if written is None:
                return False
            self._publishing = Aside(lambda: self._publish(written))
        if self._clearing is None:
            if not self._publishing.ended(wait_s):
                return False
            published = self._publishing.returned()
            self.is_committed = True
            # Reported before older ones are removed: until then a recovery starts from one of them.
            self.committed(published.folder)
            self._clearing = Aside(lambda: self.store.clear(published))
        if not self._clearing.ended(wait_s):
            return False
        self._clearing.returned()
        return True

    def _written(self, wait_s: float) -> Files | None:
        written: Files = {}
        for role in self.roles:
            part = role.saved(wait_s)
            if part is None:
                return None
            written |= part
        return written

    def _publish(self, written: Files) -> Committed:
        self.flush()
        return self.store.publish(self.draft, written)


class Aside(Generic[Result]):
    """A call that a thread makes beside the training; its result or error is kept until it is asked for."""

    def __init__(self, call: Callable[[], Result]) -> None:
        self._call = call
        self._result: list[Result] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="commit", daemon=True)
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
