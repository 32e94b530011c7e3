"""Tensors in safetensors files, written piece by piece and read as rows; and in kept host memory."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from grpo_rl.checkpoint.files import Entry, write_file
from grpo_rl.errors import CheckpointError
from grpo_rl.frozen import frozen

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_LAYOUT = "layout"


@frozen
class Part:
    tensor: Tensor
    start: int
    shape: tuple[int, ...]
    """Of the whole tensor, whose rows from `start` on this part has."""


def write_parts(path: Path, parts: Mapping[str, Part]) -> Entry:
    """Write a safetensors file without a second copy of it in memory."""
    # In this order every tensor of the file is aligned.
    names = sorted(parts, key=lambda name: (-parts[name].tensor.element_size(), name))
    header: dict[str, Any] = {
        "__metadata__": {_LAYOUT: json.dumps({name: [parts[name].start, list(parts[name].shape)] for name in names})}
    }
    position = 0
    for name in names:
        tensor = parts[name].tensor
        end = position + tensor.nbytes
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    return write_file(path, _pieces(header, [parts[name].tensor for name in names]))


def _pieces(header: Mapping[str, Any], tensors: Sequence[Tensor]) -> Iterator[bytes | memoryview]:
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors:
        if tensor.numel():
            raw: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            yield memoryview(raw)


class Shards(ExitStack):
    """Whole tensors, of which every file holds some rows; a context."""

    def __init__(self, paths: Sequence[Path]) -> None:
        super().__init__()
        self.paths = paths
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._parts: dict[str, list[tuple[int, int, Any]]] = {}

    def __enter__(self) -> Shards:
        for path in self.paths:
            file = self.enter_context(safe_open(path, framework="pt"))
            for name, (start, shape) in json.loads((file.metadata() or {})[_LAYOUT]).items():
                rows = file.get_slice(name).get_shape()[0] if shape else 1
                self.shapes.setdefault(name, tuple(shape))
                self._parts.setdefault(name, []).append((start, start + rows, file))
        return self

    def whole(self, name: str) -> Tensor:
        shape = self.shapes[name]
        return self.rows(name, 0, shape[0]) if shape else self._parts[name][0][2].get_tensor(name)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Read only rows `start` to `stop`. Raises CheckpointError if no file has one of them."""
        pieces, position = [], start
        for first, end, file in sorted(self._parts[name], key=lambda part: part[:2]):
            if first <= position < min(end, stop):
                pieces.append(file.get_slice(name)[position - first : min(end, stop) - first])
                position = min(end, stop)
        if position < stop:
            raise CheckpointError(f"{self.paths[0].parent}: row {position} of {name} is in none of its {len(self.paths)} files")
        if not pieces:
            return self._parts[name][0][2].get_slice(name)[0:0]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


SLAB, ALIGNMENT = 256 << 20, 512
"""Bytes of a block that many kept tensors share, and the multiple at which each of them begins."""


class HostMemory:
    """Memory that is kept: new memory from the kernel takes several times as long as a copy into it.

    It is page-locked for what lies on a GPU, whose driver copies twice into other memory.
    """

    def __init__(self) -> None:
        self._kept: dict[object, Tensor] = {}
        self._left = torch.empty(0, dtype=torch.uint8)

    def keep(self, key: object, tensor: Tensor) -> Tensor:
        """Replaces the key's last copy. A copy from a GPU is complete when its present stream's work is."""
        if not tensor.numel():  # a rank that has no rows of it
            return torch.empty_like(tensor, device="cpu")
        size = tensor.nbytes
        place = self._kept.get(key)
        if place is None or len(place) != size:
            # Page-locking takes a call of the driver, so many tensors share one block.
            begin = -(-size // ALIGNMENT) * ALIGNMENT
            if len(self._left) < begin:
                self._left = torch.empty(max(begin, SLAB), dtype=torch.uint8)
                if tensor.is_cuda:
                    _lock(self._left)
            place = self._kept[key] = self._left[:size]
            self._left = self._left[begin:]
        return place.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)


def _lock(block: Tensor) -> None:
    """Page-lock memory, if allowed. Torch's own is rounded up to powers of two."""
    if int(torch.cuda.cudart().cudaHostRegister(block.data_ptr(), block.numel(), 0)):
        # CUDA reports the failure once more to whoever starts the next kernel: here, and not in the middle of a pass.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")
