"""Transfer of weights from the actor's ranks to the engines, bucket by bucket, never through a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import ray

from grpo_rl.cluster.processes.worker_group import Worker, WorkerFailed, WorkerGroup, settle, wait_all
from grpo_rl.rollout.engine import NcclRendezvous, WeightBackend
from grpo_rl.rollout.weights import check_digests, merge_ranks

OnLoss = Callable[[Worker, WorkerFailed], None]


class Transfer:
    """A transfer of the actor's weights to the engines, in the way that `checkpoint_engine.backend` names.

    The actor's ranks walk through the model together, because a whole tensor is gathered from all of them, and pack one
    bucket after the other. The controller asks all ranks for the next bucket and all engines to load it; only a
    reference to the bytes passes through the controller. Through Ray's object store and by NCCL the next bucket is packed
    while this one is loaded. With CUDA IPC a bucket's memory is in use until every engine has answered, so that one
    follows the other.

    An engine that fails on the way is left out, the others get everything.

    NCCL is different in two ways. Its group has fixed members, so it is made anew before a transfer between other processes
    than the last one's. And a broadcast that lost a member ends for none of the others, so that WorkerFailed is raised for an
    engine, too, as for a rank: the run starts all its processes again.
    """

    def __init__(
        self,
        backend: WeightBackend,
        actors: WorkerGroup,
        engines: WorkerGroup,
        devices_per_engine: int,
        start_timeout_s: float,
        *,
        verify: bool = False,
    ) -> None:
        """`start_timeout_s` is how long the members of a group by NCCL wait for each other; with `verify` checksums are compared."""
        self._start_timeout_s = start_timeout_s
        self.backend, self.actors, self.verify = backend, actors, verify
        self._devices_per_engine = devices_per_engine
        self._connected: tuple[Worker, ...] = ()
        """The members of the NCCL group: the rank that sends, and the engines in their order."""
        self.call_timeout_s = engines.call_timeout_s
        if backend == "nccl":
            self._connect(engines.workers)

    def run(self, engines: list[Worker], on_loss: OnLoss) -> int:
        """Send every tensor to every engine; return the number of bytes of one copy, 0 where no engine is left.

        The caller has the engines begin the update before and finish it after. `on_loss` is called with each that failed, and
        takes it out of `engines`. Raises WeightTransferError, naming the tensors, where an engine received something else than
        what was sent.
        """
        num_bytes = sum(self.actors.call("begin_weight_sync")[:1])
        if self.backend == "nccl" and self._connected != (self.actors.workers[0], *engines):
            self._connect(engines)
        more, buckets = self._next()
        while more and engines:
            bucket = merge_ranks(ray.get(buckets, timeout=self.call_timeout_s)) if self.backend == "ipc" else buckets[0]
            loading = {engine: engine.call("load_bucket", bucket) for engine in engines}
            following = None if self.backend == "ipc" else self._next(loading if self.backend == "nccl" else {})
            if self.backend != "nccl":
                settle(loading, self.call_timeout_s, "rollout.load_bucket", on_loss)
            more, buckets = following or self._next()
        if self.verify:
            sent = self.actors.call("sent_digests")[0]
            calls = {engine: engine.call("received_digests") for engine in engines}
            for engine, received in settle(calls, self.call_timeout_s, "rollout.received_digests", on_loss).items():
                check_digests(sent, received, engine.name)
        self.actors.call("end_weight_sync")
        return num_bytes if engines else 0

    def _next(self, loading: Mapping[Worker, ray.ObjectRef] = MappingProxyType({})) -> tuple[bool, list[ray.ObjectRef]]:
        """Return whether there is another bucket, and a reference to what each rank made of it.

        `loading` are engines that take part in the broadcast of the bucket before, for which the sending rank waits: their answers
        are waited for as well, and where one of them fails, this raises its WorkerFailed and not the rank's at its deadline.
        """
        ranks = self.actors.workers
        pairs = [rank.call_for_two("next_bucket") for rank in ranks]
        refs = [pair[0] for pair in pairs] + list(loading.values())
        there = wait_all(
            [*ranks, *loading], refs, self.actors.call_timeout_s, "weight transfer" if loading else "actor.next_bucket"
        )
        return there[0], [pair[1] for pair in pairs]

    def _connect(self, engines: Sequence[Worker]) -> None:
        """Connect rank 0 of the actor and every process of these engines in one NCCL group, in place of the last one."""
        address, _, port = self.actors.where(self.actors.call_timeout_s)[0]
        step = self._devices_per_engine
        world_size = 1 + step * len(engines)
        workers = [self.actors.workers[0], *engines]
        offsets = [0, *(1 + step * i for i in range(len(engines)))]
        places = [NcclRendezvous(address, port, world_size, offset, self._start_timeout_s) for offset in offsets]
        refs = [worker.call("connect", place) for worker, place in zip(workers, places, strict=True)]
        wait_all(workers, refs, self.actors.call_timeout_s, "connect for weight transfer")
        self._connected = tuple(workers)
