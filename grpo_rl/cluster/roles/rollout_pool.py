"""All rollout replicas together: requests by load, weights in buckets and never through a file, versions checked."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import ray

from grpo_rl.cluster.processes.worker_group import StoredBlock, Worker, WorkerFailed, WorkerGroup, fetch, settle, wait_all
from grpo_rl.cluster.recovery.replicas import Replicas
from grpo_rl.cluster.roles.trained_roles import ActorRole
from grpo_rl.errors import ClusterError, WeightVersionError
from grpo_rl.frozen import frozen
from grpo_rl.rollout.engine import NcclRendezvous, WeightBackend
from grpo_rl.rollout.reports import Report, unpack
from grpo_rl.rollout.requests import RequestPool
from grpo_rl.rollout.weights import check_digests, merge_ranks
from grpo_rl.types import Metrics, Request

HOMES = 2**17
W = TypeVar("W", bound=Hashable)


class Ledger(Generic[W]):
    """The unanswered requests: waiting, or in flight at exactly one replica. More may be added at any time."""

    def __init__(self, requests: Iterable[Request] = ()) -> None:
        self.waiting: deque[Request] = deque(requests)
        self.in_flight: dict[W, dict[str, Request]] = {}
        self._homes: dict[str, W] = {}

    @property
    def begun(self) -> bool:
        return any(self.in_flight.values())

    def add(self, requests: Iterable[Request]) -> None:
        self.waiting.extend(requests)

    def join(self, worker: W) -> None:
        self.in_flight.setdefault(worker, {})

    def leave(self, worker: W) -> int:
        """Ask a replica no more: its unanswered requests wait again, before all others. Return their number."""
        unfinished = self.in_flight.pop(worker, {})
        self.waiting.extendleft(reversed(unfinished.values()))
        return len(unfinished)

    def dispatch(self, capacity: int, refill_below: int | None = None) -> dict[W, list[Request]]:
        """Take waiting requests for the replicas with the fewest in flight, up to `capacity` each; they are
        in flight then.

        Replicas with `refill_below` or more get none now, so that each is sent many at a time. A request of a
        conversation goes where that was before, if there is room: that replica's prefix cache has what came
        before.
        """
        assigned_requests: dict[W, list[Request]] = {}
        below = capacity if refill_below is None else refill_below
        hungry = [worker for worker, requests in self.in_flight.items() if len(requests) < below]
        while self.waiting and hungry:
            home = self._home(self.waiting[0], capacity)
            worker = min(hungry, key=lambda w: len(self.in_flight[w])) if home is None else home
            if len(self.in_flight[worker]) >= capacity:
                break
            request = self.waiting.popleft()
            if request.conversation:
                if len(self._homes) >= HOMES:
                    self._homes.clear()  # the next turns go anywhere, and cost a prefix each
                self._homes[request.conversation] = worker
            self.in_flight[worker][request.request_id] = request
            assigned_requests.setdefault(worker, []).append(request)
        return assigned_requests

    def _home(self, request: Request, capacity: int) -> W | None:
        worker = self._homes.get(request.conversation) if request.conversation else None
        return worker if worker is not None and len(self.in_flight.get(worker, range(capacity))) < capacity else None

    def answered(self, worker: W, request_id: str) -> bool:
        """Note an answer; return whether it is the one that counts: the first, and from the request's replica."""
        return self.in_flight.get(worker, {}).pop(request_id, None) is not None

    def forget(self, request_ids: Collection[str]) -> None:
        self.waiting = deque(request for request in self.waiting if request.request_id not in request_ids)
        for requests in self.in_flight.values():
            for request_id in requests.keys() & set(request_ids):
                del requests[request_id]


OnLoss = Callable[[Worker, WorkerFailed], None]


@dataclass(eq=False)
class Transfer:
    """A transfer of the actor's weights to the engines, in the way that `checkpoint_engine.backend` names.

    The actor's ranks walk through the model together, as a whole tensor is gathered from all of them, and
    pack bucket after bucket, which all engines load; only a reference passes through the controller. By Ray's
    object store and by NCCL the next bucket is packed while this one is loaded; with CUDA IPC its memory is
    in use until every engine has answered. An engine that fails on the way is left out.

    NCCL's group has fixed members: it is made anew before a transfer between other processes. A broadcast
    that lost a member ends for none of the others, so that an engine's failure raises WorkerFailed, as a
    rank's does.
    """

    backend: WeightBackend
    actors: WorkerGroup
    engines: WorkerGroup
    devices_per_engine: int
    start_timeout_s: float
    """How long the members of a group by NCCL wait for each other."""
    verify: bool = False
    """True if checksums are compared."""
    _connected: tuple[Worker, ...] = ()
    """The members of the NCCL group: the rank that sends, and the engines in their order."""

    def __post_init__(self) -> None:
        self.call_timeout_s = self.engines.call_timeout_s
        if self.backend == "nccl":
            self._connect(self.engines.workers)

    def run(self, engines: list[Worker], on_loss: OnLoss) -> int:
        """Send every tensor to every engine; return the number of bytes of one copy, 0 if no engine is left.

        `on_loss` is called with each engine that failed, and takes it out of `engines`. Raises
        WeightTransferError, naming the tensors, if an engine received something else than what was sent.
        """
        num_bytes = sum(self.actors.call("begin_weight_sync")[:1])
        if self.backend == "nccl" and self._connected != (self.actors.workers[0], *engines):
            self._connect(engines)
        has_more, buckets = self._next()
        while has_more and engines:
            parts: list[Any] = [buckets[0]] * len(engines)
            if self.backend == "ipc":
                bucket = merge_ranks(ray.get(buckets, timeout=self.call_timeout_s))
                slots = [engine.slot for engine in engines]
                parts = [bucket.of_reader(slots[:number].count(slot)) for number, slot in enumerate(slots)]
            loading = {engine: engine.call("load_bucket", part) for engine, part in zip(engines, parts, strict=True)}
            following = None if self.backend == "ipc" else self._next(loading if self.backend == "nccl" else {})
            if self.backend != "nccl":
                settle(loading, self.call_timeout_s, "rollout.load_bucket", on_loss)
            has_more, buckets = following or self._next()
        if self.verify:
            sent = self.actors.call("sent_digests")[0]
            calls = {engine: engine.call("received_digests") for engine in engines}
            for engine, received in settle(calls, self.call_timeout_s, "rollout.received_digests", on_loss).items():
                check_digests(sent, received, engine.name)
        self.actors.call("end_weight_sync")
        return num_bytes if engines else 0

    def _next(self, loading: Mapping[Worker, ray.ObjectRef] = MappingProxyType({})) -> tuple[bool, list[ray.ObjectRef]]:
        """Return whether there is another bucket, and a reference to what each rank made of it.

        `loading` are engines that take part in the broadcast of the bucket before, for which the sending rank
        waits: if one of them fails, this raises its WorkerFailed and not the rank's at its deadline.
        """
        ranks = self.actors.workers
        pairs = [rank.call_for_two("next_bucket") for rank in ranks]
        refs = [pair[0] for pair in pairs] + list(loading.values())
        results = wait_all(
            [*ranks, *loading], refs, self.actors.call_timeout_s, "weight transfer" if loading else "actor.next_bucket"
        )
        return results[0], [pair[1] for pair in pairs]

    def _connect(self, engines: Sequence[Worker]) -> None:
        """Connect rank 0 of the actor and every process of these engines in one NCCL group, in place of the last one."""
        address, _, port = self.actors.where(self.actors.call_timeout_s)[0]
        step = self.devices_per_engine
        world_size = 1 + step * len(engines)
        workers = [self.actors.workers[0], *engines]
        offsets = [0, *(1 + step * i for i in range(len(engines)))]
        places = (NcclRendezvous(address, port, world_size, offset, self.start_timeout_s) for offset in offsets)
        refs = [worker.call("connect", place) for worker, place in zip(workers, places, strict=True)]
        wait_all(workers, refs, self.actors.call_timeout_s, "connect for weight transfer")
        self._connected = tuple(workers)


LEAST_AHEAD = 0.25
"""Requests that a replica has beyond those it samples at once, as a share of them: it never waits for the controller."""
POLL_S = 2.0
REPORTS_PER_S, REPORTS_OF_A_REPLICA_PER_S = 40, 10
"""Reports of all replicas, and of each, in a second, at most: one costs the controller about a millisecond, and a
response that has ended waits so long for others; the last ones of a step do not wait."""


@frozen
class PoolOptions:
    max_num_seqs: int
    sleeps: bool
    """True if engines give their memory back between generation and the next weight transfer."""
    step_timeout_s: float
    max_staleness: int | None = 0
    """The largest number of versions by which a rollout's token may be older than the engines' weights at
    hand-over; None if the schedule looks at that.
    """
    keep_cache: bool = False
    """True if requests keep the keys and values of the old weights after a weight update."""
    partial_rollout: bool = True
    """True if requests may live through a weight update; else those that have begun end first."""
    starts_asleep: bool = False
    """True if the engines gave back their memory, weights included, when they were built."""


class ReplicaPool(RequestPool):
    """protocols.RolloutPool over engine replicas in processes of their own. It is used from one thread.

    Replicas may die or freeze at any time (`Replicas`): what they had not answered is asked of others, with
    the same seeds. They sample on while the controller does other things, and get more when the pool is
    called.
    """

    def __init__(self, replicas: Replicas, transfer: Transfer | None, options: PoolOptions) -> None:
        super().__init__(options.max_staleness)
        self.replicas, self.transfer, self.options = replicas, transfer, options
        self._actor: ActorRole | None = None
        self._sleeping: set[Worker] = set(replicas.serving) if options.starts_asleep else set()
        self._keeps_weights = False
        self._updates_in_flight: bool | None = None
        """True if the engines take weights while requests are unfinished; None as long as none has said so."""
        self._ledger: Ledger[Worker] = Ledger()
        self._polls: dict[ray.ObjectRef, tuple[Worker, StoredBlock]] = {}
        self._quiet_s = 0.0

    # ---- weights -------------------------------------------------------------------------------------

    def sync_weights(self, actor: ActorRole) -> Metrics:
        """Bring every replica to the actor's weights; nothing moves if they are already there.

        Unfinished requests go on with the new weights if the engines take weights between two steps; other
        engines first end what they have begun. A replica that fails on the way is replaced; only those with
        all tensors serve.
        """
        self._actor = actor
        self.replicas.let_go()
        self._build_lost()
        if self.version == actor.version and not self._sleeping.intersection(self.replicas.serving):
            return {}
        if self._ledger.begun and not (self.options.partial_rollout and self._can_update_in_flight()):
            while self._ledger.begun:
                self._collect(POLL_S * 2, top_up=False)
        workers = self.replicas.serving + self.replicas.ready()
        num_bytes = self._update(workers, actor.version) if workers else 0
        self.version = actor.version
        return {"rollout/weight_bytes": float(num_bytes)}

    @contextmanager
    def keep_weights(self) -> Iterator[None]:
        """Ask nothing of the actor inside of this context: another thread works with it.

        Ranks that train would answer a transfer with weights newer than the version under which the others
        serve; and calls of two threads could reach ranks in different orders, each of which then waits in
        another collective.
        """
        self._keeps_weights = True
        try:
            yield
        finally:
            self._keeps_weights = False

    def _can_update_in_flight(self) -> bool:
        """Return whether the engines take weights while requests are unfinished, as all replicas of a run do, or none.

        They are asked once: a busy engine answers between two of its steps.
        """
        if self._updates_in_flight is None:
            calls = {worker: worker.call("updates_in_flight") for worker in self.replicas.serving}
            answers = self._settle(calls, "updates_in_flight")
            self._updates_in_flight = all(answers.values()) if answers else None
        return self._updates_in_flight is not False

    def _settle(self, calls: Mapping[Worker, ray.ObjectRef], method: str, on_loss: OnLoss | None = None) -> dict[Worker, Any]:
        return settle(calls, self.options.step_timeout_s, f"rollout.{method}", on_loss or self.replicas.failed)

    def _build_lost(self) -> None:
        """Build replacements that share GPUs with ranks. No rank works now; before, memory for an engine was not there."""
        built = self.replicas.build_apart()
        self._sleeping.update(built if self.options.sleeps else ())

    def _update(self, workers: list[Worker], version: int) -> int:
        """Give these replicas the actor's weights; those that have them serve from now on. Return the bytes
        moved.

        Those that sleep take memory for their weights before, and for their cache when the actor has given
        back what the transfer used. Each replica is told that an update begins (it samples no further), gets
        every bucket, and is told that this was all (it checks that nothing is missing, and samples on under
        the new version).
        """
        assert self.transfer is not None, "weights move where there is an actor"
        alive = list(workers)

        def left(worker: Worker, error: WorkerFailed) -> None:
            alive.remove(worker)
            self.replicas.failed(worker, error)

        def call(method: str, *arguments: Any, only: Collection[Worker] = workers) -> dict[Worker, Any]:
            return self._settle({worker: worker.call(method, *arguments) for worker in alive if worker in only}, method, left)

        sleeping = self._sleeping.intersection(workers)
        call("wake_up", "weights", only=sleeping)
        call("start_weight_update", version)
        num_bytes = self.transfer.run(alive, left)
        versions = call("finish_weight_update", self.options.keep_cache)
        call("wake_up", "kv_cache", only=sleeping)
        self._sleeping -= sleeping
        for worker, live in versions.items():
            if live != version:
                raise WeightVersionError(f"{worker.name} serves weights of version {live} after an update to {version}")
        for worker in alive:
            if worker not in self.replicas.serving:
                self.replicas.serve(worker, version)
        return num_bytes

    # ---- sampling ------------------------------------------------------------------------------------

    def _send(self, requests: list[Request], *, at_once: bool) -> None:
        self._ledger.add(requests)
        self._quiet_s = 0.0
        if at_once:
            self._admit()
            self._submit(self._dispatch())

    def forget(self, ids: Collection[str]) -> None:
        """Hand these rollouts over no more. Engines that have begun them end them, and their answers are dropped."""
        self._ledger.forget(ids)
        super().forget(ids)

    def rest(self) -> None:
        if self.options.sleeps and not self._wanted:
            self._sleeping.update(self._settle({worker: worker.call("sleep") for worker in self.replicas.serving}, "sleep"))

    def _collect(self, wait_s: float, *, top_up: bool = True) -> None:
        """Take what the replicas have completed; wait up to `wait_s` for the first of them that reports.

        The call that asks a replica for its next report brings it further requests.
        """
        began = time.monotonic()
        self._admit()
        in_flight = self._ledger.in_flight
        self._polls = {ref: poll for ref, poll in self._polls.items() if poll[0] in in_flight}
        polled = {worker for worker, _ in self._polls.values()}
        further = self._dispatch() if top_up else {}
        self._submit({worker: further.pop(worker) for worker in polled & further.keys()})
        for worker, requests in in_flight.items():
            if requests and worker not in polled:
                patience = self._patience(next(iter(requests.values())))
                reports, block = worker.call_for_two("report", further.get(worker, []), POLL_S, *patience)
                self._polls[reports] = (worker, StoredBlock(block))
        news = []
        if self._polls:
            news = [self._take(ref) for ref in ray.wait(list(self._polls), num_returns=1, timeout=wait_s)[0]]
        else:
            self.replicas.wait(min(wait_s, POLL_S))
        self._quiet_s = 0.0 if any(news) else self._quiet_s + time.monotonic() - began
        if self._quiet_s > self.options.step_timeout_s:
            waiting = ", ".join(
                f"{worker.name} ({len(requests)} in flight)" for worker, requests in in_flight.items() if requests
            )
            raise ClusterError(f"no response ended for {self.options.step_timeout_s:.0f} s on {waiting or 'no replica'}")

    def _patience(self, request: Request) -> tuple[float, int]:
        if request.conversation:
            return 0.0, 1  # the next turn waits for this one
        # A replica must not run out of what it was given in advance.
        enough = max(1, self._ahead() // 2) if self._ledger.waiting else self.options.max_num_seqs
        return max(1 / REPORTS_OF_A_REPLICA_PER_S, len(self._ledger.in_flight) / REPORTS_PER_S), enough

    def _ahead(self) -> int:
        """Return how many requests a replica gets beyond those that it samples at once.

        Half of its share of those that wait, so that no replica is at work for long when the others have none
        (guided self-scheduling: Polychronopoulos and Kuck 1987). If weights change while requests are
        unfinished, few go ahead: those that wait here are begun with the newest.
        """
        most = self.options.max_num_seqs
        share = len(self._ledger.waiting) // (2 * max(1, len(self._ledger.in_flight)))
        return max(int(LEAST_AHEAD * most), min(most, share) if self.max_staleness == 0 else 0)

    def _take(self, ref: ray.ObjectRef) -> bool:
        """Keep the reports of one poll; return whether one of them was waited for. The block of tokens is not fetched."""
        worker, block = self._polls.pop(ref)
        try:
            reports: list[Report] = fetch(worker, ref, "sampling")
        except WorkerFailed as error:
            self.replicas.failed(worker, error)
            return False
        counting = [report for report in unpack(reports, block) if self._ledger.answered(worker, report.request_id)]
        self._ended |= {report.request_id: report for report in counting}
        return bool(counting)

    def _admit(self) -> None:
        self.replicas.let_go()
        if not self.replicas.serving and not self._keeps_weights:
            # Otherwise the next weight transfer is soon enough: the others sample meanwhile.
            self._build_lost()
        for worker in [worker for worker in self._ledger.in_flight if worker not in self.replicas.serving]:
            if number := self._ledger.leave(worker):
                self.replicas.supervisor.recoveries.count("resampled", float(number))
        ready = self.replicas.ready()
        if self.version == 0 and not self._sleeping.intersection(ready):
            for worker in ready:
                self.replicas.serve(worker, 0)
        # An actor that has trained on has other weights by now: a replica that comes late waits for the next update.
        elif ready and self._actor is not None and self._actor.version == self.version and not self._keeps_weights:
            self._update(ready, self.version)
        for worker in self.replicas.serving:
            self._ledger.join(worker)

    def _dispatch(self) -> dict[Worker, list[Request]]:
        """Take waiting requests for the replicas with the fewest in flight, half of what they have in advance at once."""
        ahead = self._ahead()
        capacity = self.options.max_num_seqs + ahead
        return self._ledger.dispatch(capacity, capacity - ahead // 2)

    def _submit(self, requests: Mapping[Worker, list[Request]]) -> None:
        self._settle({worker: worker.call("submit", batch) for worker, batch in requests.items()}, "submit")
