"""Host memory that is kept: for what a save copies, and for what is moved off a GPU between two phases of a step."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import torch
from torch import Tensor

from grpo_rl.checkpoint.tensors import Part, in_order

SLAB, ALIGNMENT = 256 << 20, 512
"""Bytes of a block that many kept tensors share, and the multiple at which each of them begins."""


class HostMemory:
    """Blocks that are kept: new memory from the kernel takes several times as long as a copy into kept memory.

    Blocks for what lies on a GPU are page-locked: the GPU copies into them by itself, where of other memory the driver copies
    everything once more, through a small buffer of its own.
    """

    def __init__(self) -> None:
        self._blocks: dict[object, Tensor] = {}
        self._kept: dict[object, Tensor] = {}
        self._left = torch.empty(0, dtype=torch.uint8)
        """The part of the newest slab that no kept tensor has."""

    def copy(self, kind: str, parts: Mapping[str, Part]) -> dict[str, Part]:
        """Copies of the parts, in one block, as a file has them. The last copy of this kind is gone with that."""
        names = in_order(parts)
        size = sum(_bytes(part) for part in parts.values())
        block = self._block(kind, size, locked=any(part.tensor.is_cuda for part in parts.values()))
        copies: dict[str, Part] = {}
        position = 0
        for name in names:
            tensor, end = parts[name].tensor, position + _bytes(parts[name])
            copies[name] = Part(block[position:end].view(tensor.dtype).view(tensor.shape), parts[name].start, parts[name].shape)
            position = end
        filled = [name for name in names if parts[name].tensor.numel()]
        if filled:  # before its first step an optimizer has nothing
            # One call, in which the interpreter's lock is free from the first tensor to the last.
            torch._foreach_copy_([copies[name].tensor for name in filled], [parts[name].tensor for name in filled])
        return copies

    def keep(self, key: object, tensor: Tensor) -> Tensor:
        """Return a copy of one tensor in the memory that is kept for this key; the last copy there is gone with that.

        A copy from a GPU is complete when the GPU's present work is.
        """
        if not tensor.numel():  # a rank that has no rows of it
            return torch.empty_like(tensor, device="cpu")
        size = tensor.numel() * tensor.element_size()
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

    def _block(self, key: object, size: int, *, locked: bool) -> Tensor:
        block = self._blocks.get(key)
        if block is None or len(block) != size:
            if block is not None:
                _unlock(block)
            block = self._blocks[key] = torch.empty(size, dtype=torch.uint8)
            if locked:
                _lock(block)
        return block


def _lock(block: Tensor) -> None:
    """Page-lock memory, where the system allows it. Torch's own page-locked memory is rounded up to powers of two."""
    if block.numel() and int(torch.cuda.cudart().cudaHostRegister(block.data_ptr(), block.numel(), 0)):
        # CUDA reports the failure once more to whoever starts the next kernel: here, and not in the middle of a pass.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")


def _unlock(block: Tensor) -> None:
    if block.numel() and torch.cuda.is_initialized() and block.is_pinned():
        torch.cuda.cudart().cudaHostUnregister(block.data_ptr())


def _bytes(part: Part) -> int:
    return part.tensor.numel() * part.tensor.element_size()
