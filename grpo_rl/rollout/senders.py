"""The trainer's side of a weight update: senders that turn named tensors into buckets.

Every actor rank has a sender and runs

    for bucket in sender.buckets(named_full_tensors):
        ...  # handed to the controller, which gives merge_ranks(...) to every replica

with the same tensors in the same order: gathering is a collective. Every replica must have loaded a bucket
before the next is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from grpo_rl.gpu_allocator import shareable_memory
from grpo_rl.rollout.engine import NcclRendezvous, WeightBackend
from grpo_rl.rollout.weights import (
    NamedTensor,
    WeightBucket,
    WeightTransferError,
    describe,
    group_by_bytes,
    pack,
    with_digests_recorded,
    write_flat,
)


@dataclass(eq=False)
class WeightSender:
    bucket_bytes: int
    verify: bool = False
    is_source: bool = True
    """True on the rank that provides the bytes if one is enough."""
    timeout_s: float = 600.0
    readers: int = 1
    """Engines that open each buffer (IPC)."""
    _digests: dict[str, str] = field(default_factory=dict, init=False)

    def buckets(self, named_full_tensors: Iterable[NamedTensor]) -> Iterator[WeightBucket]:
        """Each bucket is valid until the next one is asked for."""
        raise NotImplementedError

    def connect(self, rendezvous: NcclRendezvous) -> None:
        """Meet the engines while they connect too (NCCL)."""

    def close(self) -> None: ...

    def sent_digests(self) -> dict[str, str]:
        """Digests of the last update's tensors; empty unless verifying."""
        return dict(self._digests)

    def groups(self, named_full_tensors: Iterable[NamedTensor]) -> Iterator[list[NamedTensor]]:
        self._digests = {}
        return group_by_bytes(
            with_digests_recorded(named_full_tensors, self._digests if self.verify else None), self.bucket_bytes
        )


class ObjectStoreSender(WeightSender):
    """Buckets in host memory, for Ray's object store."""

    def buckets(self, named_full_tensors: Iterable[NamedTensor]) -> Iterator[WeightBucket]:
        for group in self.groups(named_full_tensors):
            yield pack(group) if self.is_source else describe(group)


class IpcSender(WeightSender):
    """The engine on the same GPU copies out before it answers: one buffer per rank is enough."""

    def buckets(self, named_full_tensors: Iterable[NamedTensor]) -> Iterator[WeightBucket]:
        torch.cuda.ipc_collect()
        device = torch.cuda.current_device()
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        flat = torch.empty(0, dtype=torch.uint8, device=device)
        handles: tuple[object, ...] = ()
        for group in self.groups(named_full_tensors):
            bucket = describe(group)
            if bucket.nbytes > flat.nbytes:
                # A tensor above bucket_bytes gets a buffer of its own size; smaller ones then share it.
                with shareable_memory():
                    flat = torch.empty(max(bucket.nbytes, self.bucket_bytes), dtype=torch.uint8, device=device)
                handles = tuple(torch.multiprocessing.reductions.reduce_tensor(flat)[1] for _ in range(self.readers))
            write_flat(group, flat)
            # The other process reads without any ordering between the two streams.
            torch.cuda.current_stream().synchronize()
            yield replace(bucket, ipc_handles={uuid: handles})


@dataclass(eq=False)
class NcclSender(WeightSender):
    """The source broadcasts buckets in a thread: the engines meet it in `load_bucket`.

    vLLM cuts what it receives by `bucket_bytes` too: one bucket is one broadcast.
    """

    def __post_init__(self) -> None:
        self._communicator: Any = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights-nccl")

    def connect(self, rendezvous: NcclRendezvous) -> None:
        if not self.is_source:
            return
        from grpo_rl.rollout.vllm.vllm_patches import join_as_trainer

        self._leave()
        self._communicator = join_as_trainer(rendezvous)

    def buckets(self, named_full_tensors: Iterable[NamedTensor]) -> Iterator[WeightBucket]:
        for group in self.groups(named_full_tensors):
            bucket = describe(group)
            if not self.is_source:
                yield bucket
                continue
            flat = torch.empty(bucket.nbytes, dtype=torch.uint8, device=torch.cuda.current_device())
            write_flat(group, flat)
            torch.cuda.current_stream().synchronize()
            sent = self._thread.submit(self._broadcast, flat)
            yield bucket
            try:
                sent.result(timeout=self.timeout_s)
            except TimeoutError as error:
                raise WeightTransferError(
                    f"the engines did not receive the bucket with {bucket.names[0]} within {self.timeout_s:g} s"
                ) from error

    def close(self) -> None:
        # Without waiting: a broadcast whose receiver died never returns.
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._leave()

    def _leave(self) -> None:
        if self._communicator is not None:
            self._communicator.destroy()
            self._communicator = None

    def _broadcast(self, flat: Tensor) -> None:
        if self._communicator is None:
            raise WeightTransferError("the sender is not connected to the engines: call connect first")
        with torch.cuda.device(flat.device):
            stream = torch.cuda.Stream()
            self._communicator.broadcast(flat, src=0, stream=stream)
            stream.synchronize()


def make_sender(
    backend: WeightBackend, bucket_bytes: int, verify: bool = False, rank: int = 0, timeout_s: float = 600.0, readers: int = 1
) -> WeightSender:
    kinds: dict[WeightBackend, type[WeightSender]] = {"object_store": ObjectStoreSender, "ipc": IpcSender, "nccl": NcclSender}
    return kinds[backend](bucket_bytes, verify, rank == 0, timeout_s, readers)
