"""The rollout replicas that serve: one that fails is replaced in the background, and others join or leave while the run goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import ray

from grpo_rl.cluster.processes.placement import Slot, raylets, runs_here
from grpo_rl.cluster.processes.worker_group import Worker, WorkerFailed, WorkerGroup, end_workers, settle, wait_all
from grpo_rl.cluster.recovery.supervisor import Supervisor
from grpo_rl.cluster.session.liveness import unanswered
from grpo_rl.errors import ClusterError, ConfigError, GrpoRlError

Build = Callable[[Worker], ray.ObjectRef]
Vacated = Callable[[], AbstractContextManager[None]]
"""A function that clears the engines' GPUs of everything else, for as long as the context lasts."""


@dataclass(frozen=True, slots=True)
class Elastic:
    """The bounds of a number of replicas that may change, and where one more finds its place."""

    fewest: int
    most: int
    take: Callable[[str | None], Slot]
    """Returns a slot, on this node of Ray's where one is named. Raises ClusterError where there is none in time."""
    give_back: Callable[[Slot, bool], None]
    """Takes the slot of a replica that has left; the second argument is True where its node is gone."""


class Replicas:
    """The processes of the rollout set by what they may do.

    The replicas in `serving` hold the current weights and are the only ones that get requests. One that is lost, because a
    call to it failed or its heartbeat stopped, is killed, and a new process takes its place; built, it waits among the
    `ready` until it has been given the current weights. So does one that joins. One that leaves is ended between two calls of
    the pool, which asks others for what it had not answered. `lose` and `resize` may be called from any thread, everything else
    from the controller's.

    Where engines share GPUs with ranks, `vacated` clears them for an engine that is built. Then a replacement waits, as a
    process with nothing in it, until the controller calls `build_apart`: at a time when no rank works.
    """

    def __init__(
        self,
        worker_group: WorkerGroup,
        build: Build | None = None,
        supervisor: Supervisor | None = None,
        vacated: Vacated | None = None,
        elastic: Elastic | None = None,
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
        self._since: dict[Worker, float] = {}
        """When each replica that does not serve yet began to be missing: the one before it was lost, or it was asked for."""
        self._joining: set[Worker] = set()
        self._elastic = elastic
        self.wanted = self._next_number = len(self.serving)
        """The number of replicas that there shall be, and the number in the name of the next one that joins."""
        self._leaving = 0
        self._nodes: dict[Worker, tuple[str, int]] = {}
        """The address of the raylet of each replica's node, where nodes may leave."""
        self._failure: GrpoRlError | None = None
        if supervisor is not None:
            for worker in self.serving:
                self._watch(worker)

    # ---- what the pool calls ----------------------------------------------------------------------------

    def drop_lost(self) -> list[Worker]:
        """Return the replicas that stopped serving since the last call. Raises ClusterError when one cannot be replaced."""
        self._changed.clear()
        self._let_go()
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
        """Let a replica that is new serve, which holds the current weights, those of this version."""
        with self._lock:
            if worker in self._gone:
                return
            self._ready.remove(worker)
            self.serving.append(worker)
            seconds = time.monotonic() - self._since.pop(worker)
            joins = worker in self._joining
            self._joining.discard(worker)
        if self.supervisor is not None:
            told = self.supervisor.recoveries.joined if joins else self.supervisor.recoveries.recovered
            told(worker.name, "rollout", seconds, f"it serves weights of version {version}")

    def resize(self, change: int, node: str | None = None) -> str:
        """Let so many replicas join, on this node of Ray's where one is named, or leave where it is below 0; say what will happen.

        Raises ConfigError where there would be too many or too few.
        """
        with self._lock:
            wanted = self.wanted + change
            fewest, most = (self.wanted,) * 2 if self._elastic is None else (self._elastic.fewest, self._elastic.most)
            if not fewest <= wanted <= most:
                key = f"max_replicas={most}" if wanted > most else f"min_replicas={fewest}"
                raise ConfigError(f"{self.wanted} engines and {change:+d}: actor_rollout_ref.rollout.{key}")
            self.wanted = wanted
            names = [f"rollout{self._next_number + k}" for k in range(change)]
            self._next_number += len(names)
            self._leaving += max(0, -change)
        for name in names:
            threading.Thread(target=self._join, args=(name, node), name=f"start {name}", daemon=True).start()
        self._changed.set()
        what = f"{', '.join(names)} will join" if names else f"{-change} will leave"
        return f"{what}: {wanted} engine{'s' * (wanted > 1)} then"

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
        if self._left_with_its_node(worker):
            return
        fresh = worker.another(worker.name, worker.slot)
        # The time without a replica counts from the first loss, however many replacements it takes.
        self._start(fresh, self._since.pop(worker, self._gone[worker]), worker)

    def _start(self, fresh: Worker, since: float, before: Worker | None = None) -> None:
        """Start a replica, in the place of another one where there was one. It serves once it has the weights."""
        assert self.supervisor is not None and self._build is not None
        with self._lock:
            if self.supervisor.closed:
                fresh.kill()
                return
            fresh.is_built = False
            # Ending the set ends the new process, too.
            members = self.worker_group.workers
            if before is None:
                members.append(fresh)
            else:
                members[members.index(before)] = fresh
                self._ready = [other for other in self._ready if other is not before]
            if before is None or before in self._joining:
                self._joining.add(fresh)
            self._since[fresh] = since
        timeout_s = self.supervisor.start_timeout_s
        try:
            self.worker_group.where(timeout_s, [fresh])
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
        """Note that a new replica is built."""
        assert self.supervisor is not None
        if fresh not in self._joining:
            self.supervisor.recoveries.on_restart(fresh.name, fresh.pid)
        with self._lock:
            fresh.is_built = True
            self._ready.append(fresh)
        self._watch(fresh)
        self._changed.set()

    def _watch(self, worker: Worker) -> None:
        assert self.supervisor is not None
        if self._elastic is not None and not runs_here():
            self._nodes |= dict.fromkeys([worker], next(iter(raylets({worker.name: worker.slot}).values())))
        self.supervisor.monitor.watch(worker, self.lose)

    # ---- others join and leave ---------------------------------------------------------------------------

    def _join(self, name: str, node: str | None) -> None:
        """Find a place and start another replica in it; without a place there will be one less."""
        assert self.supervisor is not None and self._elastic is not None
        since = time.monotonic()
        try:
            slot = self._elastic.take(node)
        except ClusterError as error:
            with self._lock:
                self.wanted -= 1
            self.supervisor.recoveries.warn(f"engines: {name} does not join: {error}")
            return
        self._start(self.worker_group.workers[0].another(name, slot), since)

    def _let_go(self) -> None:
        """End as many replicas as shall leave, those first that do not serve yet, and the newest of them."""
        with self._lock:
            there = [worker for worker in reversed(self.worker_group.workers) if worker not in self._gone]
            leaving = sorted(there, key=lambda worker: worker in self.serving)[: self._leaving]
            self._leaving -= len(leaving)
            for worker in leaving:
                self._gone[worker] = time.monotonic()
                self.worker_group.workers.remove(worker)
        for worker in leaving:
            threading.Thread(target=self._end, args=(worker,), name=f"end {worker.name}", daemon=True).start()

    def _end(self, worker: Worker) -> None:
        assert self.supervisor is not None and self._elastic is not None
        self.supervisor.monitor.forget(worker)
        end_workers([worker])
        self._elastic.give_back(worker.slot, False)
        self.supervisor.recoveries.left(worker.name, time.monotonic() - self._gone[worker], f"{self.wanted} are to go on")

    def _left_with_its_node(self, worker: Worker) -> bool:
        """Return whether a lost replica's node is gone and fewer replicas may go on: then none is started in its place."""
        address = self._nodes.pop(worker, None)
        if self._elastic is None or self.supervisor is None or address is None or unanswered(address) is None:
            return False
        with self._lock:
            if self.wanted <= self._elastic.fewest:
                return False
            self.wanted -= 1
            self.worker_group.workers.remove(worker)
        self._elastic.give_back(worker.slot, True)
        self.supervisor.recoveries.left(worker.name, 0.0, f"its node is gone; {self.wanted} are to go on")
        return True

    def _give_up(self, error: GrpoRlError) -> None:
        with self._lock:
            self._failure = self._failure or error
        self._changed.set()
