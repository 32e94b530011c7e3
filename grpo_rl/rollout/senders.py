"""The trainer's side of a weight update: senders that turn named tensors into buckets.

Every actor rank has a sender and runs

    for bucket in sender.buckets(named_full_tensors):
        ...  # handed to the controller, which gives merge_ranks(...) to every replica

with the same tensors in the same order: a full tensor is gathered from all ranks. The loop may ask for the next bucket
only when every replica has taken this one over, for its memory is used again. After the loop the replicas finish the update.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Protocol

import torch

from grpo_rl.rollout.engine import NcclRendezvous
from grpo_rl.rollout.weights import (
    NamedTensor,
    WeightBucket,
    describe,
    digest,
    group_by_bytes,
    pack,
    write_flat,
)


class WeightSender(Protocol):
    def connect(self, rendezvous: NcclRendezvous) -> None:
        """Meet the engines, while the controller has them connect too; does something with NCCL only."""

    def buckets(self, named_full_tensors: Iterable[NamedTensor]) -> Iterator[WeightBucket]:
        """Yield the tensors in buckets; each is valid until the next one is asked for."""

    def sent_digests(self) -> dict[str, str]:
        """Return the digest of every tensor as it was sent in the last update; empty unless verifying."""

    def close(self) -> None:
        """Leave the group and free buffers."""


class BaseSender:
    """The part that all senders share: cast to the type on the wire, note digests, cut into groups.

    `dtype` is the engines' (None: send as is); only floating tensors are cast. The rank that
    `is_source` provides the bytes where one is enough; the others keep step, because gathering a full
    tensor is a collective operation.
    """

    def __init__(
        self, bucket_bytes: int, dtype: torch.dtype | None = None, verify: bool = False, is_source: bool = True
    ) -> None:
        self.bucket_bytes = bucket_bytes
        self.dtype = dtype
        self.verify = verify
        self.is_source = is_source
        self._digests: dict[str, str] = {}

    def connect(self, rendezvous: NcclRendezvous) -> None:
        """Do nothing: only NCCL needs a connection."""

    def sent_digests(self) -> dict[str, str]:
        return dict(self._digests)

    def close(self) -> None:
        """Do nothing: no memory is held between updates."""

    def groups(self, named_full_tensors: Iterable[NamedTensor]) -> Iterator[list[NamedTensor]]:
        """Yield the tensors as they will travel, cut into groups of bucket_bytes."""
        self._digests = {}
        yield from group_by_bytes(self._on_the_wire(named_full_tensors), self.bucket_bytes)

    def _on_the_wire(self, named_full_tensors: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
        for name, tensor in named_full_tensors:
            tensor = tensor.detach()
            if self.dtype is not None and tensor.is_floating_point():
                tensor = tensor.to(self.dtype)
            if self.verify:
                self._digests[name] = digest(tensor)
            yield name, tensor


class ObjectStoreSender(BaseSender):
    """Buckets in host memory, for Ray's object store; ranks that are not the source send descriptions only."""

    def buckets(self, named_full_tensors: Iterable[NamedTensor]) -> Iterator[WeightBucket]:
        for group in self.groups(named_full_tensors):
            yield pack(group) if self.is_source else describe(group)


class IpcSender(BaseSender):
    """Buckets in device memory that the engine process on the same GPU opens.

    Each rank copies each group into one buffer of its GPU and sends the handle; the engine copies it
    out before it answers, so one buffer is enough for the whole model. All ranks send, because each
    engine process opens the buffer of its own GPU.
    """

    def buckets(self, named_full_tensors: Iterable[NamedTensor]) -> Iterator[WeightBucket]:
        # The engine's mapping of the last update's buffer is closed by now; take the memory back.
        torch.cuda.ipc_collect()
        device = torch.cuda.current_device()
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        flat = torch.empty(0, dtype=torch.uint8, device=device)
        handle: tuple[object, ...] = ()
        for group in self.groups(named_full_tensors):
            bucket = describe(group)
            if bucket.nbytes > flat.nbytes:
                # A tensor above bucket_bytes gets a buffer of its own size; smaller ones then share it.
                flat = torch.empty(max(bucket.nbytes, self.bucket_bytes), dtype=torch.uint8, device=device)
                _, handle = torch.multiprocessing.reductions.reduce_tensor(flat)
            write_flat(group, flat)
            # The other process reads without any ordering between the two streams.
            torch.cuda.current_stream().synchronize()
            yield replace(bucket, ipc_handles={uuid: handle})
