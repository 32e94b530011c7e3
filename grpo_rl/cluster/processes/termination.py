"""Ends worker processes: as Ray expects it where they let themselves be ended so, and for certain where they do not."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from grpo_rl.cluster.session.run_watcher import is_tracker, remove_segments
from grpo_rl.processes.family import descendants, is_running, kill_tree, started
from grpo_rl.rollout.engine_environment import own_folder

if TYPE_CHECKING:
    from grpo_rl.cluster.processes.worker_sets import Worker

TITLE = b"ray::"
"""The beginning of the command lines of Ray's workers: a process of another name has only inherited a worker's id."""
LEAVE_S = 2.0
"""Seconds that workers may take to end; a copy ends within milliseconds, an engine has children to end."""


def end_workers(workers: Sequence[Worker]) -> None:
    """End these processes and all below them, in the way that Ray expects: to Ray, a worker that is only killed has crashed.

    Children are looked up before: without their parent they are like any other process.
    """
    here = ray.util.get_node_ip_address()
    local = [worker.pid for worker in workers if worker.pid is not None and worker.address == here]
    below = {child: started(child) for pid in local for child in descendants(pid)}
    for worker in workers:
        ray.kill(worker.actor)
    deadline = time.monotonic() + LEAVE_S
    while any(map(is_running, local)) and time.monotonic() < deadline:
        time.sleep(0.01)
    for pid in local:
        kill_worker(pid)
    for child, since in below.items():
        if since is not None and started(child) == since and not is_tracker(child):
            kill_tree(child, spares=is_tracker)
    for worker in workers:
        if worker.pid is not None and worker.address is not None and worker.address != here:
            kill_process(worker.pid, worker.address)


def kill_process(pid: int, address: str) -> None:
    """Kill the worker with this id on the node at `address`, as `kill_worker` does, in whatever state it is.

    On another node a task of Ray's does it, which is not waited for.
    """
    if address == ray.util.get_node_ip_address():
        kill_worker(pid)
        return
    for node in ray.nodes():
        if node["Alive"] and node["NodeManagerAddress"] == address:
            strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            ray.remote(kill_worker).options(num_cpus=0, scheduling_strategy=strategy).remote(pid)


def kill_worker(pid: int) -> None:
    """Kill a worker of this node with all below it, and remove what its engine has left in shared memory.

    Python's trackers of shared memory are left to their work: they remove what the others leave there, and end with the
    last of them.
    """
    kill_tree(pid, title=TITLE, spares=is_tracker)
    folder = own_folder(pid)
    if folder is not None:
        remove_segments(folder)
