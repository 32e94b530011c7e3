"""The memory of this machine: how much there is, and how much of it can still be had, a container's limit included."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

MEMINFO, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


class MachineMemory(NamedTuple):
    """Bytes of memory: those that can still be had, and all."""

    free: float
    total: float

    @property
    def used_share(self) -> float:
        """The share that cannot be had any more, from 0 to 1."""
        return 1.0 - self.free / self.total if self.total > 0 else 0.0


def machine_memory() -> MachineMemory:
    """Return what the machine has, or what a container may use where that is less. Raises OSError where nothing says it."""
    fields = {}
    for line in MEMINFO.read_text().splitlines():
        name, _, rest = line.partition(":")
        fields[name] = int(rest.split()[0]) * 1024.0
    total, free = fields["MemTotal"], fields["MemAvailable"]
    try:
        limit = float((CGROUP / "memory.max").read_text())
        used = float((CGROUP / "memory.current").read_text()) - _kept_of_files()
    except (OSError, ValueError):
        return MachineMemory(free, total)
    return MachineMemory(max(0.0, min(free, limit - used)), min(total, limit))


def _kept_of_files() -> float:
    """Return the bytes of files that the kernel keeps in a container's memory, and gives up when a process asks."""
    for line in (CGROUP / "memory.stat").read_text().splitlines():
        if line.startswith("inactive_file "):
            return float(line.split()[1])
    return 0.0
