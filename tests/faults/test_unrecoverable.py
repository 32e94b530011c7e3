"""Losses that end a run. They end the replicas, too, that the tests of the files before this one share."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import pytest
from recovery_ground import START_S, Scene

from grpo_rl.cluster.processes.worker_group import WorkerDied, wait_all
from grpo_rl.errors import ClusterError
from grpo_rl.types import Prompt, Sampling


def test_an_actor_lost_while_weights_move_ends_the_transfer(scene: Scene) -> None:
    pool, [actor] = scene.reset(), scene.actor.worker_group.workers
    scene.actor.train()
    wait_all([actor], [actor.call("arm", "actor.weights.bucket:kill9@n=3")], START_S, "arm")
    with pytest.raises(WorkerDied, match=r"actor.next_bucket failed on actor0: the process died"):
        pool.sync_weights(scene.actor)


def test_a_replica_that_always_dies_ends_the_run_with_every_cause(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    recoveries, victim = scene.supervisor.recoveries, scene.pool.replicas.serving[0]
    recoveries._spent.clear()
    recoveries.failed(victim.name, "it died before", "")
    monkeypatch.setattr(recoveries, "trainer", replace(recoveries.trainer, max_restarts=1))
    os.kill(victim.pid, signal.SIGKILL)
    with pytest.raises(ClusterError) as caught:
        scene.pool.generate([Prompt("p", (1, 2), "?", "test")], 1, Sampling(max_tokens=2, seed=0))
    message = str(caught.value)
    assert f"{victim.name} failed and is not started again: restarts so far: 1 (trainer.max_restarts=1" in message
    assert message.count(f"s ago, {victim.name}: ") == 2
