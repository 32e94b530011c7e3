"""Settings of torch's allocator of GPU memory: segments that grow, a buffer that another process may open, copies that nothing waits for.

A rank's passes differ in length, so that blocks of fixed segments fit the next pass badly; expandable segments map as much as a
pass needs. But memory of theirs is handed to another process as a file descriptor, which the kernel gives to processes only
that may trace the first one: engines are siblings of the ranks, and may not.

torch has one string for all settings and resets those that a new string leaves out, so the user's are always repeated.
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
    """Return the user's settings, with expandable segments unless they say otherwise; without them if `shareable`."""
    user = next((os.environ[name] for name in VARIABLES if os.environ.get(name)), "")
    fields = dict(field.strip().split(":", 1) for field in user.split(",") if ":" in field)
    expandable = not shareable and fields.get(_KEY, "True").strip().lower() in ("true", "1")
    return ",".join(f"{name}:{value}" for name, value in (fields | {_KEY: str(expandable)}).items())


def use_expandable_segments() -> None:
    """Let the segments of this process grow, unless the user's settings say otherwise."""
    torch._C._accelerator_setAllocatorSettings(settings())


@contextmanager
def shareable_memory() -> Iterator[None]:
    """Let memory that is allocated inside of this context be memory that a sibling process may open."""
    torch._C._accelerator_setAllocatorSettings(settings(shareable=True))
    try:
        yield
    finally:
        use_expandable_segments()


def to_device(tensor: Tensor, device: torch.device | str, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor of host memory on a device. A copy to a GPU does not wait for what that has been given to do.

    From memory that is not page-locked, torch's copy waits for the whole stream.
    """
    if torch.device(device).type != "cuda" or not tensor.numel():
        return tensor.to(device, dtype)
    return tensor.pin_memory().to(device, dtype, non_blocking=True)
