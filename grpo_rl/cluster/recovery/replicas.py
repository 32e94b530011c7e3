"""The rollout replicas that serve: one that fails is ended and replaced in the background while the others go on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import ray

from grpo_rl.cluster.processes.worker_group import Worker, WorkerFailed, WorkerGroup, settle, wait_all
from grpo_rl.cluster.recovery.supervisor import Supervisor
from grpo_rl.errors import ClusterError, GrpoRlError

Build = Callable[[Worker], ray.ObjectRef]
Vacated = Callable[[], AbstractContextManager[None]]
"""A function that clears the engines' GPUs of everything else, for as long as the context lasts."""


class Replicas:
    """The processes of the rollout set by what they may do.

    The replicas in `serving` hold the current weights and are the only ones that get requests. One that is lost, because a
    call to it failed or its heartbeat stopped, is killed, and a new process takes its place; built, it waits among the
    `ready` until it has been given the current weights. `lose` may be called from any thread, everything else from the
    controller's.

    Where engines share GPUs with ranks, `vacated` clears them for an engine that is built. Then a replacement waits, as a
    process with nothing in it, until the controller calls `build_apart`: at a time when no rank works.
    """

    def __init__(
        self,
        worker_group: WorkerGroup,
        build: Build | None = None,
        supervisor: Supervisor | None = None,
        vacated: Vacated | None = None,
    ) -> None:
        self.worker_group = worker_group
        self.supervisor = supervisor
        self._vacated = vacated
        self._unbuilt: list[Worker] = []
        self.serving = list(worker_group.workers)
        self._build = build
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._gone: dict[Worker, float] = {}
        self._ready: list[Worker] = []
        self._replaces: dict[Worker, Worker] = {}
        self._failure: GrpoRlError | None = None
        if supervisor is not None:
            for worker in self.serving:
                supervisor.monitor.watch(worker, self.lose)

    # ---- what the pool calls ----------------------------------------------------------------------------

    def drop_lost(self) -> list[Worker]:
        """Return the replicas that stopped serving since the last call. Raises ClusterError when one cannot be replaced."""
        self._changed.clear()
        with self._lock:
            if self._failure is not None:
                raise self._failure
            lost = [worker for worker in self.serving if worker in self._gone]
            self.serving = [worker for worker in self.serving if worker not in self._gone]
        return lost

    def ready(self) -> list[Worker]:
        """Return the replacements that are built and lack nothing but the weights."""
        with self._lock:
            return [worker for worker in self._ready if worker not in self._gone]

    def build_apart(self) -> list[Worker]:
        """Build the replacements that wait for GPUs without ranks on them, and put them to sleep; return those.

        vLLM counts every change of the GPU's free memory while it starts as its own, and wants its share of all memory free
        before. So the ranks leave the GPUs, and come back when the new engine has given its memory back.
        """
        with self._lock:
            waiting, self._unbuilt = [worker for worker in self._unbuilt if worker not in self._gone], []
        if not waiting or self._vacated is None or self._build is None or self.supervisor is None:
            return []
        timeout_s = self.supervisor.start_timeout_s
        with self._vacated():
            refs = [self._build(worker) for worker in waiting]
            built = list(settle(waiting, refs, timeout_s, "start rollout again", self.failed))
            refs = [worker.call("sleep") for worker in built]
            built = list(settle(built, refs, timeout_s, "rollout.sleep", self.failed))
        for worker in built:
            self._made(worker)
        return built

    def serve(self, worker: Worker, version: int) -> None:
        """Let a replacement serve, which holds the current weights, those of this version."""
        with self._lock:
            if worker in self._gone:
                return
            self._ready.remove(worker)
            self.serving.append(worker)
            noticed = self._gone[self._replaces.pop(worker)]
        if self.supervisor is not None:
            seconds = time.monotonic() - noticed
            self.supervisor.recoveries.recovered(worker.name, "rollout", seconds, f"it serves weights of version {version}")

    def note_resampled(self, number: int) -> None:
        """Count requests of lost replicas that are asked of others."""
        if self.supervisor is not None:
            self.supervisor.recoveries.count("resampled", float(number))

    def wait_for_one(self, timeout_s: float) -> None:
        """Wait until something has changed: a replica is ready, or is lost for good."""
        self._changed.wait(timeout_s)

    # ---- losing one --------------------------------------------------------------------------------------

    def failed(self, worker: Worker, error: WorkerFailed) -> None:
        """Treat a failed call as the loss of the replica; raise the error where replicas are not replaced."""
        if self.supervisor is None or self._build is None:
            raise error
        self.lose(worker, str(error))

    def lose(self, worker: Worker, cause: str) -> None:
        """End a replica for certain and start another in its place. A second call for the same one does nothing."""
        assert self.supervisor is not None
        with self._lock:
            if worker in self._gone or self.supervisor.closed:
                return
            self._gone[worker] = time.monotonic()
        worker.kill(cause if worker.verdict is None else None)
        self.supervisor.monitor.forget(worker)
        try:
            if self._build is None:
                raise ClusterError(f"{worker.name}: {cause}")
            self.supervisor.recoveries.failed(worker.name, cause, "another is started in its place")
        except ClusterError as error:
            self._give_up(error)
            return
        threading.Thread(target=self._replace, args=(worker,), name=f"start {worker.name}", daemon=True).start()

    def _replace(self, worker: Worker) -> None:
        assert self.supervisor is not None and self._build is not None
        fresh = worker.again()
        with self._lock:
            if self.supervisor.closed:
                fresh.kill()
                return
            # Ending the set ends the new process, too.
            self.worker_group.workers[self.worker_group.workers.index(worker)] = fresh
            self._ready = [other for other in self._ready if other is not worker]
            # The time without a replica counts from the first loss, however many replacements it takes.
            self._replaces[fresh] = self._replaces.pop(worker, worker)
        timeout_s = self.supervisor.start_timeout_s
        try:
            self.worker_group.locate([fresh], timeout_s)
            if self._vacated is not None:
                with self._lock:
                    self._unbuilt.append(fresh)
                self._changed.set()
                return
            wait_all([fresh], [self._build(fresh)], timeout_s, f"start {fresh.name} again")
        except WorkerFailed as error:
            self.lose(fresh, str(error))
            return
        except GrpoRlError as error:
            self._give_up(error)
            return
        self._made(fresh)

    def _made(self, fresh: Worker) -> None:
        """Note that a replacement is built."""
        assert self.supervisor is not None
        self.supervisor.recoveries.on_restart(fresh.name, fresh.pid)
        with self._lock:
            self._ready.append(fresh)
        self.supervisor.monitor.watch(fresh, self.lose)
        self._changed.set()

    def _give_up(self, error: GrpoRlError) -> None:
        with self._lock:
            self._failure = self._failure or error
        self._changed.set()
