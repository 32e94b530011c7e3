"""A real Ray session with a pool of tiny replicas and a tiny actor, supervised as in a run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tiny_roles
from tiny_roles import token

from grpo_rl.cluster.processes.placement import Pool
from grpo_rl.cluster.processes.worker_group import Worker, WorkerGroup, wait_all
from grpo_rl.cluster.recovery.replicas import Elastic, Replicas
from grpo_rl.cluster.recovery.supervisor import Recoveries, Supervisor
from grpo_rl.cluster.roles.rollout_pool import PoolOptions, ReplicaPool, Transfer
from grpo_rl.config.schema.tree import TrainerConfig
from grpo_rl.rollout.requests import sample_seed
from grpo_rl.types import Prompt, Rollout, Sampling

SECONDS_PER_STEP = 0.005
HEARTBEAT_S = 1.0
START_S = 120.0
STEP_S = 120.0


@dataclass
class Ground:
    """The places, logs and workers that the tests of one module share."""

    slots: Pool
    logs: Path
    warnings: list[tuple[float, str]] = field(default_factory=list)
    """What was warned of, with the time."""
    worker_groups: list[WorkerGroup] = field(default_factory=list)
    supervisors: list[Supervisor] = field(default_factory=list)

    def supervisor(self, max_restarts: int = 100) -> Supervisor:
        config = TrainerConfig(heartbeat_s=HEARTBEAT_S, max_restarts=max_restarts, start_timeout_s=START_S)
        made = Supervisor(config, Recoveries(config, lambda line: self.warnings.append((time.monotonic(), line))))
        self.supervisors.append(made)
        return made

    def worker_group(
        self, role: str, size: int, factory: Callable[..., Any], arguments: list[tuple[Any, ...]], threads: int = 1
    ) -> WorkerGroup:
        """A worker group that is built."""
        options: Any = {"log_dir": self.logs, "environment": {"OMP_NUM_THREADS": "1"}, "threads_per_worker": threads}
        made = WorkerGroup(role, self.slots.slots()[:size], call_timeout_s=STEP_S, **options)
        self.worker_groups.append(made)
        made.where(START_S)
        wait_all(made.workers, made.start_build(factory, arguments), START_S, f"start {role}")
        return made

    def ranks(self, role: str, size: int, factory: Callable[..., Any]) -> WorkerGroup:
        """A worker group whose processes have their numbers."""
        return self.worker_group(role, size, factory, [(rank,) for rank in range(size)])

    def pool(
        self, size: int, factory: Callable[..., Any], argument: Any, actors: WorkerGroup, supervisor: Supervisor, **more: Any
    ) -> ReplicaPool:
        """A pool of so many replicas, from one to four later, that get their weights from these actors; `more` are PoolOptions."""
        worker_group = self.worker_group("rollout", size, factory, [(argument,)] * size, threads=3)

        def build(worker: Worker) -> Any:
            return worker.actor.build.remote(factory, argument)

        options = PoolOptions(max_num_seqs=4, sleeps=False, step_timeout_s=STEP_S, **more)
        transfer = Transfer("object_store", actors, worker_group, 1, START_S)
        return ReplicaPool(Replicas(worker_group, supervisor, build, elastic=Elastic(1, 4, self.slots, 1)), transfer, options)

    def close(self) -> None:
        for supervisor in self.supervisors:
            supervisor.close()
        for worker_group in self.worker_groups:
            worker_group.shutdown()


class Actor:
    """The part of an actor's role that the pool needs: versions, and the weights of each, worked out here as well."""

    AMOUNT = 3
    """Of an update; the k-th one adds k times as much to each weight."""

    def __init__(self, worker_group: WorkerGroup) -> None:
        self.worker_group = worker_group
        self.version = 0
        self.weights = {0: [0, 0, 0]}

    def train(self) -> None:
        """An update of the ranks and its version."""
        answer = self.worker_group.call("update", self.AMOUNT)
        self.count_update()
        assert answer == [sum(self.weights[self.version])]

    def count_update(self) -> None:
        self.version += 1
        self.weights[self.version] = [weight + self.AMOUNT * self.version for weight in self.weights[self.version - 1]]

    def expect(self, rollouts: list[Rollout], seed: int) -> None:
        """Every token is the one that the weights of its version sample at its place."""
        assert rollouts
        for rollout in rollouts:
            own = sample_seed(seed, rollout.prompt.uid, rollout.sample_index) or 0
            versions = [version for version, count in rollout.versions for _ in range(count)]
            prompt = int(rollout.prompt.token_ids[0])
            expected = [token(prompt, own, place, self.weights[version]) for place, version in enumerate(versions)]
            assert rollout.response_ids.tolist() == expected


class Scene:
    """An actor, and two supervised replicas that take its weights: processes cost seconds, so that all tests share them."""

    def __init__(self, slots: Pool, logs: Path) -> None:
        self.ground = Ground(slots, logs)
        actors = self.ground.ranks("actor", 1, tiny_roles.make_actor)
        self.actor, self.supervisor = Actor(actors), self.ground.supervisor()
        self.pool = self.ground.pool(2, tiny_roles.make_rollout, SECONDS_PER_STEP, actors, self.supervisor)

    def reset(self, max_staleness: int = 0) -> ReplicaPool:
        """Return the pool with the settings of a new one; its two replicas serve the actor's weights."""
        pool = self.pool
        pool.options, pool.max_staleness = PoolOptions(4, sleeps=False, step_timeout_s=STEP_S), max_staleness
        # A test that failed is not to fail all that follow.
        until(lambda: len(pool.replicas.serving + pool.replicas.ready()) == 2, START_S, "both replicas are there")
        if pool.replicas.ready():
            list(pool.generate([Prompt("p", (1, 1), "?", "test")], 1, Sampling(max_tokens=2, seed=0)))
        pool.sync_weights(self.actor)
        assert len(pool.replicas.serving) == 2
        return pool

    def call(self, method: str, *arguments: Any, only: Worker | None = None) -> list[Any]:
        """Call a method of each replica that serves, or of one."""
        workers = list(self.pool.replicas.serving) if only is None else [only]
        return wait_all(workers, [worker.call(method, *arguments) for worker in workers], START_S, method)


def until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Wait for something that other processes do."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)
