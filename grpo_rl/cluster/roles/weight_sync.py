"""Transfer of weights from the actor's ranks to the engines, bucket by bucket, never through a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import ray

from grpo_rl.cluster.processes.worker_sets import Worker, WorkerFailed, WorkerSet, fetch, settle, wait_all
from grpo_rl.cluster.recovery.supervised_sets import SetRestarted, SupervisedSet
from grpo_rl.cluster.roles.actor_role import ActorRole
from grpo_rl.errors import ClusterError
from grpo_rl.rollout.engine import NcclRendezvous, WeightBackend
from grpo_rl.rollout.weights.buckets import check_digests, merge_ranks

OnLoss = Callable[[Worker, WorkerFailed], None]


class BroadcastBroken(WorkerFailed):
    """An error: a broadcast lost a member, so that all others wait in it for ever."""

    def __init__(self, message: str, *, restarted: bool = False) -> None:
        super().__init__(message)
        self.restarted = restarted
        """True where the actor's ranks have been started again already."""


class Transfer:
    """A transfer of the actor's weights to the engines, in the way that `checkpoint_engine.backend` names.

    The actor's ranks walk through the model together, because a whole tensor is gathered from all of them, and pack one
    bucket after the other. The controller asks all ranks for the next bucket and all engines to load it; only a
    reference to the bytes passes through the controller. Through Ray's object store and by NCCL the next bucket is packed
    while this one is loaded. With CUDA IPC a bucket's memory is in use until every engine has answered, so that one
    follows the other.

    An engine that fails on the way is left out, the others get everything. When the actor fails and is started again,
    its weights are the same to the bit: its walk begins anew, and each engine is given the buckets that it lacks.

    NCCL is different in two ways. Its group has fixed members, so it is made anew before a transfer between other processes
    than the last one's. And a broadcast that lost a member ends for none of the others, so that ranks and engines that took
    part in it are all started again.
    """

    def __init__(
        self,
        backend: WeightBackend,
        actors: SupervisedSet | None,
        engines: WorkerSet,
        devices_per_engine: int,
        start_timeout_s: float,
    ) -> None:
        """`actors` is None in a run whose engines keep the weights of the model's folder: then nothing can be transferred.

        `start_timeout_s` is how long the members of a group by NCCL wait for each other.
        """
        self._start_timeout_s = start_timeout_s
        self.backend = backend
        self._actors = actors
        self._devices_per_engine = devices_per_engine
        self._connected: tuple[Worker, ...] = ()
        """The members of the NCCL group: the rank that sends, and the engines in their order."""
        self.call_timeout_s = engines.call_timeout_s
        if backend == "nccl":
            self._connect(engines.workers)

    @property
    def actors(self) -> SupervisedSet:
        """The processes that send."""
        assert self._actors is not None, "nothing is transferred without an actor"
        return self._actors

    def run(self, actor: ActorRole, engines: list[Worker], on_loss: OnLoss) -> int:
        """Send every tensor to every engine; return the number of bytes of one copy, 0 where no engine is left.

        The caller has the engines begin the update before and finish it after. `on_loss` is called with each that failed.
        """
        loaded = dict.fromkeys(engines, 0)

        def lost(engine: Worker, error: WorkerFailed) -> None:
            if self.backend == "nccl":
                raise BroadcastBroken(str(error)) from error
            del loaded[engine]
            on_loss(engine, error)

        while loaded:
            try:
                return self._run(actor, loaded, lost)
            except BroadcastBroken as error:
                self._start_all_again(loaded, on_loss, error, ranks=not error.restarted)
            except SetRestarted as error:
                if self.backend == "nccl" and any(loaded.values()):
                    # A broadcast goes to all, so that none can be left out that has its bucket already.
                    self._start_all_again(loaded, on_loss, error, ranks=False)
        return 0

    def check(self, actor: ActorRole, engines: list[Worker], on_loss: OnLoss) -> None:
        """Raise WeightTransferError, naming the tensors, unless every engine received exactly what was sent."""
        sent = actor.worker_set.call("sent_digests")[0]
        calls = [engine.call("received_digests") for engine in engines]
        for engine, received in settle(engines, calls, self.call_timeout_s, "rollout.received_digests", on_loss).items():
            check_digests(sent, received, engine.name)

    def _run(self, actor: ActorRole, loaded: dict[Worker, int], lost: OnLoss) -> int:
        """Walk over the weights once. `loaded`, the number of buckets that each engine has, grows as they are loaded."""
        num_bytes = sum(actor.worker_set.call("begin_weight_sync")[:1])
        if self.backend == "nccl" and self._connected != (self.actors.workers[0], *loaded):
            self._connect(list(loaded))
        number = 0
        more, buckets = self._next()
        while more:
            bucket = merge_ranks(ray.get(buckets, timeout=self.call_timeout_s)) if self.backend == "ipc" else buckets[0]
            loading = {engine: engine.call("load_bucket", bucket) for engine, count in loaded.items() if count <= number}
            following = None
            try:
                if self.backend != "ipc":
                    following = self._next(loading if self.backend == "nccl" else {})
            finally:
                # Also where packing has failed: an engine that has loaded a bucket must not be sent it again. By NCCL there is
                # nothing to wait for then: the engines do not end.
                if following is not None or self.backend != "nccl":
                    refs = list(loading.values())
                    for engine in settle(list(loading), refs, self.call_timeout_s, "rollout.load_bucket", lost):
                        loaded[engine] = number + 1
            number += 1
            more, buckets = following or self._next()
        return num_bytes

    def _next(self, loading: Mapping[Worker, ray.ObjectRef] = MappingProxyType({})) -> tuple[bool, list[ray.ObjectRef]]:
        """Return whether there is another bucket, and a reference to what each rank made of it. Raises SetRestarted.

        `loading` are engines that take part in the broadcast of the bucket before, for which the sending rank waits.
        """

        def look() -> None:
            waiting = list(loading.values())
            done = set(ray.wait(waiting, num_returns=len(waiting), timeout=0)[0]) if waiting else set()
            for engine, ref in loading.items():
                if ref in done:
                    try:
                        fetch(engine, ref, "rollout.load_bucket")
                    except WorkerFailed as error:
                        raise BroadcastBroken(str(error)) from error

        workers = self.actors.workers
        pairs = [w.actor.call_pair.options(num_returns=2).remote("next_bucket") for w in workers]
        try:
            there = wait_all(workers, [pair[0] for pair in pairs], self.actors.call_timeout_s, "actor.next_bucket", look)
        except BroadcastBroken:
            raise
        except WorkerFailed as error:
            self.actors.recover(error, "the weight transfer")
            if loading:
                raise BroadcastBroken(str(error), restarted=True) from error
            raise SetRestarted("the actor was started again in a weight transfer") from error
        return there[0], [pair[1] for pair in pairs]

    def _start_all_again(self, loaded: dict[Worker, int], on_loss: OnLoss, error: ClusterError, *, ranks: bool) -> None:
        """End every process that takes part in a broken broadcast; others come in their places."""
        why = f"a weight transfer by NCCL broke off, in which it took part: {error}"
        self._connected = ()
        for engine in list(loaded):
            del loaded[engine]
            on_loss(engine, WorkerFailed(why, [engine]))
        if ranks:
            self.actors.recover(WorkerFailed(why, self.actors.workers), "the weight transfer")

    def _connect(self, engines: Sequence[Worker]) -> None:
        """Connect rank 0 of the actor and every process of these engines in one NCCL group, in place of the last one."""
        address, _, port = self.actors.where(self.actors.call_timeout_s)[0]
        step = self._devices_per_engine
        world_size = 1 + step * len(engines)
        workers = [self.actors.workers[0], *engines]
        offsets = [0, *(1 + step * i for i in range(len(engines)))]
        places = [NcclRendezvous(address, port, world_size, offset, self._start_timeout_s) for offset in offsets]
        refs = [worker.call("connect", place) for worker, place in zip(workers, places, strict=True)]
        try:
            wait_all(workers, refs, self.actors.call_timeout_s, "connect for weight transfer")
        except WorkerFailed as error:
            raise BroadcastBroken(str(error)) from error
        self._connected = tuple(workers)
