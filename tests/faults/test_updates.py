"""Updates that go wrong on one rank alone: a number that is not finite, and memory that runs out."""

from __future__ import annotations

import pytest
from ranks_ground import BY_TWO, ONE_BY_ONE, Scene, make_batch

ROLES = ["actor", "critic"]


@pytest.fixture(params=ROLES)
def scene(request: pytest.FixtureRequest) -> Scene:
    return request.getfixturevalue(f"{request.param}_ranks")


def test_a_loss_that_is_not_finite_on_one_rank_is_left_out_by_both(scene):
    role = scene.worker_set.role
    [before] = scene.begin(1)
    state = scene.digest()
    scene.arm(f"{role}.update.loss:nan@micro_batch=1", 1)
    metrics = scene.role.update(make_batch(1))
    assert (before[f"{role}/nonfinite"], metrics[f"{role}/nonfinite"]) == (0.0, 1.0)
    # Weights, moments, learning rate and random state of both ranks.
    assert scene.digest() == state
    # One of two optimizer steps alone: the other one is taken, by both.
    scene.arm(f"{role}.update.loss:nan@micro_batch=1,n=1", 1)
    metrics = scene.role.update(make_batch(1))
    assert metrics[f"{role}/nonfinite"] == 0.5
    first, second = scene.worker_set.call("whole_weights")
    assert first == second
    assert scene.digest() != state
    assert scene.ground.lines.warnings == [], "no process was started again"


def test_memory_that_runs_out_on_one_rank_halves_the_micro_batches_and_the_gradient_stays(scene):
    role = scene.worker_set.role
    scene.begin(1)
    scene.cut.rule = BY_TWO
    try:
        by_two = scene.role.update(make_batch(1))
        scene.cut.rule = ONE_BY_ONE
        scene.begin(2)
        one_by_one = scene.digest()

        scene.begin(1)
        scene.cut.rule = BY_TWO
        # In the second optimizer step: the first one has moved the weights already.
        scene.arm(f"{role}.update.forward:oom@rollouts=2,n=2", 1)
        split = scene.role.update(make_batch(1))
        assert scene.cut.rule == ONE_BY_ONE
    finally:
        scene.cut.rule = ONE_BY_ONE
    assert scene.digest() == one_by_one, "as if they had been cut so from the first"
    for key in (f"{role}/grad_norm", f"{role}/lr"):
        assert split[key] == pytest.approx(by_two[key], rel=1e-6), key
    assert split[f"{role}/nonfinite"] == 0.0
    [failed, back] = [line for _, line in scene.ground.lines.warnings]
    assert failed.startswith(
        f"recovery: {role} failed: {role}.update failed on {role}1: OutOfMemoryError: out of memory (injected)"
    )
    assert "asked for 2.50 GiB, " in failed and "of the machine's memory are free; turn down " in failed
    assert "ppo_micro_batch_size_per_gpu" in failed and "or set trainer.on_out_of_memory=split" in failed
    assert back.endswith(f"{role}.update with micro-batches of 1 rollouts per rank is made again")
