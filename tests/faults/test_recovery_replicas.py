"""Rollout replicas that die or freeze: nothing is lost, nothing counted twice, and nothing old ever serves."""

from __future__ import annotations

import os
import signal
import time

import pytest
from recovery_ground import HEARTBEAT_S, Scene, until

from grpo_rl.cluster.recovery.supervisor import StuckReport
from grpo_rl.config.schema.tree import TrainerConfig
from grpo_rl.errors import ConfigError
from grpo_rl.processes.family import state
from grpo_rl.telemetry.status import Status
from grpo_rl.types import Prompt, Rollout, Sampling

# The goals are 10 s until all serve again, and 1 s or three heartbeats until a loss is noticed. A quiet machine keeps them, and a
# busy one, whose processes Ray has niced, need not: what was measured is printed.
SERVING_AGAIN_S = 120.0
NOTICED_S = 30.0
FROZEN_S = 3 * HEARTBEAT_S + 30.0


@pytest.fixture(autouse=True)
def whole_pool(scene: Scene) -> None:
    scene.reset()
    scene.ground.warnings.clear()


def expect(scene: Scene, rollouts: list[Rollout], num_prompts: int, n: int, seed: int) -> None:
    """Every rollout is the one that an undisturbed run samples with the current weights."""
    assert [(r.prompt.uid, r.sample_index) for r in rollouts] == [(f"p{i}", k) for i in range(num_prompts) for k in range(n)]
    scene.actor.expect(rollouts, seed)
    assert {rollout.versions for rollout in rollouts} == {((scene.actor.version, 30),)}


def generate(scene: Scene, num_prompts: int = 12, n: int = 2) -> None:
    """One phase of sampling, checked, with every rollout handed on exactly once."""
    seed = scene.actor.version + 7
    handed_on: list[tuple[str, int]] = []
    prompts = [Prompt(f"p{i}", (i, 1), "?", "test") for i in range(num_prompts)]
    sampling = Sampling(max_tokens=30, seed=seed)
    rollouts = scene.pool.generate(prompts, n, sampling, lambda r: handed_on.append((r.prompt.uid, r.sample_index)))
    expect(scene, rollouts, num_prompts, n, seed)
    assert sorted(handed_on) == sorted((r.prompt.uid, r.sample_index) for r in rollouts)


def wait_until_all_serve(scene: Scene) -> float:
    """Wait until the pool is whole again; return the seconds since the first failure was noticed, which are within the goal."""
    first, replicas = scene.ground.warnings[0][0], scene.pool.replicas
    until(lambda: bool(replicas.ready()) or len(replicas.serving) == 2, SERVING_AGAIN_S, "ready")
    generate(scene, 2, 1)
    seconds = time.monotonic() - first
    assert len(replicas.serving) == 2 and seconds < SERVING_AGAIN_S
    return seconds


LOOPS = pytest.param("rollout.step:loop@n=5", marks=pytest.mark.campaign)


@pytest.mark.parametrize("fault", ["rollout.submitted:kill9", "rollout.step:kill9@n=5", LOOPS])
def test_a_replica_lost_while_sampling_changes_no_token_and_is_replaced(scene, fault):
    scene.actor.train()
    scene.pool.sync_weights(scene.actor)
    victim = scene.pool.replicas.serving[0]
    scene.call("arm", fault, only=victim)
    began = time.monotonic()
    generate(scene)
    noticed, line = scene.ground.warnings[0]
    assert line.startswith(f"recovery: {victim.name} failed: ")
    dies = fault.split(":")[1].startswith("kill9")
    assert ("the process died" in line) == dies
    assert noticed - began < (NOTICED_S if dies else FROZEN_S)
    seconds = wait_until_all_serve(scene)
    until(lambda: state(victim.pid) == "has ended", NOTICED_S, "the lost process is gone")
    assert victim not in scene.pool.replicas.worker_group.workers
    print(f"MEASURED {fault}: noticed {noticed - began:.2f} s after sampling began, all serve {seconds:.2f} s after that")


@pytest.mark.campaign  # test_rollout_stream.py kills one in the midst of an update under requests
@pytest.mark.parametrize("fault", ["rollout.weights.bucket:kill9@n=3", "rollout.weights.before_finish:kill9"])
def test_a_replica_lost_while_weights_move_leaves_nobody_with_mixed_weights(scene, fault):
    victim = scene.pool.replicas.serving[1]
    scene.call("arm", fault, only=victim)
    scene.actor.train()
    scene.pool.sync_weights(scene.actor)
    # Whoever noticed first tells it, and may be the monitor's thread.
    until(lambda: bool(scene.ground.warnings), NOTICED_S, "the loss is told")
    assert scene.ground.warnings[0][1].startswith(f"recovery: {victim.name} failed: ")
    generate(scene)
    wait_until_all_serve(scene)
    generate(scene)


def test_a_replica_that_stops_while_idle_is_noticed_and_replaced_before_it_is_needed(scene):
    recoveries, victim = scene.supervisor.recoveries, scene.pool.replicas.serving[0]
    recoveries.metrics()
    os.kill(victim.pid, signal.SIGSTOP)
    until(lambda: bool(scene.ground.warnings), FROZEN_S, "the loss is noticed")
    until(lambda: bool(scene.pool.replicas.ready()), SERVING_AGAIN_S, "the replacement is ready")
    scene.actor.train()
    scene.pool.sync_weights(scene.actor)
    assert len(scene.pool.replicas.serving) == 2, "it got the weights together with the others"
    generate(scene)
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
    expect(scene, rollouts, 12, 2, 3)
    until(lambda: len(replicas.ready()) + len(replicas.serving) == 3, SERVING_AGAIN_S, "those that join are built")
    generate(scene)
    assert sorted(worker.name for worker in replicas.serving)[1:] == ["rollout2", "rollout3"]
    with pytest.raises(ConfigError, match="max_replicas=4"):
        replicas.resize(2)
    with pytest.raises(ConfigError, match="min_replicas=1"):
        replicas.resize(-3)
    replicas.resize(-1)
    generate(scene)
    assert len(replicas.serving) == 2 == replicas.wanted

    def told(what: str) -> int:
        return sum(line.startswith("engines: rollout") and what in line for _, line in scene.ground.warnings)

    until(lambda: told(" left after ") == 2, SERVING_AGAIN_S, "all have left")
    assert told(" joined after ") == 2
    counted = scene.supervisor.recoveries.metrics()
    assert (counted["recovery/engines_joined"], counted["recovery/engines_left"]) == (2.0, 2.0)


def test_a_stopped_replica_is_named_with_what_all_others_do_before_it_is_given_up(scene):
    said: list[str] = []
    status = Status(None)
    status.update(step=3, phase="gen")
    ground, supervisor = scene.ground, scene.supervisor
    report = StuckReport(TrainerConfig(), status, ground.worker_groups, said.append)
    victim, other = scene.pool.replicas.serving

    def report_and_go_on(why: str) -> None:
        report.report(why)
        scene.call("let_step", only=other)

    supervisor.before_kill = report_and_go_on
    try:
        scene.call("block_step", only=other)
        os.kill(victim.pid, signal.SIGSTOP)
        generate(scene)
        wait_until_all_serve(scene)
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
        scene.call("arm", "rollout.step:kill9@n=10", only=victim)
    generate(scene)
    wait_until_all_serve(scene)
