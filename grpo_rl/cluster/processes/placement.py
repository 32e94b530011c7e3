"""Pools of devices, the slots in which processes are placed, and the check that each machine has what a run
needs.

A machine with other sources or versions, without the run's folder or a model, would train something else
without a word, or fail hours later.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from secrets import token_hex
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from grpo_rl.errors import ClusterError
from grpo_rl.frozen import frozen
from grpo_rl.source_code import sources

# On CPU a slot reserves next to nothing: worker groups take turns on the cores, they do not own them.
CPU_SHARE = 0.01


@frozen
class Slot:
    """The place of one process: bundles of a placement group, and the GPUs of those that are on the process's node.

    They are on one node, except for an engine that spans nodes: its process is on the first one's, and vLLM starts others.
    """

    placement_group: PlacementGroup
    bundles: tuple[int, ...]
    gpu_ids: tuple[str, ...]

    @property
    def options(self) -> dict[str, Any]:
        return {"num_cpus": 0, "scheduling_strategy": PlacementGroupSchedulingStrategy(self.placement_group, self.bundles[0])}


@frozen
class NodeSlot:
    node: str
    num_cpus: float
    gpu_ids: tuple[str, ...] = ()

    @property
    def options(self) -> dict[str, Any]:
        return {"num_cpus": self.num_cpus, "scheduling_strategy": NodeAffinitySchedulingStrategy(self.node, soft=False)}


class Pool:
    """`nnodes` x `per_node` devices, reserved for this run.

    Each node's share is one placement group, so that its ranks are neighbours; with `nodes_per_slot` that of
    so many nodes is one, whose bundles vLLM gives to the processes of an engine that spans them. Processes
    are placed in a bundle without asking Ray for its GPU, which CUDA_VISIBLE_DEVICES names: so several roles
    share a device, and one process may use several (tensor parallelism).
    """

    def __init__(
        self,
        nnodes: int,
        per_node: int,
        *,
        use_gpu: bool,
        timeout_s: float,
        grow_s: float = 5.0,
        nodes_per_slot: int = 1,
        check: Callable[[Iterable[str]], None] | None = None,
    ) -> None:
        """`check` raises ClusterError for nodes, by Ray's ids, that lack what the processes need."""
        self._bundle = {"CPU": 1.0, "GPU": 1.0} if use_gpu else {"CPU": CPU_SHARE}
        self.per_node = per_node
        self._free: list[Slot] = []  # of the pool, whose process has left
        self._further: list[PlacementGroup] = []  # reserved since, each for one process
        strategy = "STRICT_PACK" if nodes_per_slot == 1 else "PACK"
        self.groups = [
            placement_group([self._bundle] * per_node * nodes_per_slot, strategy) for _ in range(nnodes // nodes_per_slot)
        ]
        self._wait(nnodes, timeout_s, grow_s)
        self.gpu_ids = [_probe_gpus(group, timeout_s) if use_gpu else [] for group in self.groups]
        self.on_nodes = [self._by_node(group, nodes_per_slot) for group in self.groups]
        self._check, self.nodes = check, set(nodes_of(*self.groups))
        if check is not None:
            check(self.nodes)

    def slots(self, devices_per_slot: int = 1, processes_per_slot: int = 1) -> list[Slot]:
        """Return the pool in slots of so many devices, each so often; colocated roles ask for the same."""
        slots = []
        for group, gpu_ids, nodes in zip(self.groups, self.gpu_ids, self.on_nodes, strict=True):
            if devices_per_slot > self.per_node:
                cuts = [[bundle for node in nodes for bundle in node]]
            else:
                firsts = range(0, self.per_node - devices_per_slot + 1, devices_per_slot)
                cuts = [node[first : first + devices_per_slot] for node in nodes for first in firsts]
            for bundles in cuts:
                node_bundles = bundles[: self.per_node]
                slots.append(Slot(group, tuple(bundles), tuple(gpu_ids[b] for b in node_bundles) if gpu_ids else ()))
        # The processes that share a slot are far apart in the list: if fewer are asked for, each slot has its first one.
        return slots * processes_per_slot

    def cpus_on(self, node: str) -> float:
        return nodes_of(*self.groups, *self._further).count(node) * self._bundle["CPU"]

    def another(self, devices: int, timeout_s: float, node: str | None = None) -> Slot:
        """Return a slot for one process more: one that was given back, or `devices` on one node, on `node` if
        there is room.

        Raises ClusterError if there is no room in time, or the check of the node fails.
        """
        if node is None and self._free:
            return self._free.pop()
        group = placement_group([self._bundle] * devices, "STRICT_PACK", _soft_target_node_id=node)
        self._further.append(group)
        deadline = time.monotonic() + timeout_s
        try:
            # In short looks: the run may end meanwhile, and Ray with it.
            while not (ray.is_initialized() and group.wait(1.0)):
                if not ray.is_initialized() or time.monotonic() > deadline:
                    raise ClusterError(
                        f"the cluster had no room for {devices} more devices on one node within {timeout_s:.0f} s"
                    )
            if self._check is not None:
                self._check(set(nodes_of(group)))
            gpu_ids = _probe_gpus(group, timeout_s) if "GPU" in self._bundle else []
        except ClusterError:
            self.give_back(Slot(group, (), ()))
            raise
        return Slot(group, tuple(range(devices)), tuple(gpu_ids))

    def give_back(self, slot: Slot, is_gone: bool = False) -> None:
        """Take back a slot whose process has left; `is_gone` if its node is no longer there."""
        if slot.placement_group in self._further:
            self._further.remove(slot.placement_group)
            remove_placement_group(slot.placement_group)
        elif not is_gone:
            self._free.append(slot)

    def release(self) -> None:
        for group in [*self.groups, *self._further]:
            remove_placement_group(group)

    def _wait(self, nnodes: int, timeout_s: float, grow_s: float) -> None:
        what = f"{nnodes} x {self.per_node} {'GPUs' if 'GPU' in self._bundle else 'processes'}"
        deadline = time.monotonic() + timeout_s
        for group in self.groups:
            # One that others use now may come free; one that is too small never does.
            if not group.wait(min(grow_s, timeout_s)) and not _fits(nnodes, self.per_node, self._bundle):
                total = ray.cluster_resources()
                raise ClusterError(
                    f"the cluster is too small: it has {total.get('CPU', 0.0):g} CPUs, {total.get('GPU', 0.0):g} GPUs on "
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
        """Return a group's bundles node by node. Raises ClusterError for unequal shares."""
        nodes: defaultdict[str, list[int]] = defaultdict(list)
        for bundle, node in sorted(placement_group_table(group)["bundles_to_node_id"].items()):
            nodes[node].append(bundle)
        if sorted(map(len, nodes.values())) != [self.per_node] * num_nodes:
            sizes = " + ".join(str(len(bundles)) for bundles in nodes.values())
            raise ClusterError(
                f"an engine was to have {self.per_node} devices on each of {num_nodes} nodes, and Ray gave it {sizes}: nodes with more "
                "free devices take more of them; set n_gpus_per_node to what a node has, or take a tensor_model_parallel_size that "
                "fits on one"
            )
        return list(nodes.values())


def nodes_of(*groups: PlacementGroup) -> list[str]:
    return [node for group in groups for node in placement_group_table(group)["bundles_to_node_id"].values()]


def raylets(slots: Mapping[str, Slot]) -> dict[str, tuple[str, int]]:
    """Return the address of the raylet of each node with a slot, by what messages call the node."""
    on_node: defaultdict[str, list[str]] = defaultdict(list)
    for name, slot in slots.items():
        nodes = placement_group_table(slot.placement_group)["bundles_to_node_id"]
        for node in {nodes[bundle] for bundle in slot.bundles}:
            on_node[node].append(name)
    addresses: dict[str, tuple[str, int]] = {}
    for node in ray.nodes():
        if node["NodeID"] in on_node:
            address, port = node["NodeManagerAddress"], node["NodeManagerPort"]
            workers = ", ".join(on_node[node["NodeID"]])
            name = f"its node {address} ({workers})"
            # An engine that spans nodes is on both, and a test's nodes have one address.
            addresses[name if name not in addresses else f"its node {address}:{port} ({workers})"] = address, port
    return addresses


def _probe_gpus(group: PlacementGroup, timeout_s: float) -> list[str]:
    refs = [
        ray.remote(lambda: str(ray.get_gpu_ids()[0]))
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
    places = [
        min(int(node["Resources"].get(name, 0.0) / amount + 1e-6) // per_node for name, amount in bundle.items())
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sum(places) >= nnodes


# ---- what each machine has ---------------------------------------------------------------------------


PACKAGES = ("ray", "torch", "transformers", "vllm")
SEEN_S = 5.0  # a shared file system may take so long to show a file to another machine
ANSWER_S = 45.0  # Ray has to start a process there
PATIENCE_S = 1.0


@frozen
class Found:
    name: str
    versions: Mapping[str, str]
    code: Mapping[str, str]  # the SHA-256 of each source file, by its name
    lacks: frozenset[str] = frozenset()  # files and folders


def look(own_files: Sequence[str], paths: Sequence[str], seen_s: float = SEEN_S) -> Found:
    """Return this machine's versions, its code with the user's `own_files`, and which of `paths` it lacks."""
    until = time.monotonic() + seen_s
    while (lacks := [path for path in paths if not os.path.exists(path)]) and time.monotonic() < until:
        time.sleep(0.2)
    versions = {"Python": ".".join(map(str, sys.version_info[:3]))}
    versions |= {package: _version(package) for package in PACKAGES}
    return Found(socket.gethostname(), versions, sources(own_files), frozenset(lacks))


def differences(machine: str, theirs: Found, ours: Found, needed: Mapping[str, str]) -> Iterator[str]:
    """Yield what keeps `machine` from taking part, a line each. `needed` says what each path is for."""
    for package, version in ours.versions.items():
        if theirs.versions.get(package) != version:
            node_version = theirs.versions.get(package, "none")
            yield (
                f"{machine} has {package} {node_version}, and the controller's machine ({ours.name}) {version}: "
                "bash scripts/setup.sh cluster, or the same image, on every machine"
            )
    differing = sorted(name for name in {**ours.code, **theirs.code} if ours.code.get(name) != theirs.code.get(name))
    if differing:
        first = f"{differing[0]} {'differs' if differing[0] in theirs.code else 'is not there'}"
        rest = f", and so it is with {len(differing) - 1} more" if len(differing) > 1 else ""
        yield (
            f"{machine} has other code than the controller's machine ({ours.name}): {first}{rest}; copy the same code to every "
            "machine, or send it along with scripts/submit.sh"
        )
    for path, what in needed.items():
        if path in theirs.lacks:
            yield f"{machine} does not see {path}, {what}"


def check_machines(nodes: Iterable[str], run_folder: Path, own_files: Sequence[str], models: Mapping[str, str]) -> None:
    """Look at the machines with these ids of Ray's. Raises ClusterError naming each that lacks what the run
    needs.

    `own_files` are files of the user's that workers import; `models` the folders that they read, with the
    setting of each.
    """
    # A new name: no file system has remembered that it was not there.
    marker = run_folder / f".seen_{token_hex(4)}"
    needed = {str(marker): "which the run has written: trainer.default_local_dir must be on storage that all machines share"}
    needed |= {path: f"{key}: copy it there, to the same path" for path, key in models.items() if os.path.exists(path)}
    local_setup = look(own_files, ())
    known = {node["NodeID"]: f"the machine {node['NodeManagerAddress']}" for node in ray.nodes()}
    problems: list[str] = []
    marker.touch()
    try:
        answers = {
            node: ray.remote(look).options(max_retries=0, **NodeSlot(node, 0).options).remote(own_files, list(needed))
            for node in nodes
        }
        until = time.monotonic() + ANSWER_S
        for node, answer in answers.items():
            machine = known.get(node, f"the node {node}")
            try:
                node_setup: Found = ray.get(answer, timeout=max(PATIENCE_S, until - time.monotonic()))
            except ray.exceptions.GetTimeoutError:
                problems.append(
                    f"{machine} did not start a process within {ANSWER_S:.0f} s: is it overloaded, or out of reach?"
                )
            except ray.exceptions.RayError as error:
                lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
                reason = next((line for line in reversed(lines) if "ModuleNotFoundError" in line), lines[-1])
                problems.append(f"{machine} cannot run this program: {reason}; bash scripts/setup.sh cluster there")
            else:
                problems += differences(f"{machine} ({node_setup.name})", node_setup, local_setup, needed)
    finally:
        marker.unlink(missing_ok=True)
    if problems:
        raise ClusterError("\n  ".join(problems))


def _version(package: str) -> str:
    # vLLM's build for CPUs is a package of another name.
    for name in (package, f"{package}-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "none"
