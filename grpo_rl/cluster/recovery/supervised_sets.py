"""Sets of ranks that are made anew as a whole when one of them dies or freezes, with the state they had."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray

from grpo_rl.cluster.processes.worker_host import Stored
from grpo_rl.cluster.processes.worker_sets import WorkerFailed, WorkerSet, wait_all
from grpo_rl.cluster.recovery.supervisor import Supervisor
from grpo_rl.errors import ClusterError, SaveLost

Arguments = Sequence[tuple[Any, ...]]
Recipe = Callable[[], list[ray.ObjectRef]]

STEP_OF_MANY = frozenset({"begin_weight_sync", "next_bucket", "end_weight_sync", "sent_digests"})
"""Calls that mean nothing to new processes, which have not had those before: their caller begins again with the first."""
LONG_AND_SILENT = frozenset({"save", "begin_save", "load", "export"})
"""Calls in which a library may hold the interpreter for long: silence is no sign of trouble then."""


SAVES = frozenset({"save", "begin_save"})
"""Calls whose half-done work is in the way of a second try: their caller begins again with another folder."""


COPY_SHARE = 0.02
"""Copies in memory take at most this share of the time of the updates, where one takes longer than that of a single update."""
LONGEST_AGAIN_S, MOST_AGAIN = 10.0, 8
"""A copy is made at the latest after updates of this many seconds, and after this many: what a recovery makes again."""


class SetRestarted(ClusterError):
    """An error: the set was made anew amid several calls that belong together. Make them again, from the first."""


class Keeper:
    """A keeper brings a stateful set of ranks back: a state it had, and the updates made since, which are made again.

    The state is the one that the recipe builds, until there is a copy in memory (Ray's object store, one object per
    rank) or a committed checkpoint. On CPUs updates are exact functions of state and arguments, so what comes out is
    bit-equal; on GPUs it is equal up to the rounding of kernels that add in any order.
    """

    def __init__(self, worker_set: SupervisedSet) -> None:
        self.worker_set = worker_set
        self.in_memory = False
        self._copy: list[ray.ObjectRef] | None = None
        self._folder: Path | None = None
        self._updates: list[Arguments] = []
        self._updates_s = 0.0
        self._copy_s = 0.0
        self._num_saved: int | None = None

    def stored(self, arguments: Arguments) -> Arguments:
        """Return the arguments of an update as they are kept until the next commit, and sent: in the object store.

        There they lie once, and go to disk when it is full; at 65 million tokens those of one update are 1.8 GB. With copies in
        memory they are kept until the next copy only, and travel with the call. What is in the store already, such as the weights that an
        actor's rank handed over, stays as it is. What several ranks get lies there once.
        """
        if self.in_memory:
            return arguments
        placed: dict[int, Stored | ray.ObjectRef] = {}

        def place(value: Any) -> Any:
            if isinstance(value, Stored | ray.ObjectRef):
                return value
            if id(value) not in placed:
                placed[id(value)] = self.worker_set.store([value], stays=False)[0]
            return placed[id(value)]

        return [tuple(place(value) for value in some) for some in arguments]

    def after(self, method: str, arguments: Arguments, seconds: float = math.inf) -> None:
        """Note what a call that has succeeded did to the state, and how long it took."""
        if method == "update":
            self._updates.append(arguments)
            self._updates_s += seconds
        elif method == "load":
            self._set(None, Path(arguments[0][0]))
        elif method in ("save", "begin_save"):
            self._num_saved = len(self._updates)
        if self.in_memory and (method == "load" or (method == "update" and self._copy_is_due(arguments))):
            # Where it fails, the update is among those that the recovery makes again.
            began = time.monotonic()
            copy = self.worker_set.parts("snapshot")
            self._set(copy, None)
            self._copy_s = time.monotonic() - began

    def _copy_is_due(self, arguments: Arguments) -> bool:
        """Return whether a copy in memory is to be made after this update.

        It is after every one, except where updates are so short that copies would be a part of the time that is felt.
        """
        # Whole weights, such as an actor's rank hands over, would be as much memory as a copy.
        holds_weights = any(isinstance(value, ray.ObjectRef) for some in arguments for value in some)
        return (
            self._copy is None
            or holds_weights
            or len(self._updates) >= MOST_AGAIN
            or self._updates_s >= min(LONGEST_AGAIN_S, self._copy_s / COPY_SHARE)
        )

    def committed(self, folder: Path) -> None:
        """Note that the files of the last `save` are complete and stay in `folder`."""
        if not self.in_memory and self._num_saved is not None:
            self._folder, self._updates = folder, self._updates[self._num_saved :]
        self._num_saved = None

    def restore(self) -> None:
        """Bring newly built ranks to where the set was."""
        if self._copy is not None:
            self.worker_set.call_once("restore", [(part,) for part in self._copy])
        elif self._folder is not None:
            self.worker_set.call_once("load", [(str(self._folder),)] * len(self.worker_set))
        for arguments in self._updates:
            self.worker_set.call_once("update", arguments)

    @property
    def num_updates(self) -> int:
        """Updates that a recovery makes again."""
        return len(self._updates)

    @property
    def num_unsaved(self) -> int:
        """Updates that are kept, and that no save that has been begun contains: 0 with copies in memory."""
        return 0 if self.in_memory else len(self._updates) - (self._num_saved or 0)

    def _set(self, copy: list[ray.ObjectRef] | None, folder: Path | None) -> None:
        self._copy, self._folder, self._updates, self._num_saved = copy, folder, [], None
        self._updates_s = 0.0


class SupervisedSet(WorkerSet):
    """A WorkerSet whose calls survive the end of its processes.

    `begin` takes the recipe that builds a worker in every process; a failed call ends all processes, builds new ones,
    restores their state where they have any, and is made again. Without a supervisor, a failure is an error.
    """

    def __init__(self, *arguments: Any, supervisor: Supervisor | None = None, stateful: bool = False, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.supervisor = supervisor
        self.keeper = Keeper(self) if stateful and supervisor is not None and supervisor.restarts else None
        self.is_restarted = supervisor is not None and supervisor.restarts
        self._recipe: Recipe | None = None

    def begin(self, recipe: Recipe) -> list[ray.ObjectRef]:
        """Start building the workers, now and whenever they have to be made again."""
        self._recipe = recipe
        return recipe()

    def built(self) -> None:
        """Watch over the workers, which have just been built."""
        if self.supervisor is None:
            return
        if self.keeper is not None:
            self._choose_memory_or_checkpoint(self.keeper)
        self._watch()

    def call_each(self, method: str, arguments: Arguments) -> list[Any]:
        """Call `method` on every rank with its own arguments; the results by rank.

        Raises SetRestarted where the call is one of several that belong together, SaveLost where it was to write a
        checkpoint, ClusterError with all causes when the budget for restarts is spent.
        """
        if method == "update" and self.keeper is not None and self.is_restarted:
            arguments = self.keeper.stored(arguments)
        while True:
            try:
                began = time.monotonic()
                results = self.call_once(method, arguments)
                break
            except WorkerFailed as error:
                self.recover(error, f"{self.role}.{method}")
                if method in STEP_OF_MANY:
                    raise SetRestarted(f"{self.role} was started again in {method}") from error
                if method in SAVES:
                    # Its folder holds files of the ranks that have ended.
                    raise SaveLost from error
        if self.keeper is not None and self.is_restarted:
            self.keeper.after(method, arguments, time.monotonic() - began)
        return results

    def call_once(self, method: str, arguments: Arguments) -> list[Any]:
        """Make the call, without a second try."""
        silent = method in LONG_AND_SILENT
        for worker in self.workers:
            worker.excused = silent
        try:
            return super().call_each(method, arguments)
        finally:
            for worker in self.workers:
                worker.excused = False

    def parts(self, method: str) -> list[ray.ObjectRef]:
        """Return each rank's result as a reference to an object that is in the store, and was not fetched.

        A set that fails is made anew, and asked again.
        """

        def begin() -> list[tuple[ray.ObjectRef, ray.ObjectRef]]:
            return [tuple(w.actor.call_pair.options(num_returns=2).remote(method)) for w in self.workers]

        return [ref for _, ref in self._first_of_two(method, begin)]

    def call_for_two(self, method: str, arguments: Arguments) -> list[tuple[Any, ray.ObjectRef]]:
        """Call a method that returns a pair on every rank; return the first values, and references to the second ones.

        The second ones were not fetched. A set that fails is made anew, and asked again.
        """
        return self._first_of_two(
            method, lambda: [w.call_for_two(method, *own) for w, own in zip(self.workers, arguments, strict=True)]
        )

    def _first_of_two(
        self, method: str, begin: Callable[[], list[tuple[ray.ObjectRef, ray.ObjectRef]]]
    ) -> list[tuple[Any, ray.ObjectRef]]:
        while True:
            try:
                pairs = begin()
                firsts = wait_all(self.workers, [pair[0] for pair in pairs], self.call_timeout_s, f"{self.role}.{method}")
                return [(first, pair[1]) for first, pair in zip(firsts, pairs, strict=True)]
            except WorkerFailed as error:
                self.recover(error, f"{self.role}.{method}")

    def recover(self, error: ClusterError, what: str) -> None:
        """Make the set anew, with its state. Raises `error` where it has no supervisor, ClusterError at the budget's end."""
        if self.supervisor is None or not self.is_restarted or self._recipe is None:
            raise error
        began = time.monotonic()
        while True:
            self.supervisor.budget.spend(self.role, str(error))
            self.supervisor.log.failed(self.role, str(error), f"all its {len(self)} processes are started again")
            try:
                self._start_again()
                break
            except WorkerFailed as another:
                error = another
        self.supervisor.log.recovered(self.role, self.role, time.monotonic() - began, self._how(what))

    def committed(self, folder: Path) -> None:
        """Note that the files of the last `save` are complete and stay in `folder`."""
        if self.keeper is not None:
            self.keeper.committed(folder)

    def shutdown(self) -> None:
        """End all processes of the set."""
        if self.supervisor is not None:
            for worker in self.workers:
                self.supervisor.monitor.forget(worker)
        super().shutdown()

    def _choose_memory_or_checkpoint(self, keeper: Keeper) -> None:
        assert self.supervisor is not None
        size = sum(self.call_once("state_bytes", [()] * len(self)))
        fits = size <= self.supervisor.memory_bytes
        keeper.in_memory = self.supervisor.mode == "memory" or (self.supervisor.mode == "auto" and fits)
        if not keeper.in_memory and not self.supervisor.writes_checkpoints:
            # The updates of a whole run would have to be kept, and made again.
            self.is_restarted = False
            self.supervisor.log.warn(
                f"recovery: the {self.role} is not started again when it fails: its state of {size / 2**30:.1f} GiB is above "
                "trainer.recover_memory_gib, and trainer.save_freq writes no checkpoints"
            )

    def _start_again(self) -> None:
        assert self.supervisor is not None and self._recipe is not None
        # Ranks that only noticed wait in a collective, or hold what the new ones need.
        self.shutdown()
        self.workers = [worker.again() for worker in self.workers]
        wait_all(self.workers, self._recipe(), self.supervisor.start_timeout_s, f"start {self.role} again")
        for worker in self.workers:
            self.supervisor.log.on_restart(worker.name, worker.pid)
        self._watch()
        if self.keeper is not None:
            self.keeper.restore()

    def _how(self, what: str) -> str:
        if self.keeper is None:
            return f"{what} is made again"
        number = self.keeper.num_updates
        again = f", {number} updates made again" if number else ""
        return f"state restored{again}; {what} is made again"

    def _watch(self) -> None:
        assert self.supervisor is not None
        for worker in self.workers:
            self.supervisor.monitor.watch(worker)
