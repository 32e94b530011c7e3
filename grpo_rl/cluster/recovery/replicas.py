"""The rollout replicas of a run: those that failed are replaced, others join or leave."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ray

from grpo_rl.background import Watch
from grpo_rl.cluster.processes.placement import Pool, nodes_of, raylets, runs_here
from grpo_rl.cluster.processes.worker_group import Worker, WorkerFailed, WorkerGroup, end_workers, settle, wait_all
from grpo_rl.cluster.recovery.supervisor import Supervisor
from grpo_rl.cluster.session.liveness import unanswered
from grpo_rl.errors import ClusterError, ConfigError, GrpoRlError
from grpo_rl.frozen import frozen

Build = Callable[[Worker], ray.ObjectRef]
Vacated = Callable[[], AbstractContextManager[None]]
ORDERS_S = 0.5


@frozen
class Elastic:
    """The bounds of a number of replicas that may change, and where one more finds its place."""

    fewest: int
    most: int
    pool: Pool
    devices: int
    on_place: Callable[[str], None] = lambda node: None
    """Called, in a thread of its own, with each node of Ray's that gets another replica."""


@dataclass(slots=True)
class _Standing:
    state: Literal["starting", "unbuilt", "ready", "serving"]
    since: float = 0.0
    """When it began to be missing: the one before it was lost, or it was asked for."""
    joins: bool = False
    raylet: tuple[str, int] | None = None


@dataclass(eq=False)
class Replicas:
    """The processes of the rollout set by what they may do.

    The replicas in `serving` hold the current weights and alone get requests. One that is lost (a call
    failed, or its heartbeat stopped) is killed, and a new process takes its place; built, it is `ready`, and
    waits for the current weights, as one that joins does. One that leaves is ended between two calls of the
    pool, which asks others for what it had not answered. `lose` and `resize` may be called from any thread,
    all else from the controller's.

    If engines share GPUs with ranks, a replacement waits, as a process with nothing in it, until the
    controller calls `build_apart` at a time when no rank works; `vacated` clears the GPUs for it.
    """

    worker_group: WorkerGroup
    supervisor: Supervisor
    build: Build | None = None
    """None if a replica that fails ends the run."""
    vacated: Vacated | None = None
    elastic: Elastic | None = None

    def __post_init__(self) -> None:
        self._first = self.worker_group.workers[0]
        self._lock, self._changed = threading.Lock(), threading.Event()
        self._standings: dict[Worker, _Standing] = {}
        self.wanted = self._next_number = len(self.worker_group)
        """The number of replicas that there shall be, and the number in the name of the next one that joins."""
        self._leaving = 0
        self._failure: GrpoRlError | None = None
        for worker in self.worker_group.workers:
            self._standings[worker] = standing = _Standing("serving")
            self._watch(worker, standing)

    @property
    def serving(self) -> list[Worker]:
        return self._those("serving")

    def ready(self) -> list[Worker]:
        return self._those("ready")

    def _those(self, state: str) -> list[Worker]:
        with self._lock:
            return [worker for worker, standing in self._standings.items() if standing.state == state]

    # ---- what the pool calls ----------------------------------------------------------------------------

    def let_go(self) -> None:
        """End as many replicas as shall leave: those first that do not serve yet, and the newest of them.

        Raises ClusterError if a replica that was lost cannot be replaced.
        """
        self._changed.clear()
        with self._lock:
            if self._failure is not None:
                raise self._failure
            newest_first = reversed(self._standings)
            leaving = sorted(newest_first, key=lambda worker: self._standings[worker].state == "serving")[: self._leaving]
            self._leaving -= len(leaving)
            for worker in leaving:
                del self._standings[worker]
                self.worker_group.workers.remove(worker)
        for worker in leaving:
            _beside(f"end {worker.name}", self._end, worker)

    def build_apart(self) -> list[Worker]:
        """Build the replacements that wait for GPUs without ranks on them, and put them to sleep; return
        those.

        vLLM counts every change of the GPU's free memory while it starts as its own: the ranks leave the
        GPUs, and come back when the new engine has given its memory back.
        """
        if not (waiting := self._those("unbuilt")):
            return []
        assert self.vacated is not None and self.build is not None
        timeout_s = self.supervisor.start_timeout_s
        with self.vacated():
            calls = {worker: self.build(worker) for worker in waiting}
            calls = {worker: worker.call("sleep") for worker in settle(calls, timeout_s, "start rollout again", self.failed)}
            built = list(settle(calls, timeout_s, "rollout.sleep", self.failed))
        for worker in built:
            self._made(worker)
        return built

    def serve(self, worker: Worker, version: int) -> None:
        with self._lock:
            if (standing := self._standings.get(worker)) is None:
                return
            joins, standing.state, standing.joins = standing.joins, "serving", False
        recoveries = self.supervisor.recoveries
        seconds, how = time.monotonic() - standing.since, f"it serves weights of version {version}"
        if joins:
            recoveries.came_or_went(worker.name, "joined", seconds, how)
        else:
            recoveries.recovered(worker.name, "rollout", seconds, how)

    def wait(self, timeout_s: float) -> None:
        self._changed.wait(timeout_s)

    # ---- losing one --------------------------------------------------------------------------------------

    def failed(self, worker: Worker, error: WorkerFailed) -> None:
        """Treat a failed call as the loss of the replica; raise the error if replicas are not replaced."""
        if self.build is None:
            raise error
        self.lose(worker, str(error))

    def lose(self, worker: Worker, cause: str) -> None:
        """End a replica for certain and start another in its place. Does nothing for one that is lost or has left."""
        with self._lock:
            if self.supervisor.closed or (lost := self._standings.pop(worker, None)) is None:
                return
            self.worker_group.workers.remove(worker)
            if lost.state == "serving":
                lost.since = time.monotonic()
        worker.kill(cause)
        self.supervisor.forget(worker)
        try:
            if self.build is None:
                raise ClusterError(f"{worker.name}: {cause}")
            self.supervisor.recoveries.failed(worker.name, cause, "another is started in its place")
        except ClusterError as error:
            self._give_up(error)
            return
        _beside(f"start {worker.name}", self._replace, worker, lost)

    def _replace(self, worker: Worker, lost: _Standing) -> None:
        """Start another in the place of a lost one, unless that is gone with its node and fewer may go on."""
        if self.elastic is not None and lost.raylet is not None and unanswered(lost.raylet) is not None:
            with self._lock:
                may_go = self.wanted > self.elastic.fewest
                self.wanted -= may_go
            if may_go:
                self.elastic.pool.give_back(worker.slot, is_gone=True)
                self._left(worker, 0.0, "its node is gone; ")
                return
        if not lost.joins:
            self.supervisor.recoveries.on_restart(worker.name, None)
        self._start(worker.another(worker.name, worker.slot), _Standing("starting", lost.since, lost.joins))

    def _start(self, fresh: Worker, standing: _Standing) -> None:
        assert self.build is not None
        with self._lock:
            if self.supervisor.closed:
                fresh.kill()
                return
            fresh.is_built = False
            self._standings[fresh] = standing
            # Ending the set ends the new process, too.
            self.worker_group.workers.append(fresh)
        timeout_s = self.supervisor.start_timeout_s
        try:
            self.worker_group.where(timeout_s, [fresh])
            if self.vacated is not None:
                standing.state = "unbuilt"
                self._changed.set()
                return
            wait_all([fresh], [self.build(fresh)], timeout_s, f"start {fresh.name} again")
        except WorkerFailed as error:
            self.lose(fresh, str(error))
        except GrpoRlError as error:
            self._give_up(error)
        else:
            self._made(fresh)

    def _made(self, fresh: Worker) -> None:
        with self._lock:
            if (standing := self._standings.get(fresh)) is None:
                return
            fresh.is_built, standing.state = True, "ready"
        if not standing.joins:
            self.supervisor.recoveries.on_restart(fresh.name, fresh.pid)
        self._watch(fresh, standing)
        self._changed.set()

    def _watch(self, worker: Worker, standing: _Standing) -> None:
        if self.elastic is not None and not runs_here():
            standing.raylet = next(iter(raylets({worker.name: worker.slot}).values()))
        self.supervisor.watch(worker, self.lose)

    def _give_up(self, error: GrpoRlError) -> None:
        with self._lock:
            self._failure = self._failure or error
        self._changed.set()

    # ---- others join and leave ---------------------------------------------------------------------------

    def resize(self, change: int, node: str | None = None) -> str:
        """Let so many replicas join, on this node of Ray's if one is named, or leave if below 0; say what
        will happen.

        Raises ConfigError if there would be too many or too few.
        """
        assert self.elastic is not None
        with self._lock:
            num_wanted = self.wanted + change
            if not self.elastic.fewest <= num_wanted <= self.elastic.most:
                key = f"max_replicas={self.elastic.most}" if change > 0 else f"min_replicas={self.elastic.fewest}"
                raise ConfigError(f"{self.wanted} engines and {change:+d}: actor_rollout_ref.rollout.{key}")
            self.wanted = num_wanted
            names = [f"rollout{self._next_number + k}" for k in range(change)]
            self._next_number += len(names)
            self._leaving += max(0, -change)
        for name in names:
            _beside(f"start {name}", self._join, name, node)
        self._changed.set()
        what = f"{', '.join(names)} will join" if names else f"{-change} will leave"
        return f"{what}: {num_wanted} engine{'s' * (num_wanted > 1)} then"

    def _join(self, name: str, node: str | None) -> None:
        assert self.elastic is not None
        since = time.monotonic()
        try:
            slot = self.elastic.pool.another(self.elastic.devices, self.supervisor.start_timeout_s, node)
        except ClusterError as error:
            with self._lock:
                self.wanted -= 1
            self.supervisor.recoveries.warn(f"engines: {name} does not join: {error}")
            return
        for joined in set(nodes_of(slot.placement_group)):
            _beside(f"functions for {name}", self.elastic.on_place, joined)
        self._start(self._first.another(name, slot), _Standing("starting", since, joins=True))

    def _end(self, worker: Worker) -> None:
        assert self.elastic is not None
        began = time.monotonic()
        self.supervisor.forget(worker)
        end_workers([worker])
        self.elastic.pool.give_back(worker.slot)
        self._left(worker, time.monotonic() - began)

    def _left(self, worker: Worker, seconds: float, why: str = "") -> None:
        self.supervisor.recoveries.came_or_went(worker.name, "left", seconds, f"{why}{self.wanted} are to go on")


class EngineOrders(Watch):
    """Obeys orders for more or fewer replicas, from the file that `grpo-rl engines` writes and from nodes
    that join.

    It keeps `engines` of status.json true: who serves, the bounds, and an answer to each order.
    """

    join_timeout_s = 5.0

    def __init__(self, replicas: Replicas, elastic: Elastic, file: Path, tell: Callable[[dict[str, Any]], None]) -> None:
        self._replicas, self._elastic, self._file, self._tell = replicas, elastic, file, tell
        self._read = len(self._content())
        self._answers: dict[str, str] = {}
        self._told: dict[str, Any] = {}
        self._nodes = {node["NodeID"] for node in _nodes()}
        super().__init__("engine orders")

    def run(self) -> None:
        while not self.stopping.wait(ORDERS_S):
            for key, change in self._orders():
                self._answers[key] = self._obey(change)
            for node in _nodes():
                if node["Alive"] and node["NodeID"] not in self._nodes:
                    self._nodes.add(node["NodeID"])
                    # On CPUs engines own no cores: a node gets one.
                    room = int(node["Resources"]["GPU"]) // self._elastic.devices if "GPU" in node["Resources"] else 1
                    self._obey(min(room, self._elastic.most - self._replicas.wanted), node["NodeID"])
            engine_state = {
                "serving": [worker.name for worker in self._replicas.serving],
                "wanted": self._replicas.wanted,
                "fewest": self._elastic.fewest,
                "most": self._elastic.most,
                "answers": dict(self._answers),
            }
            if engine_state != self._told:
                self._told = engine_state
                self._tell(engine_state)

    def _obey(self, change: int, node: str | None = None) -> str:
        try:
            return self._replicas.resize(change, node) if change else "nothing changes"
        except ConfigError as error:
            return f"refused: {error}"

    def _orders(self) -> Iterator[tuple[str, int]]:
        """Yield the key and the change of each order that has come since; a line that is none is passed over."""
        complete_part, _, _ = self._content()[self._read :].rpartition(b"\n")
        self._read += len(complete_part) + bool(complete_part)
        for line in complete_part.splitlines():
            try:
                order = json.loads(line)
                key, change = str(order["key"])[:32], order["change"]
            except (ValueError, KeyError, TypeError, RecursionError):
                continue
            if isinstance(change, int):
                yield key, change

    def _content(self) -> bytes:
        try:
            return self._file.read_bytes()
        except OSError:
            return b""


def _beside(name: str, function: Callable[..., None], *arguments: Any) -> None:
    threading.Thread(target=function, args=arguments, name=name, daemon=True).start()


def _nodes() -> list[dict[str, Any]]:
    """Return the nodes of a cluster, which may come and go; none of a local Ray."""
    return [] if runs_here() else ray.nodes()
