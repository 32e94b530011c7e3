"""Host memory into which every save copies a rank's tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from grpo_rl.checkpoint.tensors import Part, in_order


class HostMemory:
    """Blocks that are kept: new memory from the kernel takes several times as long as a copy into kept memory."""

    def __init__(self) -> None:
        self._blocks: dict[str, torch.Tensor] = {}

    def copy(self, kind: str, parts: Mapping[str, Part]) -> dict[str, Part]:
        """Copies of the parts, in one block, as a file has them. The last copy of this kind is gone with that."""
        names = in_order(parts)
        size = sum(_bytes(part) for part in parts.values())
        block = self._blocks.get(kind)
        if block is None or len(block) != size:
            block = self._blocks[kind] = torch.empty(size, dtype=torch.uint8)
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


def _bytes(part: Part) -> int:
    return part.tensor.numel() * part.tensor.element_size()
