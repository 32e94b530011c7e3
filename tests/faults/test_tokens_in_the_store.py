"""Tokens in Ray's object store: they outlive the replica that reported them, pass the controller by, and are freed."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import ray
import tiny_roles
from ray._private.internal_api import node_stats
from recovery_ground import START_S, Actor, Ground, until

from grpo_rl.cluster.processes.placement import Pool
from grpo_rl.cluster.processes.worker_group import StoredBlock, WorkerGroup
from grpo_rl.cluster.roles.rollout_pool import ReplicaPool
from grpo_rl.cluster.roles.trained_roles import Dispatched
from grpo_rl.columns import View
from grpo_rl.config.derived import MicroBatchRule
from grpo_rl.data.collate import collate
from grpo_rl.types import Prompt, Rollout, Sampling

NUM_TOKENS = 40_000
"""Of one response: 320 kB with its log-probs, which is more than Ray puts into a message."""


class Scene:
    """Two replicas that answer at once with long responses, and two processes that read shares of a batch."""

    def __init__(self, slots: Pool, logs: Path) -> None:
        self.empty = stored_bytes()
        self.ground = Ground(slots, logs)
        supervisor = self.ground.supervisor()
        self.readers: WorkerGroup = self.ground.ranks("reader", 2, tiny_roles.make_reader)
        self.actor = Actor(self.ground.ranks("actor", 1, tiny_roles.make_actor))
        self.pool: ReplicaPool = self.ground.pool(2, tiny_roles.make_bulk_rollout, 0.0, self.actor.worker_group, supervisor)

    def sample(self, tag: str, count: int = 6) -> list[Rollout]:
        prompts = [Prompt(f"{tag}{i}", (i, 1), "?", "test") for i in range(count)]
        rollouts = self.pool.generate(prompts, 1, Sampling(max_tokens=NUM_TOKENS, seed=3))
        for rollout in rollouts:
            rollout.reward = 0.0
        return rollouts

    def expected(self, dispatched: Dispatched) -> list[int]:
        """What each reader's share comes to, worked out from the prompts."""
        sums = []
        for share in dispatched.shards:
            ids = [np.concatenate([(index, 1), tiny_roles.bulk_ids(index, NUM_TOKENS)]) for index in share]
            sums.append(tiny_roles.checksum(np.concatenate(ids)))
        return sums

    def read(self, dispatched: Dispatched) -> list[int]:
        return self.readers.call_each("read", [(stored,) for stored in dispatched.stored])


def stored_bytes() -> int:
    """What Ray's object store holds."""
    node = ray.nodes()[0]
    stats = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=False)
    return int(stats.store_stats.object_store_bytes_used)


@pytest.fixture(scope="module")
def scene(slots: Pool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    made = Scene(slots, tmp_path_factory.mktemp("logs"))
    yield made
    made.ground.close()


def test_a_replica_that_dies_after_its_report_takes_no_token_along_and_the_controller_fetches_none(scene: Scene) -> None:
    rollouts = scene.sample("dies")
    for worker in list(scene.pool.replicas.serving):
        worker.kill("the test ends it")
        until(lambda pid=worker.pid: not Path(f"/proc/{pid}").exists(), 30.0, "the process is gone")
    dispatched = Dispatched.to(scene.readers, collate(rollouts), MicroBatchRule(None, 1))
    assert scene.read(dispatched) == scene.expected(dispatched)
    views = [one.response_ids for one in rollouts]
    assert all(isinstance(view, View) and isinstance(view.block, StoredBlock) and view.block._block is None for view in views)
    # One view of shared memory serves all that is read here.
    assert views[2].tolist() == tiny_roles.bulk_ids(2, NUM_TOKENS).tolist()
    first, second = (np.asarray(views[2]) for _ in range(2))
    assert np.shares_memory(first, second) and not first.flags.writeable
    until(lambda: bool(scene.pool.replicas.ready()) or bool(scene.pool.replicas.serving), START_S, "a replica is there again")
    again = scene.sample("after", 2)
    assert again[1].response_ids.tolist() == tiny_roles.bulk_ids(1, NUM_TOKENS).tolist()


def test_the_blocks_are_freed_when_the_step_is_over(scene: Scene) -> None:
    def one_step(tag: str) -> int:
        rollouts = scene.sample(tag, 12)
        dispatched = Dispatched.to(scene.readers, collate(rollouts), MicroBatchRule(None, 1))
        assert scene.read(dispatched) == scene.expected(dispatched)
        rollouts[0].response_ids.tolist()  # reading here must not keep it either
        return stored_bytes()

    gc.collect()
    until(lambda: stored_bytes() <= scene.empty + 100_000, 30.0, "what the tests before have left is freed")
    before = stored_bytes()
    for number in range(3):
        during = one_step(f"free{number}")
        assert during - before > 12 * NUM_TOKENS * 8 * 0.9, "the step's tokens lie in the store"
        gc.collect()
        until(lambda: stored_bytes() <= before + 100_000, 30.0, f"{stored_bytes() - before} bytes are freed")
