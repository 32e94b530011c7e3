"""The saves of a run's state: begun at a save point, committed once every rank has written its part."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from grpo_rl.background import has_ended, in_background
from grpo_rl.checkpoint.files import Files
from grpo_rl.checkpoint.store import CheckpointStore, Draft
from grpo_rl.config.schema.tree import Config
from grpo_rl.errors import CheckpointError, GrpoRlError
from grpo_rl.trainer.parts import Output, Roles

_WAIT_S = 1.0
RESCUE_S = 10.0  # seconds that a run which fails waits for a save that is nearly done
OWN_EVERY_S, OWN_SHARE = 60.0, 0.02
"""The fewest seconds between two checkpoints that a run writes for itself, and the share of its time that they may take."""


class Saving:
    """The saves of one run, at most one at a time: what `begin` starts is committed by a later `poll` or `finish`.

    A run without `save_freq` writes some for itself, to go on from if it loses ranks, in a folder that no later
    command looks into. A save that fails is warned of; with `on_save_error=stop` all methods raise CheckpointError.
    """

    def __init__(self, config: Config, roles: Roles, output: Output) -> None:
        self.trainer = config.trainer
        checkpoint = config.actor.checkpoint
        self.in_background = checkpoint.async_save
        self.output = output
        self.exported = (roles.actor or roles.reward_model) if "hf_model" in checkpoint.save_contents else None
        self.roles = roles.with_state()
        self.store = CheckpointStore(output.run_dir.checkpoints, config.trainer.max_actor_ckpt_to_keep, output.console.warn)
        self.own = None
        if config.trainer.save_freq < 1 and config.trainer.recover != "off" and self.roles:
            self.own = CheckpointStore(output.run_dir.recovery, 1, output.console.warn)
        self._next_own = time.monotonic() + OWN_EVERY_S
        self.num_failed = 0
        self._going: Draft | None = None
        self._committing: Future[None] | None = None

    def is_saved(self, step: int) -> bool:
        """Return whether a checkpoint of this step is there or being written."""
        return (self._going is not None and self._going.step == step) or step in self.store.steps()

    def begin(self, step: int, state: dict[str, Any], store: CheckpointStore | None = None) -> None:
        """Save the roles' state as it is now, and `state`, in the run's checkpoints or for its own recovery."""
        self.finish()
        store = store or self.store
        with self._tolerant(store):
            self._begin(step, state, store)

    def begin_own(self, step: int, state: Callable[[], dict[str, Any]]) -> None:
        """Save for this run's own recovery, if that is due."""
        began = time.monotonic()
        if self.own is None or began < self._next_own:
            return
        self.finish()
        if self.own is not None:  # the one before may just have failed
            self.begin(step, state(), self.own)
        current_time = time.monotonic()
        self._next_own = current_time + max(OWN_EVERY_S, (current_time - began) / OWN_SHARE)

    def poll(self) -> None:
        """Commit the present save if all of it is written, without waiting."""
        with self._tolerant():
            self._advance(0.0)

    def finish(self) -> None:
        """Wait for the present save, and commit it."""
        with self._tolerant():
            self._finish(self.trainer.step_timeout_s)

    def settle(self, step: int, state: Callable[[], dict[str, Any]]) -> None:
        """Commit this step, the last of a run, also if an earlier try failed. Raises CheckpointError."""
        self.finish()
        if not self.is_saved(step):
            self._begin(step, state(), self.store)
            self._finish(self.trainer.step_timeout_s)

    def rescue(self) -> None:
        """Commit a save that is nearly done, in a run that ends with an error."""
        self.output.stop.finishing()
        try:
            self._finish(RESCUE_S)
        except (GrpoRlError, OSError) as error:
            self.output.console.warn(str(error))

    def _begin(self, step: int, state: dict[str, Any], store: CheckpointStore) -> None:
        draft = store.begin(step, state, self._bytes)
        with self._writing(draft):
            for role in self.roles:
                role.save(draft.folder, self.in_background)
            if self.exported is not None and store is self.store:
                self.exported.export(draft.folder / "huggingface")
        self._going, self._committing = draft, None
        if not self.in_background:
            self._finish(self.trainer.step_timeout_s)

    @cached_property
    def _bytes(self) -> int:
        """The bytes that a checkpoint needs, always the same, so that the ranks are asked once."""
        # Of weights and Adam's two moments the export has the first.
        exported = self.exported.save_bytes() // 3 if self.exported is not None else 0
        return sum(role.save_bytes() for role in self.roles) + exported

    def _finish(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not self._advance(_WAIT_S):
            if (going := self._going) is not None and time.monotonic() > deadline:
                self._going = None
                going.store.abandon(going)
                raise CheckpointError(
                    f"the checkpoint of step {going.step} was not written within {timeout_s:.0f} s, and is given up; "
                    "is the disk hanging? Where it is only slow, raise trainer.step_timeout_s"
                )

    def _advance(self, wait_s: float) -> bool:
        """Return whether there is no save, or it is done after about `wait_s` at most. Raises its error."""
        if (going := self._going) is None:
            return True
        with self._writing(going):
            if self._committing is None:
                written: Files = {}
                for role in self.roles:
                    part = role.saved(wait_s)
                    if part is None:
                        return False
                    written |= part
                self._committing = in_background("commit", lambda: self._commit(going, written))
            if not has_ended(self._committing, wait_s):
                return False
            self._committing.result(0)
        self._going = None
        return True

    def _commit(self, draft: Draft, written: Files) -> None:
        # A checkpoint must not outlive metrics and rollouts of the steps before it.
        self.output.sinks.flush()
        self.output.rollouts.flush()
        replaced = draft.store.publish(draft, written)
        if draft.store is self.store:
            self.output.status.update(last_commit=draft.step)
        draft.store.clear(draft.step, replaced)

    @contextmanager
    def _writing(self, draft: Draft) -> Iterator[None]:
        try:
            with draft.store.writing(draft):
                yield
        except Exception:
            self._going = None
            raise

    @contextmanager
    def _tolerant(self, store: CheckpointStore | None = None) -> Iterator[None]:
        store = self._going.store if store is None and self._going is not None else store
        try:
            yield
        except CheckpointError as error:
            if store is not None and store is self.own:
                self.output.console.warn(f"{error}. This run has no other checkpoint to go back to when it loses ranks")
                self.own = None
                return
            self.num_failed += 1
            if self.trainer.on_save_error == "stop":
                raise
            self.output.console.warn(
                f"NOT SAVED ({self.num_failed} so far): {error}. Training goes on; the next save point tries again"
            )
