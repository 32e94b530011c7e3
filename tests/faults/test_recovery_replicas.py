"""Rollout replicas that die or freeze: nothing is lost, nothing counted twice, and nothing old ever serves."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import tiny_roles
from recovery_ground import HEARTBEAT_S, START_S, Actor, Ground, until

from grpo_rl.cluster.processes.placement import Pool
from grpo_rl.cluster.processes.worker_group import Worker, WorkerDied, wait_all
from grpo_rl.cluster.recovery.supervisor import StuckReport
from grpo_rl.cluster.roles.rollout_pool import ReplicaPool
from grpo_rl.config.schema.tree import TrainerConfig
from grpo_rl.errors import ClusterError, ConfigError
from grpo_rl.processes.family import state
from grpo_rl.telemetry.status import Status
from grpo_rl.types import Prompt, Rollout, Sampling

SECONDS_PER_STEP = 0.005
# The goals are 10 s until all serve again, and 1 s or three heartbeats until a loss is noticed. A quiet machine keeps them, and a
# busy one, whose processes Ray has niced, need not: what was measured is printed.
SERVING_AGAIN_S = 120.0
NOTICED_S = 30.0
FROZEN_S = 3 * HEARTBEAT_S + 30.0


@dataclass
class Scene:
    ground: Ground
    actor: Actor
    pool: ReplicaPool

    def expect(self, rollouts: list[Rollout], num_prompts: int, n: int, seed: int) -> None:
        """Every rollout is the one that an undisturbed run samples with the current weights."""
        assert [(r.prompt.uid, r.sample_index) for r in rollouts] == [
            (f"p{i}", k) for i in range(num_prompts) for k in range(n)
        ]
        self.actor.expect(rollouts, seed)
        assert {rollout.versions for rollout in rollouts} == {((self.actor.version, 30),)}

    def generate(self, num_prompts: int = 12, n: int = 2) -> None:
        """One phase of sampling, checked, with every rollout handed on exactly once."""
        seed = self.actor.version + 7
        handed_on: list[tuple[str, int]] = []
        prompts = [Prompt(f"p{i}", (i, 1), "?", "test") for i in range(num_prompts)]
        sampling = Sampling(max_tokens=30, seed=seed)
        rollouts = self.pool.generate(prompts, n, sampling, lambda r: handed_on.append((r.prompt.uid, r.sample_index)))
        self.expect(rollouts, num_prompts, n, seed)
        assert sorted(handed_on) == sorted((r.prompt.uid, r.sample_index) for r in rollouts)

    def arm(self, worker: Worker, fault: str) -> None:
        wait_all([worker], [worker.call("arm", fault)], START_S, "arm")

    def wait_until_all_serve(self) -> float:
        """Wait until the pool is whole again; return the seconds since the first failure was noticed, which are within the goal."""
        first = self.ground.warnings[0][0]
        until(lambda: bool(self.pool.replicas.ready()) or len(self.pool.replicas.serving) == 2, SERVING_AGAIN_S, "ready")
        self.generate(2, 1)
        seconds = time.monotonic() - first
        assert len(self.pool.replicas.serving) == 2 and seconds < SERVING_AGAIN_S
        return seconds


@pytest.fixture(scope="module")
def scene(slots: Pool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    ground = Ground(slots, tmp_path_factory.mktemp("logs"))
    try:
        actors = ground.ranks("actor", 1, tiny_roles.make_actor)
        pool = ground.pool(2, tiny_roles.make_rollout, SECONDS_PER_STEP, actors, ground.supervisor())
        yield Scene(ground, Actor(actors), pool)
    finally:
        ground.close()


@pytest.fixture(autouse=True)
def quiet(scene: Scene) -> None:
    if len(scene.pool.replicas.serving) < 2:
        # A test that failed is not to fail all that follow.
        until(lambda: bool(scene.pool.replicas.ready()), START_S, "the replacement is ready")
        scene.generate(2, 1)
    scene.ground.warnings.clear()
    assert len(scene.pool.replicas.serving) == 2, "the test before left the pool whole"


LOOPS = pytest.param("rollout.step:loop@n=5", marks=pytest.mark.campaign)


@pytest.mark.parametrize("fault", ["rollout.submitted:kill9", "rollout.step:kill9@n=5", LOOPS])
def test_a_replica_lost_while_sampling_changes_no_token_and_is_replaced(scene, fault):
    scene.actor.train()
    scene.pool.sync_weights(scene.actor)
    victim = scene.pool.replicas.serving[0]
    scene.arm(victim, fault)
    began = time.monotonic()
    scene.generate()
    noticed, line = scene.ground.warnings[0]
    assert line.startswith(f"recovery: {victim.name} failed: ")
    dies = fault.split(":")[1].startswith("kill9")
    assert ("the process died" in line) == dies
    assert noticed - began < (NOTICED_S if dies else FROZEN_S)
    seconds = scene.wait_until_all_serve()
    until(lambda: state(victim.pid) == "has ended", NOTICED_S, "the lost process is gone")
    assert victim not in scene.pool.replicas.worker_group.workers
    print(f"MEASURED {fault}: noticed {noticed - began:.2f} s after sampling began, all serve {seconds:.2f} s after that")


AT_THE_END = pytest.param("rollout.weights.before_finish:kill9", marks=pytest.mark.campaign)


@pytest.mark.parametrize("fault", ["rollout.weights.bucket:kill9@n=3", AT_THE_END])
def test_a_replica_lost_while_weights_move_leaves_nobody_with_mixed_weights(scene, fault):
    victim = scene.pool.replicas.serving[1]
    scene.arm(victim, fault)
    scene.actor.train()
    scene.pool.sync_weights(scene.actor)
    # Whoever noticed first tells it, and may be the monitor's thread.
    until(lambda: bool(scene.ground.warnings), NOTICED_S, "the loss is told")
    assert scene.ground.warnings[0][1].startswith(f"recovery: {victim.name} failed: ")
    scene.generate()
    scene.wait_until_all_serve()
    scene.generate()


def test_a_replica_that_stops_while_idle_is_noticed_and_replaced_before_it_is_needed(scene):
    recoveries, victim = scene.ground.supervisors[0].recoveries, scene.pool.replicas.serving[0]
    recoveries.metrics()
    os.kill(victim.pid, signal.SIGSTOP)
    until(lambda: bool(scene.ground.warnings), FROZEN_S, "the loss is noticed")
    until(lambda: bool(scene.pool.replicas.ready()), SERVING_AGAIN_S, "the replacement is ready")
    scene.actor.train()
    scene.pool.sync_weights(scene.actor)
    assert len(scene.pool.replicas.serving) == 2, "it got the weights together with the others"
    scene.generate()
    counted = recoveries.metrics()
    assert counted["recovery/rollout_restarts"] == 1.0 and 0 < counted["recovery/seconds"] < SERVING_AGAIN_S
    assert recoveries.metrics() == {}, "each is counted once"


def test_replicas_that_join_and_leave_while_sampling_change_no_token(scene):
    replicas = scene.pool.replicas
    scene.actor.train()
    scene.pool.sync_weights(scene.actor)
    handed_on: list[str] = []

    def change(rollout: Rollout) -> None:
        handed_on.append(rollout.prompt.uid)
        if len(handed_on) == 3:
            assert replicas.resize(-1) == "1 will leave: 1 engine then"
        if len(handed_on) == 6:
            assert replicas.resize(2) == "rollout2, rollout3 will join: 3 engines then"

    prompts = [Prompt(f"p{i}", (i, 1), "?", "test") for i in range(12)]
    rollouts = scene.pool.generate(prompts, 2, Sampling(max_tokens=30, seed=3), change)
    scene.expect(rollouts, 12, 2, 3)
    until(lambda: len(replicas.ready()) + len(replicas.serving) == 3, SERVING_AGAIN_S, "those that join are built")
    scene.generate()
    assert sorted(worker.name for worker in replicas.serving)[1:] == ["rollout2", "rollout3"]
    with pytest.raises(ConfigError, match="max_replicas=4"):
        replicas.resize(2)
    with pytest.raises(ConfigError, match="min_replicas=1"):
        replicas.resize(-3)
    replicas.resize(-1)
    scene.generate()
    assert len(replicas.serving) == 2 == replicas.wanted

    def told(what: str) -> int:
        return sum(line.startswith("engines: rollout") and what in line for _, line in scene.ground.warnings)

    until(lambda: told(" left after ") == 2, SERVING_AGAIN_S, "all have left")
    assert told(" joined after ") == 2
    counted = scene.ground.supervisors[0].recoveries.metrics()
    assert (counted["recovery/engines_joined"], counted["recovery/engines_left"]) == (2.0, 2.0)


def test_a_stopped_replica_is_named_with_what_all_others_do_before_it_is_given_up(scene):
    said: list[str] = []
    status = Status(None)
    status.update(step=3, phase="gen")
    ground, supervisor = scene.ground, scene.ground.supervisors[0]
    report = StuckReport(TrainerConfig(), status, ground.worker_groups, said.append)
    victim, other = scene.pool.replicas.serving

    def report_and_go_on(why: str) -> None:
        report.report(why)
        wait_all([other], [other.call("let_step")], START_S, "let_step")

    supervisor.before_kill = report_and_go_on
    try:
        wait_all([other], [other.call("block_step")], START_S, "block_step")
        os.kill(victim.pid, signal.SIGSTOP)
        scene.generate()
        scene.wait_until_all_serve()
    finally:
        supervisor.before_kill = lambda why: None
        report.close()
    assert len(said) == 1
    assert said[0].startswith(f"stuck? {victim.name} is given up: the process froze: no heartbeat for ")
    assert f"{victim.name} (pid {victim.pid}): no answer within 2 s, stopped by a signal; asked for " in said[0]
    assert "controller (pid " in said[0] and "rollout_pool.py" in said[0], said[0]
    assert "an engine step for " in said[0] and "workers/rollout.py" in said[0], said[0]


@pytest.mark.campaign
def test_all_replicas_lost_at_once_are_replaced(scene):
    scene.actor.train()
    scene.pool.sync_weights(scene.actor)
    for victim in scene.pool.replicas.serving:
        scene.arm(victim, "rollout.step:kill9@n=10")
    scene.generate()
    scene.wait_until_all_serve()


def test_an_actor_lost_while_weights_move_ends_the_transfer(scene):
    lost = scene.ground.ranks("actor", 1, tiny_roles.make_actor)
    actor = Actor(lost)
    actor.train()
    scene.arm(lost.workers[0], "actor.weights.bucket:kill9@n=3")
    pool = scene.ground.pool(1, tiny_roles.make_rollout, SECONDS_PER_STEP, lost, scene.ground.supervisor())
    with pytest.raises(WorkerDied, match=r"actor.next_bucket failed on actor0: the process died"):
        pool.sync_weights(actor)
    lost.shutdown()
    pool.replicas.worker_group.shutdown()


def test_a_replica_that_always_dies_ends_the_run_with_every_cause(scene: Any):
    ground = scene.ground
    supervisor = ground.supervisor(max_restarts=1)
    pool = ground.pool(1, tiny_roles.make_rollout, SECONDS_PER_STEP, scene.actor.worker_group, supervisor)
    prompts, sampling = [Prompt("p", (1, 2), "?", "test")], Sampling(max_tokens=2, seed=0)

    def kill_the_only_one() -> None:
        pid = pool.replicas.worker_group.workers[0].pid
        os.kill(pid, signal.SIGKILL)
        until(lambda: state(pid) == "has ended", NOTICED_S, "it is dead")

    kill_the_only_one()
    assert len(pool.generate(prompts, 1, sampling)) == 1, "by its replacement"
    kill_the_only_one()
    with pytest.raises(ClusterError) as caught:
        pool.generate(prompts, 1, sampling)
    message = str(caught.value)
    assert "rollout0 failed and is not started again: restarts so far: 1 (trainer.max_restarts=1" in message
    assert message.count("s ago, rollout0: ") == 2
