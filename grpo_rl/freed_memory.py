"""Memory that glibc keeps after a process has freed it, given back to the system after a phase of a step."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

KEPT_BYTES = 256 << 20
"""Bytes of freed memory that a process keeps for what it allocates next.

glibc's defaults map a step's tensors anew, and the kernel clears every page again: 14,000 to 37,000 page
faults in a step of 1.1 M parameters, and 4 % of its time (scripts/bench_sft.py). More than this goes back,
because actor and engine take turns: 135 M parameters left 2.9 GiB with the actor while the engine sampled."""
_FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


@functools.cache
def _glibc() -> Any:
    """Return the C library; None if it is not glibc 2.33 or newer."""
    library = ctypes.CDLL(None)
    if not (hasattr(library, "mallinfo2") and hasattr(library, "malloc_trim")):
        return None
    library.mallinfo2.restype = _Mallinfo
    library.malloc_trim.argtypes = [ctypes.c_size_t]
    return library


def give_back() -> bool:
    """Give freed memory back if there is more than KEPT_BYTES; return whether there was."""
    library = _glibc()
    if library is None or library.mallinfo2().fordblks <= KEPT_BYTES:
        return False
    library.malloc_trim(0)
    return True
