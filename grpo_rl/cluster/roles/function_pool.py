"""The function hosts of a run, one on each node: batches go to those with room, answers come back.

One thread for each host waits for what has happened there. A host that is lost gives its work to others, and
is replaced unless its node is gone: functions of the same arguments give the same results on every node.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import ray

from grpo_rl.cluster.processes.placement import NodeSlot
from grpo_rl.cluster.processes.worker_group import StoredBlock, Worker, WorkerFailed, WorkerGroup, wait_all
from grpo_rl.cluster.recovery.supervisor import Supervisor
from grpo_rl.cluster.roles.function_host import BROKEN, ENVIRONMENT, LOST, FunctionHost, FunctionSpec, SentOutcome, StoredText
from grpo_rl.cluster.session.liveness import unanswered
from grpo_rl.columns import View
from grpo_rl.config.schema.reward import JudgeConfig
from grpo_rl.envs.runtime.environment_pool import Event
from grpo_rl.errors import ClusterError, GrpoRlError
from grpo_rl.processes.child import KILL_S
from grpo_rl.rewards.contract import Sample
from grpo_rl.rewards.models.judge_question import JudgeSpec
from grpo_rl.rewards.runtime.judge_process import share_of
from grpo_rl.rewards.runtime.process import Job
from grpo_rl.rewards.runtime.processes import Broken, Done

WAIT_S = 10.0
AHEAD = 256
"""Responses that a host has at most for each of its reward processes: it gets more when half of them are done."""
FIRST_JOINED = 1000
"""The first number among the logs of a host that has joined, and its multiples for further ones."""
GATHER_S = 0.01


class FunctionPool:
    def __init__(self, worker_group: WorkerGroup, spec: FunctionSpec, cores: Sequence[int], supervisor: Supervisor) -> None:
        """`cores` has those of each host's node that its processes may use."""
        self.worker_group, self.spec, self._supervisor = worker_group, spec, supervisor
        self._cores = {worker: (cores[k], k, len(cores)) for k, worker in enumerate(worker_group.workers)}
        """What each host is built from besides what all have: cores, its number, and the hosts that numbers are shared with."""
        self._clients: dict[str, ScorerClient | EnvironmentClient] = {}  # called in the hosts' threads
        self._broken: GrpoRlError | None = None
        self._lock, self._closed = threading.Lock(), threading.Event()

    def start_build(self) -> list[ray.ObjectRef]:
        return [self._build(worker) for worker in self.worker_group.workers]

    def _build(self, worker: Worker) -> ray.ObjectRef:
        return worker.actor.build.remote(FunctionHost, self.spec, *self._cores[worker])

    def listen(self) -> str:
        """Begin to hear what happens on the hosts, which are built; return what runs where, and within which walls."""
        lines: dict[str, list[str]] = {}
        for worker, (node, sizes, walls) in zip(self.worker_group.workers, self.worker_group.call("describe"), strict=True):
            processes = ", ".join(f"{count} {name} process{'es' * (count > 1)}" for name, count in sizes.items())
            lines.setdefault("; ".join(filter(None, (processes, walls))), []).append(node)
            threading.Thread(target=self._listen, args=(worker,), name=worker.name, daemon=True).start()
        return "; ".join(f"on {', '.join(nodes)}: {what}" for what, nodes in lines.items())

    def join(self, slot: NodeSlot, cores: int) -> None:
        """Start a host on a node that has joined, and wait for it; if it cannot start there, the others go on, with a warning."""
        with self._lock:
            number = FIRST_JOINED * (1 + len(self._cores))
            fresh = self.worker_group.workers[0].another(f"functions{len(self._cores)}", slot)
            self._cores[fresh] = cores, number, 1
            self.worker_group.workers.append(fresh)
        try:
            self._begin(fresh)
        except GrpoRlError as error:
            fresh.kill(str(error))
            with self._lock:
                self.worker_group.workers.remove(fresh)
            self._supervisor.recoveries.warn(f"functions do not run on a node that has joined: {error}")
        else:
            self._listen(fresh)

    def _begin(self, fresh: Worker) -> None:
        self.worker_group.where(self._supervisor.start_timeout_s, [fresh])
        wait_all([fresh], [self._build(fresh)], self._supervisor.start_timeout_s, f"start {fresh.name}")
        self._supervisor.watch(fresh)
        for service, client in self._clients.items():
            self._introduce(service, client, fresh)

    def _introduce(self, service: str, client: ScorerClient | EnvironmentClient, worker: Worker) -> None:
        client.joined(worker, self.spec.sizes(self._cores[worker][0])[service])

    def scorer(self, service: str, done: Done, broken: Broken) -> ScorerClient:
        spec, put = self.spec.scorers[service], partial(self._put, service)
        client = JudgeClient(spec.config, put, done, broken) if isinstance(spec, JudgeSpec) else ScorerClient(put, done, broken)
        self._enter(service, client)
        return client

    def environments(self) -> EnvironmentClient:
        client = EnvironmentClient(partial(self._put, ENVIRONMENT))
        self._enter(ENVIRONMENT, client)
        return client

    def close(self) -> None:
        self._closed.set()
        workers = list(self.worker_group.workers)
        ray.wait([worker.call("close") for worker in workers], num_returns=len(workers), timeout=KILL_S)
        self.worker_group.shutdown()

    def _enter(self, service: str, client: ScorerClient | EnvironmentClient) -> None:
        with self._lock:
            self._clients[service] = client
            workers = list(self.worker_group.workers)
        for worker in workers:
            self._introduce(service, client, worker)
        if self._broken is not None:
            client.broke(self._broken)

    def _put(self, service: str, worker: Worker, batch: Any) -> None:
        worker.call("put", service, batch)  # one that is lost is noticed by whoever listens to it

    def _listen(self, worker: Worker) -> None:
        patience_s = WAIT_S + self.worker_group.call_timeout_s
        try:
            while not self._closed.is_set():
                try:
                    heard = wait_all([worker], [worker.listen("take", WAIT_S)], patience_s, "functions.take")[0]
                except GrpoRlError as error:
                    if self._closed.is_set() or self._supervisor.closed:
                        return
                    if (fresh := self._replaced(worker, error)) is None:
                        return
                    worker, heard = fresh, []
                for service, message in heard:
                    if service == BROKEN:
                        self._break(message)
                    elif service == LOST:  # what its ranks find out as well: the run goes back to a checkpoint
                        self._break(WorkerFailed(message, [worker]))
                    else:
                        self._clients[service].heard(worker, message)
        except GrpoRlError as error:
            self._break(error)
        except Exception as error:  # a thread's own exception would be lost
            self._break(ClusterError(f"{worker.name}: {type(error).__name__}: {error}"))

    def _replaced(self, worker: Worker, error: GrpoRlError) -> Worker | None:
        """Return a new host in the place of one that is lost; None if its node is gone and others go on. Raises ClusterError."""
        since, recoveries = time.monotonic(), self._supervisor.recoveries
        worker.kill(str(error))
        self._supervisor.forget(worker)
        for client in self._clients.values():
            client.lost(worker, str(error))
        with self._lock:
            self.worker_group.workers.remove(worker)
        node = next(node for node in ray.nodes() if node["NodeID"] == worker.slot.node)
        if not node["Alive"] or unanswered((node["NodeManagerAddress"], node["NodeManagerPort"])) is not None:
            if not self.worker_group.workers:
                raise error
            recoveries.warn(f"recovery: {worker.name} is gone with its node; its work goes to the other nodes")
            return None
        if not recoveries.restarts:
            raise error
        recoveries.failed(worker.name, str(error), "another is started in its place")
        fresh = worker.another(worker.name, worker.slot)
        with self._lock:
            self._cores[fresh] = self._cores.pop(worker)
            self.worker_group.workers.append(fresh)
        try:
            self._begin(fresh)
        except WorkerFailed:
            return fresh  # lost in its turn, which the next call to it shows
        recoveries.on_restart(fresh.name, fresh.pid)
        recoveries.recovered(fresh.name, "functions", time.monotonic() - since, "it scores and plays again")
        return fresh

    def _break(self, why: GrpoRlError) -> None:
        self._broken = why
        for client in self._clients.values():
            client.broke(why)


class ScorerClient:
    def __init__(self, put: Callable[[Worker, Any], None], done: Done, broken: Broken) -> None:
        self._put, self._done, self.broke = put, done, broken
        self._sizes: dict[Worker, int] = {}  # processes of each host
        self._lock = threading.Lock()
        self._has_new, self._closed = threading.Event(), False
        self._waiting: deque[Job] = deque()
        self._serials = itertools.count()
        self._sent: dict[Worker, dict[int, Job]] = {}
        threading.Thread(target=self._send, name="rewards", daemon=True).start()

    def put(self, jobs: Sequence[Job]) -> None:
        self._waiting.extend(jobs)
        self._has_new.set()

    def check_started(self) -> None:
        """Return at once: hosts are built when their processes are ready."""

    def close(self) -> None:
        self._closed = True
        self._has_new.set()

    def _send(self) -> None:
        while not self._closed:
            if not self._has_new.wait(WAIT_S):
                continue
            time.sleep(GATHER_S)
            self._has_new.clear()
            with self._lock:
                self._feed()

    def joined(self, worker: Worker, size: int) -> None:
        with self._lock:
            self._sizes[worker] = size
            self._sent.setdefault(worker, {})
            self._changed()
            self._feed()

    def lost(self, worker: Worker, cause: str) -> None:
        with self._lock:
            self._waiting.extendleft(reversed(self._sent.pop(worker, {}).values()))
            self._changed()
            self._feed()

    def heard(self, worker: Worker, said: Iterable[SentOutcome]) -> None:
        done = []
        with self._lock:
            sent = self._sent.get(worker, {})
            for number, outcomes, failed_as_whole, seconds in said:
                if (job := sent.pop(number, None)) is not None:
                    job.outcomes, job.failed_as_whole, job.seconds = outcomes, failed_as_whole, seconds
                    done.append(job)
            self._feed()
        self._done(done)

    def _feed(self) -> None:
        """Send what waits to hosts with room, those with the least first; each leaves their share to the others."""
        hosts = [(worker, sent) for worker, sent in self._sent.items() if self._sizes[worker]]
        for worker, sent in sorted(hosts, key=lambda entry: len(entry[1]) / self._sizes[entry[0]]):
            size, limit = self._sizes[worker], AHEAD * self._sizes[worker]
            if not self._waiting:
                return
            if len(sent) >= size and len(sent) > limit // 2:  # it gets more when many can be sent at once
                continue
            share = -(-len(self._waiting) // len(hosts))
            jobs = [self._waiting.popleft() for _ in range(min(share, limit - len(sent)))]
            batch = []
            for job in jobs:
                number = next(self._serials)
                sent[number] = job
                batch.append((number, job.functions, job.batched, job.size, [_sent_sample(sample()) for sample in job.samples]))
            self._put(worker, batch)

    def _changed(self) -> None: ...


class JudgeClient(ScorerClient):
    """What the configuration allows to the judge is divided over the nodes that there are."""

    def __init__(self, config: JudgeConfig, *arguments: Any) -> None:
        self._config = config
        super().__init__(*arguments)

    def _changed(self) -> None:
        """Tell every host its share; one without any is sent no job."""
        for place, worker in enumerate(self._sent):
            share = share_of(self._config, place, len(self._sent))
            self._sizes[worker] = share.num_requests
            self._put(worker, share)


def _sent_sample(sample: Sample) -> Sample:
    """Return the sample as it is sent: a text in the object store as a `StoredText`."""
    text: Any = sample.solution_str
    stays = isinstance(text, View) and isinstance(text.block, StoredBlock)
    text = StoredText(text.block, text.start, text.length) if stays else str(text)
    return sample._replace(solution_str=text)


class EnvironmentClient:
    """Environments on all nodes, as `EnvironmentPool` has those of one. It is used from one thread.

    Calls are sent with the next look at events, all for one host at once. A host's episodes are lost with it, and may be begun again.
    """

    def __init__(self, put: Callable[[Worker, Any], None]) -> None:
        self._put = put
        self._inbox: queue.SimpleQueue[tuple[str, Worker | None, Any]] = queue.SimpleQueue()
        self._calls: dict[Worker, list[tuple[str, tuple[Any, ...]]]] = {}
        """What is sent to each host next."""
        self._place: dict[str, Worker] = {}
        self._unplaced: dict[str, Mapping[str, Any]] = {}
        self._awaited: set[str] = set()

    @property
    def num_waiting(self) -> int:
        return len(self._awaited)

    def begin(self, episode: str, start: Mapping[str, Any]) -> None:
        """Begin an episode on the node with the fewest; the answer is an event."""
        self._unplaced[episode] = start
        self._awaited.add(episode)

    def step(self, episode: str, turn: Mapping[str, Any]) -> None:
        self._awaited.add(episode)
        self._call(episode, "step", episode, dict(turn))

    def end(self, episode: str) -> None:
        """Close an episode; no event comes for it any more."""
        self._awaited.discard(episode)
        self._unplaced.pop(episode, None)
        self._call(episode, "end", episode)
        self._place.pop(episode, None)

    def events(self, wait_s: float = 0.0) -> list[Event]:
        """Return what has happened, after waiting up to `wait_s` for the first event. Raises ClusterError if no more can happen."""
        events = self._heard(0.0)
        self._send()
        if not events and wait_s > 0:
            events = self._heard(wait_s)
            self._send()
        return events

    def _heard(self, wait_s: float) -> list[Event]:
        events: list[Event] = []
        with contextlib.suppress(queue.Empty):
            arrived = self._inbox.get(timeout=wait_s) if wait_s else self._inbox.get_nowait()
            while True:
                what, worker, message = arrived
                if what == "broke":
                    raise message
                assert worker is not None
                if what == "joined":
                    self._calls.setdefault(worker, [])
                elif what == "lost":
                    self._calls.pop(worker, None)
                    for episode in sorted(episode for episode, host in self._place.items() if host is worker):
                        del self._place[episode]
                        events.append(Event(episode, "lost", cause=message))
                elif what == "heard":
                    events += [event for event in message if self._place.get(event.episode) is worker]
                arrived = self._inbox.get_nowait()
        for event in events:
            self._awaited.discard(event.episode)
            if event.what == "lost":
                self._place.pop(event.episode, None)
        return events

    def close(self) -> None: ...

    def joined(self, worker: Worker, size: int) -> None:
        self._inbox.put(("joined", worker, None))

    def lost(self, worker: Worker, cause: str) -> None:
        self._inbox.put(("lost", worker, cause))

    def heard(self, worker: Worker, said: Any) -> None:
        self._inbox.put(("heard", worker, said))

    def broke(self, why: GrpoRlError) -> None:
        self._inbox.put(("broke", None, why))

    def _call(self, episode: str, method: str, *arguments: Any) -> None:
        if (worker := self._place.get(episode)) is not None:
            self._calls[worker].append((method, arguments))

    def _send(self) -> None:
        if self._unplaced and self._calls:
            num_episodes = Counter(self._place.values())
            for episode, start in self._unplaced.items():
                self._place[episode] = worker = min(self._calls, key=num_episodes.__getitem__)
                num_episodes[worker] += 1
                self._call(episode, "begin", episode, dict(start))
            self._unplaced.clear()
        for worker, calls in self._calls.items():
            if calls:
                self._put(worker, calls)
                self._calls[worker] = []
