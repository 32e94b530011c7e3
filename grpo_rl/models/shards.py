"""The part of a distributed tensor that this rank holds."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor


def rows_of(tensor: Any) -> tuple[int, int]:
    """Return this rank's first and last (exclusive) row: FSDP2 cuts as `torch.chunk` does."""
    total = int(tensor.shape[0])
    if not isinstance(tensor, DTensor):
        return 0, total
    mesh = tensor.device_mesh
    # The last dimension of a mesh is the one that shards; along another one there are replicas.
    last = mesh.ndim - 1
    size = -(-total // mesh.size(last))
    start = min(mesh.get_local_rank(last) * size, total)
    stop = min(start + size, total)
    assert len(tensor.to_local()) == stop - start, "sharded by rows, and evenly"
    return start, stop


def local_of(tensor: Any) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_first_replica(tensor: Any) -> bool:
    """Return whether this rank's rows are in the first of the replicas."""
    return not isinstance(tensor, DTensor) or tensor.device_mesh.ndim == 1 or tensor.device_mesh.get_local_rank(0) == 0
