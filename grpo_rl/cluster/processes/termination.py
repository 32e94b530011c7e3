"""Ending a worker's process for certain: with its children, when it is stopped, and on another machine."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from grpo_rl.cluster.session.run_watcher import is_tracker, remove_segments
from grpo_rl.rollout.engine_environment import own_folder

_ROUNDS = 3
"""A group is looked through again: a member may have started another while it was."""


def end_process(pid: int, address: str) -> None:
    """Kill the process with this id on the node at `address`, its process group and its descendants.

    On another node a task of Ray's does it, which is not waited for.
    """
    if address == ray.util.get_node_ip_address():
        kill_tree(pid)
        return
    for node in ray.nodes():
        if node["Alive"] and node["NodeManagerAddress"] == address:
            strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            ray.remote(kill_tree).options(num_cpus=0, scheduling_strategy=strategy).remote(pid)


def kill_tree(pid: int, title: bytes = b"ray::") -> None:
    """SIGKILL to the process, to the group it leads or led, and to all its descendants.

    A process under this id that is not called `title...` has only inherited the number, and is left alone. Python's trackers
    of shared memory are left to their work: they remove what the others leave there, and end with the last of them.
    """
    name = _command_line(pid)
    if name and not name.startswith(title):
        return
    # Children first looked up: without their parent they cannot be told from others.
    victims = [pid, *descendants(pid)] if name is not None else []
    has_group = name is None or _leads_its_group(pid)
    for _ in range(_ROUNDS):
        if has_group:
            victims += _members(pid)
        victims = [victim for victim in dict.fromkeys(victims) if not is_tracker(victim)]
        if not victims:
            break
        for victim in victims:
            _signal(victim)
        victims = []
    folder = own_folder(pid)
    if folder is not None:
        remove_segments(folder)


def descendants(pid: int) -> list[int]:
    """Ids of all processes below this one, also of those in sessions of their own."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and (parent := _parent(folder)) is not None:
            children.setdefault(parent, []).append(int(folder.name))
    found, waiting = [], [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def _parent(folder: Path) -> int | None:
    fields = _fields(folder)
    return int(fields[1]) if fields else None


def _members(group: int) -> list[int]:
    """Ids of all processes of a group, those left out that have ended and were not waited for."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and (fields := _fields(folder)) and int(fields[2]) == group and fields[0] not in "ZX":
            found.append(int(folder.name))
    return found


def _fields(folder: Path) -> list[str]:
    """State, parent and group of a process, and more; nothing where it has ended meanwhile."""
    try:
        # The name in parentheses may hold anything, spaces and parentheses included.
        return (folder / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _command_line(pid: int) -> bytes | None:
    """What the process is called, empty for one that has ended and was not waited for; None where there is none."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return None


def _leads_its_group(pid: int) -> bool:
    try:
        return os.getpgid(pid) == pid
    except OSError:
        return False


def _signal(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
