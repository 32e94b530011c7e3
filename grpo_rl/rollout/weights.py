"""Buckets of named tensors on their way to the rollout engines, and the order of calls in an update.

The bytes are in host memory (`data`), in device memory of this node (`ipc_handles`), or on their way through
NCCL; back to back, larger element sizes first, so that every tensor is aligned. Needs neither vLLM nor Ray.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo_rl.errors import ClusterError
from grpo_rl.frozen import frozen

NamedTensor = tuple[str, Tensor]


class WeightTransferError(ClusterError):
    """Weights did not reach an engine as they left the trainer."""


@frozen
class WeightBucket:
    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    data: np.ndarray | None = None
    """Flat uint8."""
    ipc_handles: dict[str, tuple[Any, ...]] | None = None
    """CUDA IPC handles of one flat buffer by the UUID of its GPU, one for each engine there."""

    def of_reader(self, number: int) -> WeightBucket:
        """Return the bucket of one engine per GPU: an exported handle counts one reader (torch)."""
        handles = {uuid: (readers[number],) for uuid, readers in (self.ipc_handles or {}).items()}
        return replace(self, ipc_handles=handles)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(math.prod(shape) * _dtype(dtype).itemsize for shape, dtype in zip(self.shapes, self.dtypes, strict=True))

    @property
    def nbytes(self) -> int:
        return sum(self.sizes)

    def tensors(self) -> Iterator[NamedTensor]:
        """Yield views of `data`, read only if `data` is."""
        if self.data is None:
            raise WeightTransferError(f"the bytes of the bucket with {self.names[0]!r} are not in host memory")
        with warnings.catch_warnings():
            # Ray's shared memory is read only; nothing here writes to it.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            flat = torch.from_numpy(self.data)
        pieces = flat.split(list(self.sizes))
        for name, dtype, shape, piece in zip(self.names, self.dtypes, self.shapes, pieces, strict=True):
            # torch cannot reinterpret nothing.
            values = piece.view(_dtype(dtype)) if len(piece) else torch.empty(0, dtype=_dtype(dtype))
            yield name, values.view(shape)


def group_by_bytes(named_tensors: Iterable[NamedTensor], bucket_bytes: int) -> Iterator[list[NamedTensor]]:
    """Larger element sizes come first, so that offsets are aligned; a larger tensor is a group of its own."""
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be at least 1, got {bucket_bytes}")
    group: list[NamedTensor] = []
    filled = 0
    for name, tensor in named_tensors:
        if group and filled + tensor.nbytes > bucket_bytes:
            yield _aligned(group)
            group, filled = [], 0
        group.append((name, tensor))
        filled += tensor.nbytes
    if group:
        yield _aligned(group)


def pack_buckets(named_tensors: Iterable[NamedTensor], bucket_bytes: int) -> Iterator[WeightBucket]:
    return map(pack, group_by_bytes(named_tensors, bucket_bytes))


def pack(group: Sequence[NamedTensor]) -> WeightBucket:
    bucket = describe(group)
    data = np.empty(bucket.nbytes, dtype=np.uint8)
    write_flat(group, torch.from_numpy(data))
    return replace(bucket, data=data)


def describe(group: Sequence[NamedTensor]) -> WeightBucket:
    return WeightBucket(
        names=tuple(name for name, _ in group),
        dtypes=tuple(str(tensor.dtype).removeprefix("torch.") for _, tensor in group),
        shapes=tuple(tuple(tensor.shape) for _, tensor in group),
    )


def write_flat(group: Sequence[NamedTensor], flat: Tensor) -> None:
    """Copy one group back to back into `flat` (uint8)."""
    sizes = [tensor.nbytes for _, tensor in group]
    for (_, tensor), piece in zip(group, flat[: sum(sizes)].split(sizes), strict=True):
        piece.copy_(_bytes(tensor))


def merge_ranks(buckets: Sequence[WeightBucket | None]) -> WeightBucket:
    """Return the engines' bucket from that of each actor rank. Raises WeightTransferError if they differ."""
    made = [bucket for bucket in buckets if bucket is not None]
    if not made or len({(bucket.names, bucket.dtypes, bucket.shapes) for bucket in made}) != 1:
        raise WeightTransferError(f"actor ranks sent different tensors: {[bucket.names[:3] for bucket in made]}")
    data = next((bucket.data for bucket in made if bucket.data is not None), None)
    handles = {uuid: handle for bucket in made for uuid, handle in (bucket.ipc_handles or {}).items()}
    return replace(made[0], data=data, ipc_handles=handles or None)


MIXER = 0x9E3779B97F4A7C15 - 2**64
"""2^64 over the golden ratio (Knuth, The Art of Computer Programming, 6.4), signed."""
DIGEST_BYTES = 64 << 20


def digest(tensor: Tensor) -> str:
    """Return dtype, shape and a 64-bit sum of the bytes, computed where the tensor lies.

    The sum is over 8-byte words, each mixed and multiplied by an odd number of its place, modulo 2^64: the
    same on every device, another one if any word is another, and, but for a chance of 2^-64, if several are
    or change places.
    """
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for number, piece in enumerate(_bytes(tensor).split(DIGEST_BYTES)):
        start = number * DIGEST_BYTES // 8
        words = torch.zeros(math.ceil(len(piece) / 8), dtype=torch.int64, device=piece.device)
        words.view(torch.uint8)[: len(piece)].copy_(piece)
        # Numbers of low precision have zeros at their ends, which a product would leave there.
        words ^= words >> 32
        factors = torch.arange(start, start + len(words), device=piece.device).mul_(2).add_(1).mul_(MIXER)
        total += words.mul_(factors).sum()
    return f"{tensor.dtype}{tuple(tensor.shape)} {int(total) % 2**64:016x}"


def with_digests_recorded(named_tensors: Iterable[NamedTensor], digests: dict[str, str] | None) -> Iterator[NamedTensor]:
    """Yield the tensors, and put the digest of each into `digests` unless it is None."""
    for name, tensor in named_tensors:
        if digests is not None:
            digests[name] = digest(tensor)
        yield name, tensor


def check_digests(sent: Mapping[str, str], received: Mapping[str, str], receiver: str) -> None:
    wrong = sorted(name for name in sent.keys() | received.keys() if sent.get(name) != received.get(name))
    if wrong:
        raise WeightTransferError(
            f"{receiver}: {len(wrong)} of {len(sent)} tensors arrived damaged or not at all: {first_names(wrong)}"
        )


def first_names(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _bytes(tensor: Tensor) -> Tensor:
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    # reshape before view: a scalar has no dimension to reinterpret.
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _aligned(group: list[NamedTensor]) -> list[NamedTensor]:
    return sorted(group, key=lambda named: -named[1].element_size())


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


class WeightUpdate:
    """What arrived of the next weights, perhaps `in_flight`: an error changes nothing."""

    def __init__(self, expected: Mapping[str, tuple[int, ...]], in_flight: bool = False) -> None:
        self._in_flight = in_flight
        self._expected = expected
        self._arrived: set[str] = set()
        self._next: int | None = None
        self._lost = False
        self.version = 0

    @property
    def active(self) -> bool:
        return self._next is not None

    def check_can_sample(self) -> None:
        if self.active:
            raise WeightTransferError(f"requests cannot be submitted while weights {self._next} arrive: finish the update")
        if self._lost:
            raise WeightTransferError("the engine gave its weights up when it slept: update them before submitting requests")

    def lose(self) -> None:
        """The live weights are gone until an update is finished."""
        if self.active:
            raise WeightTransferError(f"the engine cannot sleep while weights {self._next} arrive")
        self._lost = True

    def start(self, version: int, num_unfinished: int) -> None:
        if self.active:
            raise WeightTransferError(f"weights {version} cannot start: weights {self._next} have not been finished")
        if num_unfinished and not self._in_flight:
            raise WeightTransferError(
                f"weights {version} cannot start: {num_unfinished} requests are unfinished; wait for them or abort them"
            )
        if version < self.version:
            raise WeightTransferError(f"weights {version} are older than those the engine has ({self.version})")
        self._next = version
        self._arrived = set()

    def receive(self, bucket: WeightBucket) -> None:
        if not self.active:
            raise WeightTransferError("tensors arrived outside a weight update: start one first")
        unknown = [name for name in bucket.names if name not in self._expected]
        if unknown:
            raise WeightTransferError(f"the model has no tensors named {first_names(unknown)}")
        repeated_names = [name for name in bucket.names if name in self._arrived]
        if repeated_names:
            raise WeightTransferError(f"tensors arrived twice in one update: {first_names(repeated_names)}")
        for name, shape in zip(bucket.names, bucket.shapes, strict=True):
            if shape != self._expected[name]:
                raise WeightTransferError(f"{name} arrived with shape {shape}; the model has {self._expected[name]}")
        self._arrived.update(bucket.names)

    def check_complete(self) -> None:
        if not self.active:
            raise WeightTransferError("there is no weight update to finish")
        missing = [name for name in self._expected if name not in self._arrived]
        if missing:
            raise WeightTransferError(
                f"weights {self._next} are incomplete: {len(missing)} of {len(self._expected)} tensors are missing: "
                f"{first_names(missing)}"
            )

    def finish(self) -> None:
        self.check_complete()
        assert self._next is not None
        self.version, self._next, self._lost = self._next, None, False
