"""Rollouts as a stream: asked for at any time, handed over as they end, alive through weight updates and deaths."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import tiny_roles
from recovery_ground import START_S, Actor, Ground, until

from grpo_rl.cluster.processes.placement import Pool
from grpo_rl.cluster.processes.worker_group import wait_all
from grpo_rl.cluster.roles.rollout_pool import ReplicaPool
from grpo_rl.errors import ClusterError, WeightVersionError
from grpo_rl.types import GREEDY, Prompt, Rollout, Sampling

SECONDS_PER_STEP = 0.005
SEED = 5
LONG, SHORT = Sampling(max_tokens=40, seed=SEED), Sampling(max_tokens=3, seed=SEED)
MIDST = 5
"""The tokens with which long responses wait for something that is to happen in their midst; short ones end before."""


class Scene:
    """An actor and pools of two replicas that take its weights."""

    def __init__(self, slots: Pool, logs: Any) -> None:
        self.ground = Ground(slots, logs)
        actors = self.ground.ranks("actor", 1, tiny_roles.make_actor)
        self.actor, self.supervisor = Actor(actors), self.ground.supervisor()
        self._pools: dict[Any, ReplicaPool] = {}

    def pool(self, factory: Callable[..., Any] = tiny_roles.make_rollout, max_staleness: int = 1) -> ReplicaPool:
        """A pool that holds the actor's weights; there is one per factory."""
        if factory not in self._pools:
            for other in self._pools.values():  # the slots are for one pool
                other.replicas.worker_group.shutdown()
            self._pools = {factory: self.ground.pool(2, factory, SECONDS_PER_STEP, self.actor.worker_group, self.supervisor)}
        pool = self._pools[factory]
        pool.options = type(pool.options)(4, False, START_S)
        pool.max_staleness = max_staleness
        pool.sync_weights(self.actor)
        return pool

    def expect(self, rollouts: list[Rollout]) -> None:
        self.actor.expect(rollouts, SEED)


def prompts(tag: str, count: int) -> list[Prompt]:
    return [Prompt(f"{tag}{i}", (i, 1), "?", "test") for i in range(count)]


def uids(rollouts: list[Rollout]) -> list[str]:
    return sorted(rollout.prompt.uid for rollout in rollouts)


@pytest.fixture(scope="module")
def scene(slots: Pool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    made = Scene(slots, tmp_path_factory.mktemp("logs"))
    yield made
    made.ground.close()


@contextmanager
def held(pool: ReplicaPool, most_tokens: float = MIDST) -> Iterator[None]:
    """Let no request have more tokens inside of this context, as long as nothing calls `release`."""
    call(pool, "hold", most_tokens)
    try:
        yield
    finally:
        release(pool)


def release(pool: ReplicaPool) -> None:
    call(pool, "hold", math.inf)


def call(pool: ReplicaPool, method: str, *arguments: Any) -> list[Any]:
    workers = list(pool.replicas.serving)
    return wait_all(workers, [worker.call(method, *arguments) for worker in workers], START_S, method)


def submit_and_hold(pool: ReplicaPool, new_prompts: list[Prompt]) -> Collection[str]:
    """Ask for long responses, and wait until all that the replicas were given are in their midst."""
    ids = pool.submit(new_prompts, 1, LONG)
    assert list(pool.completed(wait_s=0.05)) == []
    busy = min(len(new_prompts), len(pool.replicas.serving))
    until(lambda: sum(call(pool, "are_held")) == busy, START_S, "responses are in their midst")
    return ids


def test_rollouts_are_handed_over_as_they_end_and_more_may_be_asked_for_meanwhile(scene: Scene) -> None:
    pool = scene.pool()
    rollouts: list[Rollout] = []
    with held(pool):
        pool.submit(prompts("long", 2), 1, LONG)
        pool.submit(prompts("short", 2), 1, SHORT)
        for rollout in pool.completed():
            rollouts.append(rollout)
            if len(rollouts) == 1:
                pool.submit(prompts("more", 20), 2, SHORT)
            if len(rollouts) == 2 + 40:
                release(pool)
    order = [rollout.prompt.uid for rollout in rollouts]
    assert sorted(order) == sorted(["long0", "long1", "short0", "short1", *[f"more{i}" for i in range(20) for _ in (0, 1)]])
    assert order[0] in ("short0", "short1") and set(order[-2:]) == {"long0", "long1"}
    scene.expect(rollouts)
    assert list(pool.completed()) == [], "each rollout is handed over once"


def test_waiting_has_an_end_that_is_told_and_an_iteration_that_is_given_up_loses_nothing(scene: Scene) -> None:
    pool = scene.pool()
    with held(pool):
        pool.submit(prompts("long", 6), 1, LONG)
        assert list(pool.completed(wait_s=0.2)) == []
    first = next(pool.completed())
    rest = list(pool.completed())
    assert uids([first, *rest]) == [f"long{i}" for i in range(6)]
    pool.options = replace(pool.options, step_timeout_s=1.0)
    with held(pool):
        ids = pool.submit(prompts("late", 2), 1, LONG)
        message = r"no response ended for 1 s on rollout0 \(1 in flight\), rollout1 \(1 in flight\)"
        with pytest.raises(ClusterError, match=message):
            list(pool.completed())
        pool.forget(ids)


def test_generate_gives_its_own_rollouts_while_others_are_under_way(scene: Scene) -> None:
    pool = scene.pool()
    pool.submit(prompts("long", 2), 1, LONG)
    seen: list[Rollout] = []
    own = pool.generate(prompts("own", 3), 2, SHORT, seen.append, greedy=True)
    assert [(r.prompt.uid, r.sample_index) for r in own] == [(f"own{i}", n) for i in range(3) for n in (0, 1, GREEDY)]
    assert sorted(map(id, seen)) == sorted(map(id, own))
    assert uids(list(pool.completed())) == ["long0", "long1"]


def test_a_rollout_is_asked_for_once_and_may_be_forgotten(scene: Scene) -> None:
    pool = scene.pool()
    ids = pool.submit(prompts("p", 3), 1, LONG)
    with pytest.raises(ValueError, match="rollouts are being sampled already: p1/0"):
        pool.submit([*prompts("other", 1), prompts("p", 2)[1]], 1, LONG)
    pool.forget(ids[:2])
    assert uids(list(pool.completed())) == ["p2"], "and the refused call asked for nothing"
    assert uids(list(pool.generate(prompts("p", 3), 1, SHORT))) == ["p0", "p1", "p2"]


def test_requests_live_through_an_update_and_carry_the_version_of_each_token(scene: Scene) -> None:
    pool, before = scene.pool(), scene.actor.version
    with held(pool):
        submit_and_hold(pool, prompts("long", 14))
        scene.actor.train()
        pool.sync_weights(scene.actor)
    rollouts = list(pool.completed())
    assert uids(rollouts) == sorted(f"long{i}" for i in range(14))
    scene.expect(rollouts)
    spans = [[version for version, _ in rollout.versions] for rollout in rollouts]
    # Each of the two replicas is given five at once.
    assert spans.count([before, before + 1]) == 10 and spans.count([before + 1]) == 4
    assert {rollout.oldest_version for rollout in rollouts} == {before, before + 1}


def test_a_token_older_than_the_bound_is_an_error(scene: Scene) -> None:
    pool, before = scene.pool(max_staleness=0), scene.actor.version
    with held(pool):
        ids = submit_and_hold(pool, prompts("long", 1))
        scene.actor.train()
        pool.sync_weights(scene.actor)
    with pytest.raises(WeightVersionError, match=f"long0/0 was sampled with weights of version {before}, the actor's are"):
        list(pool.completed())
    pool.forget(ids)
    pool = scene.pool(max_staleness=1)
    with held(pool):
        submit_and_hold(pool, prompts("two", 1))
        for _ in range(2):
            scene.actor.train()
            pool.sync_weights(scene.actor)
    with pytest.raises(WeightVersionError, match="and at most 1 versions older are allowed"):
        list(pool.completed())


def test_a_replica_that_dies_while_requests_live_through_an_update_loses_none(scene: Scene) -> None:
    pool, before = scene.pool(), scene.actor.version
    victim = pool.replicas.serving[0]
    with held(pool):
        submit_and_hold(pool, prompts("long", 10))
        wait_all([victim], [victim.call("arm", "rollout.weights.bucket:kill9@n=2")], START_S, "arm")
        scene.actor.train()
        pool.sync_weights(scene.actor)
    rollouts = list(pool.completed())
    assert uids(rollouts) == [f"long{i}" for i in range(10)]
    scene.expect(rollouts)
    # What the lost replica had is sampled from its beginning, with the new weights; the other's went on.
    assert sorted([version for version, _ in rollout.versions] for rollout in rollouts) == (
        [[before, before + 1]] * 5 + [[before + 1]] * 5
    )
    until(lambda: bool(pool.replicas.ready()) or len(pool.replicas.serving) == 2, START_S, "the replacement is ready")
    scene.expect(pool.generate(prompts("again", 8), 1, SHORT))
    assert len(pool.replicas.serving) == 2


def test_a_replica_that_comes_back_while_the_actor_trains_gets_its_weights_afterwards(scene: Scene) -> None:
    pool, actor = scene.pool(), scene.actor
    victim = pool.replicas.serving[0]
    with held(pool):
        submit_and_hold(pool, prompts("long", 6))
    with pool.keep_weights():
        victim.kill("for a test")
        until(lambda: bool(pool.replicas.ready()), START_S, "the replacement is ready")
        # The ranks have weights by now that no version names yet, as in the middle of an update.
        actor.worker_group.call("update", actor.AMOUNT)
        rollouts = list(pool.completed())
        assert uids(rollouts) == [f"long{i}" for i in range(6)] and len(pool.replicas.serving) == 1
        scene.expect(rollouts)
    actor.count_update()
    pool.sync_weights(actor)
    assert len(pool.replicas.serving) == 2
    scene.expect(pool.generate(prompts("again", 8), 1, SHORT))


# Last, for the second pool takes the place of the others'.
@pytest.mark.parametrize("takes_weights", [True, False], ids=["partial_rollout=false", "an engine that takes none in flight"])
def test_requests_end_with_the_weights_they_began_with_if_that_is_asked_for_or_the_engine_needs_it(
    scene: Scene, takes_weights: bool
) -> None:
    pool = scene.pool(tiny_roles.make_rollout if takes_weights else tiny_roles.make_draining_rollout)
    pool.options, before = replace(pool.options, partial_rollout=not takes_weights), scene.actor.version
    with held(pool):
        submit_and_hold(pool, prompts("long", 14))
    scene.actor.train()
    pool.sync_weights(scene.actor)
    rollouts = list(pool.completed())
    assert len(rollouts) == len(set(uids(rollouts))) == 14
    scene.expect(rollouts)
    spans = [rollout.versions for rollout in rollouts]
    assert spans.count(((before, LONG.max_tokens),)) == 10 and spans.count(((before + 1, LONG.max_tokens),)) == 4
