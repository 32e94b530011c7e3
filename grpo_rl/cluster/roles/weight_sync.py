"""Transfer of weights from the actor's ranks to the engines, bucket by bucket, never through a file."""

from __future__ import annotations

from collections.abc import Callable

import ray

from grpo_rl.cluster.processes.worker_sets import Worker, WorkerFailed, WorkerSet, settle, wait_all
from grpo_rl.cluster.recovery.supervised_sets import SetRestarted, SupervisedSet
from grpo_rl.cluster.roles.actor_role import ActorRole
from grpo_rl.rollout.engine import NcclRendezvous, WeightBackend
from grpo_rl.rollout.weights.buckets import check_digests, merge_ranks

OnLoss = Callable[[Worker, WorkerFailed], None]


class Transfer:
    """A transfer of the actor's weights to the engines, in the way that `checkpoint_engine.backend` names.

    The actor's ranks walk through the model together, because a whole tensor is gathered from all of them, and pack one
    bucket after the other. The controller asks all ranks for the next bucket and all engines to load it; only a
    reference to the bytes passes through the controller. Through Ray's object store the next bucket is packed while
    this one is loaded. With CUDA IPC and NCCL a bucket's memory is in use until every engine has answered, so that one
    follows the other.

    An engine that fails on the way is left out, the others get everything. When the actor fails and is started again,
    its weights are the same to the bit: its walk begins anew, and each engine is given the buckets that it lacks.
    """

    def __init__(
        self, backend: WeightBackend, actors: SupervisedSet | None, engines: WorkerSet, devices_per_engine: int
    ) -> None:
        """`actors` is None in a run whose engines keep the weights of the model's folder: then nothing can be transferred."""
        self.backend = backend
        self._actors = actors
        self.call_timeout_s = engines.call_timeout_s
        if backend == "nccl":
            self._connect(engines, devices_per_engine)

    @property
    def actors(self) -> SupervisedSet:
        """The processes that send."""
        assert self._actors is not None, "nothing is transferred without an actor"
        return self._actors

    @property
    def can_lose_engines(self) -> bool:
        """Return whether engines can come and go: the NCCL group is made once, of all of them."""
        return self.backend != "nccl"

    def run(self, actor: ActorRole, engines: list[Worker], on_loss: OnLoss) -> int:
        """Send every tensor to every engine; return the number of bytes of one copy.

        The caller has the engines begin the update before and finish it after. `on_loss` is called with each that failed.
        """
        loaded = dict.fromkeys(engines, 0)

        def lost(engine: Worker, error: WorkerFailed) -> None:
            del loaded[engine]
            on_loss(engine, error)

        while True:
            try:
                return self._run(actor, loaded, lost)
            except SetRestarted:
                continue

    def check(self, actor: ActorRole, engines: list[Worker], on_loss: OnLoss) -> None:
        """Raise WeightTransferError, naming the tensors, unless every engine received exactly what was sent."""
        sent = actor.worker_set.call("sent_digests")[0]
        calls = [engine.call("received_digests") for engine in engines]
        for engine, received in settle(engines, calls, self.call_timeout_s, "rollout.received_digests", on_loss).items():
            check_digests(sent, received, engine.name)

    def _run(self, actor: ActorRole, loaded: dict[Worker, int], lost: OnLoss) -> int:
        """Walk over the weights once. `loaded`, the number of buckets that each engine has, grows as they are loaded."""
        num_bytes = sum(actor.worker_set.call("begin_weight_sync")[:1])
        number = 0
        more, buckets = self._next()
        while more:
            bucket = merge_ranks(ray.get(buckets, timeout=self.call_timeout_s)) if self.backend == "ipc" else buckets[0]
            loading = {engine: engine.call("load_bucket", bucket) for engine, count in loaded.items() if count <= number}
            following = None
            try:
                if self.backend == "object_store":
                    following = self._next()
            finally:
                # Also where packing has failed: an engine that has loaded a bucket must not be sent it again.
                for engine in settle(list(loading), list(loading.values()), self.call_timeout_s, "rollout.load_bucket", lost):
                    loaded[engine] = number + 1
            number += 1
            more, buckets = following or self._next()
        return num_bytes

    def _next(self) -> tuple[bool, list[ray.ObjectRef]]:
        """Return whether there is another bucket, and a reference to what each rank made of it. Raises SetRestarted."""
        workers = self.actors.workers
        pairs = [w.actor.call_pair.options(num_returns=2).remote("next_bucket") for w in workers]
        try:
            there = wait_all(workers, [pair[0] for pair in pairs], self.actors.call_timeout_s, "actor.next_bucket")
        except WorkerFailed as error:
            self.actors.recover(error, "the weight transfer")
            raise SetRestarted("the actor was started again in a weight transfer") from error
        return there[0], [pair[1] for pair in pairs]

    def _connect(self, engines: WorkerSet, devices_per_engine: int) -> None:
        """Connect rank 0 of the actor and every engine process in one NCCL group."""
        address, _, port = self.actors.where(self.actors.call_timeout_s)[0]
        world_size = 1 + devices_per_engine * len(engines)
        workers = [self.actors.workers[0], *engines.workers]
        offsets = [0, *(1 + devices_per_engine * i for i in range(len(engines)))]
        refs = [w.call("connect", NcclRendezvous(address, port, world_size, o)) for w, o in zip(workers, offsets, strict=True)]
        wait_all(workers, refs, self.actors.call_timeout_s, "connect for weight transfer")
