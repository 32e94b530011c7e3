"""Weights from the actor's ranks to the engines, bucket by bucket, never through a file."""

from __future__ import annotations

import ray

from grpo_rl.cluster.groups import WorkerGroup, wait_all
from grpo_rl.cluster.roles import ActorGroup
from grpo_rl.rollout.engine import NcclRendezvous, WeightBackend
from grpo_rl.rollout.weights import check_digests, merge_ranks


class Transfer:
    """One way for the weights (see `checkpoint_engine.backend`), used after every update.

    Through Ray's object store a bucket goes from process to process by reference, and the next one is
    packed while this one is loaded. With CUDA IPC and NCCL only descriptions pass here, and a bucket's
    memory is in use until every engine has answered.
    """

    def __init__(self, backend: WeightBackend, actors: WorkerGroup, engines: WorkerGroup, devices_per_engine: int) -> None:
        self.backend = backend
        self.actors = actors
        self.engines = engines
        if backend == "nccl":
            self._connect(devices_per_engine)

    def run(self, actor: ActorGroup) -> int:
        """Bytes moved. The engines have begun an update before, and finish it after."""
        num_bytes = sum(actor.group.call("begin_weight_sync")[:1])
        more, buckets = self._next()
        while more:
            bucket = merge_ranks(ray.get(buckets, timeout=self.actors.call_timeout_s)) if self.backend == "ipc" else buckets[0]
            loading = [engine.call("load_bucket", bucket) for engine in self.engines.workers]
            if self.backend == "object_store":
                more, buckets = self._next()
                wait_all(self.engines.workers, loading, self.engines.call_timeout_s, "rollout.load_bucket")
            else:
                wait_all(self.engines.workers, loading, self.engines.call_timeout_s, "rollout.load_bucket")
                more, buckets = self._next()
        return num_bytes

    def check(self, actor: ActorGroup) -> None:
        """Raise WeightTransferError, naming the tensors, unless every engine received exactly what was sent."""
        sent = actor.group.call("sent_digests")[0]
        for engine, received in zip(self.engines.workers, self.engines.call("received_digests"), strict=True):
            check_digests(sent, received, engine.name)

    def _next(self) -> tuple[bool, list[ray.ObjectRef]]:
        """Whether there is another bucket, and each rank's version of it."""
        pairs = [w.actor.call_pair.options(num_returns=2).remote("next_bucket") for w in self.actors.workers]
        there = wait_all(self.actors.workers, [pair[0] for pair in pairs], self.actors.call_timeout_s, "actor.next_bucket")
        return there[0], [pair[1] for pair in pairs]

    def _connect(self, devices_per_engine: int) -> None:
        """Rank 0 of the actor and every engine process meet in one NCCL group."""
        address, _, port = self.actors.where(self.actors.call_timeout_s)[0]
        world_size = 1 + devices_per_engine * len(self.engines)
        workers = [self.actors.workers[0], *self.engines.workers]
        offsets = [0, *(1 + devices_per_engine * i for i in range(len(self.engines)))]
        refs = [w.call("connect", NcclRendezvous(address, port, world_size, o)) for w, o in zip(workers, offsets, strict=True)]
        wait_all(workers, refs, self.actors.call_timeout_s, "connect for weight transfer")
