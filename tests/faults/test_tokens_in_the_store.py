"""Tokens in Ray's object store: they outlive the replica that reported them, pass the controller by, and are freed."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest
import ray
import tiny_roles
from ray._private.internal_api import node_stats
from recovery_ground import START_S, Scene, until

from grpo_rl.cluster.processes.worker_group import StoredBlock, WorkerGroup
from grpo_rl.cluster.roles.trained_roles import Dispatched
from grpo_rl.columns import View
from grpo_rl.config.derived import MicroBatchRule
from grpo_rl.data.collate import collate
from grpo_rl.types import Prompt, Rollout, Sampling

NUM_TOKENS = tiny_roles.BULK
"""Of one response: 320 kB with its log-probs, which is more than Ray puts into a message."""


def stored_bytes() -> int:
    """What Ray's object store holds."""
    node = ray.nodes()[0]
    stats = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=False)
    return int(stats.store_stats.object_store_bytes_used)


@pytest.fixture(scope="module")
def readers(scene: Scene) -> WorkerGroup:
    """Two processes that read shares of a batch."""
    scene.reset()
    return scene.ground.ranks("reader", 2, tiny_roles.make_reader)


def sample(scene: Scene, tag: str, count: int = 6) -> list[Rollout]:
    prompts = [Prompt(f"{tag}{i}", (i, 1), "?", "test") for i in range(count)]
    rollouts = scene.pool.generate(prompts, 1, Sampling(max_tokens=NUM_TOKENS, seed=3))
    for rollout in rollouts:
        rollout.reward = 0.0
    return rollouts


def expected(dispatched: Dispatched) -> list[int]:
    """What each reader's share comes to, worked out from the prompts."""
    sums = []
    for share in dispatched.shards:
        ids = [np.concatenate([(index, 1), tiny_roles.bulk_ids(index, NUM_TOKENS)]) for index in share]
        sums.append(tiny_roles.checksum(np.concatenate(ids)))
    return sums


def read(readers: WorkerGroup, dispatched: Dispatched) -> list[int]:
    return readers.call_each("read", [(stored,) for stored in dispatched.stored])


def test_a_replica_that_dies_after_its_report_takes_no_token_along_and_the_controller_fetches_none(
    scene: Scene, readers: WorkerGroup
) -> None:
    rollouts = sample(scene, "dies")
    for worker in list(scene.pool.replicas.serving):
        worker.kill("the test ends it")
        until(lambda pid=worker.pid: not Path(f"/proc/{pid}").exists(), 30.0, "the process is gone")
    dispatched = Dispatched.to(readers, collate(rollouts), MicroBatchRule(None, 1))
    assert read(readers, dispatched) == expected(dispatched)
    views = [one.response_ids for one in rollouts]
    assert all(isinstance(view, View) and isinstance(view.block, StoredBlock) and view.block._block is None for view in views)
    # One view of shared memory serves all that is read here.
    assert views[2].tolist() == tiny_roles.bulk_ids(2, NUM_TOKENS).tolist()
    first, second = (np.asarray(views[2]) for _ in range(2))
    assert np.shares_memory(first, second) and not first.flags.writeable
    until(lambda: bool(scene.pool.replicas.ready()) or bool(scene.pool.replicas.serving), START_S, "a replica is there again")
    again = sample(scene, "after", 2)
    assert again[1].response_ids.tolist() == tiny_roles.bulk_ids(1, NUM_TOKENS).tolist()


def test_the_blocks_are_freed_when_the_step_is_over(scene: Scene, readers: WorkerGroup) -> None:
    def one_step(tag: str) -> int:
        rollouts = sample(scene, tag, 12)
        dispatched = Dispatched.to(readers, collate(rollouts), MicroBatchRule(None, 1))
        assert read(readers, dispatched) == expected(dispatched)
        rollouts[0].response_ids.tolist()  # reading here must not keep it either
        return stored_bytes()

    gc.collect()
    until(lambda: stored_bytes() <= 100_000, 30.0, "what the tests before have left is freed")
    before = stored_bytes()
    for number in range(3):
        during = one_step(f"free{number}")
        assert during - before > 12 * NUM_TOKENS * 8 * 0.9, "the step's tokens lie in the store"
        gc.collect()
        until(lambda: stored_bytes() <= before + 100_000, 30.0, f"{stored_bytes() - before} bytes are freed")
