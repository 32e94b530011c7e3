"""Settings of torch's allocator of GPU memory: segments expand as a pass needs.

But engines, siblings of the ranks, may not open the file descriptors of expandable segments. torch resets the
settings that a new string leaves out, so the user's are repeated.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Where users set them; torch takes the first that is there."""
_KEY = "expandable_segments"


def settings(*, shareable: bool = False) -> str:
    """Return the user's settings, with expandable segments unless they say otherwise or `shareable`."""
    user = next((os.environ[name] for name in VARIABLES if os.environ.get(name)), "")
    fields = dict(field.strip().split(":", 1) for field in user.split(",") if ":" in field)
    expandable = not shareable and fields.get(_KEY, "True").strip().lower() in ("true", "1")
    return ",".join(f"{name}:{value}" for name, value in (fields | {_KEY: str(expandable)}).items())


def use_expandable_segments() -> None:
    torch._C._accelerator_setAllocatorSettings(settings())


@contextmanager
def shareable_memory() -> Iterator[None]:
    """Let a sibling process open memory that is allocated inside of this context."""
    torch._C._accelerator_setAllocatorSettings(settings(shareable=True))
    try:
        yield
    finally:
        use_expandable_segments()


def to_device(tensor: Tensor, device: torch.device | str, dtype: torch.dtype | None = None) -> Tensor:
    """Copy from page-locked memory: from any other, torch's copy waits for the whole stream."""
    if torch.device(device).type != "cuda" or not tensor.numel():
        return tensor.to(device, dtype)
    return tensor.pin_memory().to(device, dtype, non_blocking=True)
