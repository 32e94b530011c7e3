"""Memory that glibc keeps after a process has freed it, given back to the system after a phase of a step."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from grpo_rl.machine_memory import machine_memory

KEPT_BYTES = 256 << 20
KEPT_SHARE = 0.25
"""A process keeps so much of what it has freed for what it allocates next, or this share of the free memory.

The kernel clears every page that a process gets: giving memory back between phases took 5 % of a step of 1.1 M
parameters (scripts/bench_step.py) and 15 % of one of 135 M. If memory is short it goes back, because actor and
engine take turns: 135 M parameters left 2.9 GiB with the actor while the engine sampled."""
NEVER = 8 << 30
"""For glibc's own thresholds, at which it gives memory back in the middle of a phase."""
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
    """Give freed memory back if there is more than the process may keep; return whether there was."""
    library = _glibc()
    freed = 0 if library is None else library.mallinfo2().fordblks
    if freed <= KEPT_BYTES or freed <= KEPT_SHARE * machine_memory().free:
        return False
    library.malloc_trim(0)
    return True
