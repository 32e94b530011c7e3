"""Places on a Ray cluster of several nodes with declared GPUs: none of them is there, and Ray counts them all the same."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster as RayCluster
from ray.util.placement_group import placement_group_table

from grpo_rl.cluster.processes.placement import Pool, raylets
from grpo_rl.cluster.processes.worker_group import Worker
from grpo_rl.errors import ClusterError

START_S = 120.0


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[None]:
    """Two nodes of two GPUs each; the second one may use the fifth and the seventh of its machine only."""
    with pytest.MonkeyPatch.context() as patch:
        # Ray's processes have to find the probe below, too.
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        cluster = RayCluster()
        cluster.add_node(num_cpus=4, num_gpus=2, env_vars={"CUDA_VISIBLE_DEVICES": "0,1"}, include_dashboard=False)
        cluster.add_node(num_cpus=4, num_gpus=2, env_vars={"CUDA_VISIBLE_DEVICES": "5,7"})
        ray.init(address=cluster.address, log_to_driver=False)
        try:
            yield
        finally:
            ray.shutdown()
            cluster.shutdown()


def node_of(slot: Any, bundle: int) -> str:
    return str(placement_group_table(slot.placement_group)["bundles_to_node_id"][bundle])


def environment_of(slot: Any, tmp_path: Path) -> tuple[str, str]:
    """The node, and the visible devices of a process that is started in the slot."""
    actor = Worker("probe", slot, tmp_path, {}).actor
    ray.get(actor.build.remote(make_probe), timeout=START_S)
    node, devices, group = ray.get(actor.call.remote("look"), timeout=START_S)
    # vLLM takes the group that its process is in for its own processes.
    assert group == slot.placement_group.id.hex()
    ray.kill(actor)
    return node, devices


def make_probe() -> Probe:
    return Probe()


class Probe:
    """What a process sees of its place."""

    def look(self) -> tuple[str, str, str]:
        group = ray.util.get_current_placement_group()
        return ray.get_runtime_context().get_node_id(), os.environ["CUDA_VISIBLE_DEVICES"], group.id.hex()


def test_each_rank_sees_its_own_gpu_of_those_that_its_node_may_use(two_nodes: None, tmp_path: Path) -> None:
    pool = Pool(2, 2, use_gpu=True, timeout_s=START_S)
    try:
        seen = [environment_of(slot, tmp_path) for slot in pool.slots()]
        assert sorted(devices for _, devices in seen) == ["0", "1", "5", "7"]
        assert [node for node, _ in seen] == [node_of(slot, slot.bundles[0]) for slot in pool.slots()]
        pairs = pool.slots(2)
        assert sorted(slot.gpu_ids for slot in pairs) == [("0", "1"), ("5", "7")]
        assert len(raylets({f"rank{i}": slot for i, slot in enumerate(pool.slots())})) == 2
    finally:
        pool.release()


def test_an_engine_that_spans_nodes_has_all_their_devices_and_shares_them_with_the_ranks(
    two_nodes: None, tmp_path: Path
) -> None:
    pool = Pool(2, 2, use_gpu=True, timeout_s=START_S, nodes_per_slot=2)
    try:
        (engine,) = pool.slots(4)
        nodes = [node_of(engine, bundle) for bundle in engine.bundles]
        assert len(engine.bundles) == 4 and nodes[0] == nodes[1] != nodes[2] == nodes[3], "node by node"
        assert len(engine.gpu_ids) == 2, "those of the first node, where the engine's own process is"
        node, devices = environment_of(engine, tmp_path)
        assert (node, devices) == (nodes[0], ",".join(engine.gpu_ids))
        ranks = pool.slots()
        assert sorted(slot.gpu_ids for slot in ranks) == [("0",), ("1",), ("5",), ("7",)]
        assert [slot.bundles[0] for slot in ranks] == list(engine.bundles), (
            "the ranks lie on the engine's devices, in its order"
        )
        assert len(raylets({"engine": engine})) == 2, "the loss of either node is noticed"
        # vLLM's own processes ask Ray for the bundles' GPUs, which no process of ours has taken.
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        refs = [
            ray.remote(_gpu)
            .options(num_gpus=1, num_cpus=0, scheduling_strategy=strategy(engine.placement_group, bundle))
            .remote()
            for bundle in engine.bundles
        ]
        assert sorted(ray.get(refs, timeout=START_S)) == ["0", "1", "5", "7"]
    finally:
        pool.release()


def test_a_group_that_lies_otherwise_than_asked_is_refused(two_nodes: None) -> None:
    with pytest.raises(ClusterError, match="1 devices on each of 2 nodes, and Ray gave it 2"):
        Pool(2, 1, use_gpu=True, timeout_s=START_S, nodes_per_slot=2)


def _gpu() -> str:
    return str(ray.get_gpu_ids()[0])
