"""The memory of this machine, with a container's limit, and errors of memory."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from grpo_rl.errors import OutOfMemory

OUT_OF_MEMORY = re.compile(r"can't allocate memory|out of memory|CUBLAS_STATUS_ALLOC_FAILED")
MEMINFO, CGROUP, OWN_GROUPS = Path("/proc/meminfo"), Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


class MachineMemory(NamedTuple):
    free: float
    total: float
    owner: str = "machine"

    @property
    def used_share(self) -> float:
        return 1.0 - self.free / self.total if self.total > 0 else 0.0


def machine_memory() -> MachineMemory:
    """Return what the machine or container may use. Raises OSError if nothing says it."""
    fields = {}
    for line in MEMINFO.read_text().splitlines():
        name, _, rest = line.partition(":")
        fields[name] = int(rest.split()[0]) * 1024.0
    machine = MachineMemory(fields["MemAvailable"], fields["MemTotal"])
    for folder, limit_file, used_file in _groups():
        try:
            limit = float((folder / limit_file).read_text())
            used = float((folder / used_file).read_text()) - _kept_of_files(folder)
        except (OSError, ValueError):  # no such group here, or one without a limit
            continue
        owner = "container" if limit < machine.total else machine.owner
        machine = MachineMemory(max(0.0, min(machine.free, limit - used)), min(machine.total, limit), owner)
    return machine


def _groups() -> Iterator[tuple[Path, str, str]]:
    """A container often sees its own group as the root, and its path as the host has it."""
    for line in OWN_GROUPS.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        group_path = PurePosixPath(path.lstrip("/"))
        if not controllers:  # version 2, alone or beside version 1
            roots, files = (CGROUP, CGROUP / "unified"), ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            roots, files = (CGROUP / controllers, CGROUP / "memory"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        yield from ((root / group, *files) for root in roots for group in (group_path, *group_path.parents))


def _kept_of_files(group: Path) -> float:
    """Return the bytes of cached files, which the kernel gives up if a process asks."""
    fields = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    # Version 1 has sums over the groups below under names of their own.
    return float(fields.get("total_inactive_file", fields.get("inactive_file", 0)))


def out_of_memory(error: Exception) -> OutOfMemory | None:
    """Return an error with the free memory if `error` says that memory ran out."""
    kind, text = type(error).__name__, " ".join(str(error).split()) or "no message"
    if kind not in ("OutOfMemoryError", "MemoryError") and not OUT_OF_MEMORY.search(text):
        return None
    has = machine_memory()
    where, free, total = f"{has.owner}'s memory", float(has.free), float(has.total)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError) and torch.cuda.is_available():
        where, (free, total) = "GPU's memory", torch.cuda.mem_get_info()
    return OutOfMemory(f"{kind}: {text[:300]}; {free / 2**30:,.2f} GiB of {total / 2**30:,.2f} GiB of the {where} are free")
