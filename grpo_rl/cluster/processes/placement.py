"""Pools of devices, and the slots of them in which each role's processes are placed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from grpo_rl.cluster.processes import forks
from grpo_rl.cluster.processes.worker_host import BEATS, WorkerHost
from grpo_rl.config import secrets
from grpo_rl.errors import ClusterError

# On CPU a slot reserves next to nothing: worker groups take turns on the cores, they do not own them.
CPU_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one process: bundles of a placement group, and the GPUs of those that are on the process's node.

    They are on one node, except for an engine that spans nodes: its process is on the first one's, and vLLM starts others.
    """

    placement_group: PlacementGroup
    bundles: tuple[int, ...]
    gpu_ids: tuple[str, ...]


@dataclass(frozen=True)
class Place:
    """The slot, the environment and the number of threads of a process."""

    slot: Slot
    environment: Mapping[str, str]
    threads: int
    """Calls that it answers at once."""

    def start(self, name: str, log_file: Path) -> Any:
        """A new process: a Ray actor of class WorkerHost."""
        strategy = PlacementGroupSchedulingStrategy(self.slot.placement_group, self.slot.bundles[0])
        devices = {"CUDA_VISIBLE_DEVICES": ",".join(self.slot.gpu_ids)} if self.slot.gpu_ids else {}
        environment = {**self.environment, **devices}
        options: dict[str, Any] = {"num_cpus": 0, "max_concurrency": self.threads, "scheduling_strategy": strategy}
        copied = forks.runtime_env(environment)
        if copied:
            options["runtime_env"] = copied
        remote: Any = ray.remote  # Ray's types have no concurrency groups
        return (
            remote(concurrency_groups={BEATS: 1})(WorkerHost)
            .options(**options)
            .remote(name, str(log_file), environment, secrets.known())
        )


class Pool:
    """`nnodes` x `per_node` devices, reserved for this run.

    Each node's share is one placement group, so that the ranks of a node are neighbours; with `nodes_per_slot` the share of so
    many nodes is one, whose bundles vLLM gives to the processes of an engine that spans them. Processes are
    placed in a bundle without asking Ray for its GPU, and CUDA_VISIBLE_DEVICES names it. That lets several
    roles share a device, and lets one process use several (tensor parallelism).
    """

    def __init__(
        self, nnodes: int, per_node: int, *, use_gpu: bool, timeout_s: float, grow_s: float = 5.0, nodes_per_slot: int = 1
    ) -> None:
        bundle = {"CPU": 1.0, "GPU": 1.0} if use_gpu else {"CPU": CPU_SHARE}
        self.per_node = per_node
        strategy = "STRICT_PACK" if nodes_per_slot == 1 else "PACK"
        self.groups = [placement_group([bundle] * per_node * nodes_per_slot, strategy) for _ in range(nnodes // nodes_per_slot)]
        what = f"{nnodes} x {per_node} {'GPUs' if use_gpu else 'processes'}"
        self._wait(timeout_s, grow_s, what, lambda: _fits(nnodes, per_node, bundle))
        self.gpu_ids = [_probe_gpus(group, timeout_s) if use_gpu else [] for group in self.groups]
        one_node = [[*range(per_node)]]
        self.on_nodes = [one_node if nodes_per_slot == 1 else self._by_node(group, nodes_per_slot) for group in self.groups]
        """The bundles of each group, node by node."""

    def slots(self, devices_per_slot: int = 1) -> list[Slot]:
        """The pool cut into slots of so many devices each; colocated roles ask for the same ones."""
        slots = []
        for group, gpu_ids, nodes in zip(self.groups, self.gpu_ids, self.on_nodes, strict=True):
            if devices_per_slot > self.per_node:
                cuts = [[bundle for node in nodes for bundle in node]]
            else:
                firsts = range(0, self.per_node - devices_per_slot + 1, devices_per_slot)
                cuts = [node[first : first + devices_per_slot] for node in nodes for first in firsts]
            for bundles in cuts:
                own = bundles[: self.per_node]
                slots.append(Slot(group, tuple(bundles), tuple(gpu_ids[b] for b in own) if gpu_ids else ()))
        return slots

    def nodes(self) -> set[str]:
        """Return Ray's ids of the nodes that the pool is on."""
        return {node for group in self.groups for node in placement_group_table(group)["bundles_to_node_id"].values()}

    def release(self) -> None:
        """Give the devices back."""
        for group in self.groups:
            remove_placement_group(group)

    def _wait(self, timeout_s: float, grow_s: float, what: str, fits: Callable[[], bool]) -> None:
        deadline = time.monotonic() + timeout_s
        for group in self.groups:
            # One that others use now may come free; one that is too small never does.
            if not group.wait(min(grow_s, timeout_s)) and not fits():
                raise ClusterError(
                    f"the cluster is too small: it has {_resources(ray.cluster_resources())} on "
                    f"{sum(node['Alive'] for node in ray.nodes())} nodes, and the run needs {what}; take a larger one, or "
                    "fewer trainer.nnodes, trainer.n_gpus_per_node, rollout.nnodes or rollout.n_gpus_per_node; where nodes are yet "
                    "to join, raise ray_kwargs.ray_init.wait_for_nodes_s"
                )
            if not group.wait(max(0.1, deadline - time.monotonic())):
                raise ClusterError(
                    f"the cluster did not give {what} within {timeout_s:.0f} s; it has {ray.cluster_resources()}, "
                    f"free now {ray.available_resources()}"
                )

    def _by_node(self, group: PlacementGroup, num_nodes: int) -> list[list[int]]:
        """Return the bundles of a group that spans nodes, those of each node together. Raises ClusterError where they lie otherwise."""
        nodes: dict[str, list[int]] = {}
        for bundle, node in sorted(placement_group_table(group)["bundles_to_node_id"].items()):
            nodes.setdefault(node, []).append(bundle)
        if sorted(map(len, nodes.values())) != [self.per_node] * num_nodes:
            found = " + ".join(str(len(bundles)) for bundles in nodes.values())
            raise ClusterError(
                f"an engine was to have {self.per_node} devices on each of {num_nodes} nodes, and Ray gave it {found}: nodes with more "
                "free devices take more of them; set n_gpus_per_node to what a node has, or take a tensor_model_parallel_size that "
                "fits on one"
            )
        return list(nodes.values())


def raylets(slots: Mapping[str, Slot]) -> dict[str, tuple[str, int]]:
    """Return the address of the raylet of each node with a slot, by what messages call the node."""
    on_node: dict[str, list[str]] = {}
    for name, slot in slots.items():
        table = placement_group_table(slot.placement_group)
        for node in {table["bundles_to_node_id"][bundle] for bundle in slot.bundles}:
            on_node.setdefault(node, []).append(name)
    found: dict[str, tuple[str, int]] = {}
    for node in ray.nodes():
        if node["NodeID"] in on_node:
            address, port = node["NodeManagerAddress"], node["NodeManagerPort"]
            workers = ", ".join(on_node[node["NodeID"]])
            name = f"its node {address} ({workers})"
            # An engine that spans nodes is on both, and a test's nodes have one address.
            found[name if name not in found else f"its node {address}:{port} ({workers})"] = address, port
    return found


def _probe_gpus(group: PlacementGroup, timeout_s: float) -> list[str]:
    """Return the GPU that Ray has given each bundle. Raises ClusterError where its processes do not start in time."""
    refs = [
        ray.remote(_gpu_id)
        .options(num_gpus=1, num_cpus=0, scheduling_strategy=PlacementGroupSchedulingStrategy(group, b))
        .remote()
        for b in range(len(group.bundle_specs))
    ]
    try:
        return ray.get(refs, timeout=timeout_s)
    except ray.exceptions.GetTimeoutError as error:
        raise ClusterError(f"the processes that ask for each GPU did not start within {timeout_s:.0f} s") from error


def runs_here() -> bool:
    """Return whether Ray was started for this run, on this machine alone."""
    return str(ray.get_runtime_context().gcs_address).startswith("127.0.0.1:")


def _fits(nnodes: int, per_node: int, bundle: dict[str, float]) -> bool:
    """Return whether the cluster would have room for the pool if nothing else used it."""
    places = [
        min(int(node["Resources"].get(name, 0.0) / amount + 1e-6) // per_node for name, amount in bundle.items())
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sum(places) >= nnodes


def _resources(resources: dict[str, float]) -> str:
    """Format the number of CPUs and GPUs."""
    return ", ".join(f"{resources.get(name, 0.0):g} {name}s" for name in ("CPU", "GPU"))


def _gpu_id() -> str:
    return str(ray.get_gpu_ids()[0])
