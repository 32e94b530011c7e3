"""Rollouts as a stream: asked for at any time, handed over as they end, alive through weight updates and deaths."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from recovery_ground import START_S, Scene, until

from grpo_rl.errors import ClusterError, WeightVersionError
from grpo_rl.types import GREEDY, Prompt, Rollout, Sampling

SEED = 5
LONG, SHORT = Sampling(max_tokens=40, seed=SEED), Sampling(max_tokens=3, seed=SEED)
MIDST = 5
"""The tokens with which long responses wait for something that is to happen in their midst; short ones end before."""


def prompts(tag: str, count: int) -> list[Prompt]:
    return [Prompt(f"{tag}{i}", (i, 1), "?", "test") for i in range(count)]


def expect(scene: Scene, rollouts: list[Rollout]) -> None:
    scene.actor.expect(rollouts, SEED)


def uids(rollouts: list[Rollout]) -> list[str]:
    return sorted(rollout.prompt.uid for rollout in rollouts)


@contextmanager
def held(scene: Scene, most_tokens: float = MIDST) -> Iterator[None]:
    """Let no request have more tokens inside of this context."""
    scene.call("hold", most_tokens)
    try:
        yield
    finally:
        scene.call("hold", math.inf)


def submit_and_hold(scene: Scene, new_prompts: list[Prompt]) -> Collection[str]:
    """Ask for long responses, and wait until all that the replicas were given are in their midst."""
    pool = scene.pool
    ids = pool.submit(new_prompts, 1, LONG)
    assert list(pool.completed(wait_s=0.05)) == []
    busy = min(len(new_prompts), len(pool.replicas.serving))
    until(lambda: sum(scene.call("are_held")) == busy, START_S, "responses are in their midst")
    return ids


def test_rollouts_are_handed_over_as_they_end_and_more_may_be_asked_for_meanwhile(scene: Scene) -> None:
    pool = scene.reset(max_staleness=1)
    rollouts: list[Rollout] = []
    with held(scene):
        pool.submit(prompts("long", 2), 1, LONG)
        pool.submit(prompts("short", 2), 1, SHORT)
        for rollout in pool.completed():
            rollouts.append(rollout)
            if len(rollouts) == 1:
                pool.submit(prompts("more", 20), 2, SHORT)
            if len(rollouts) == 2 + 40:
                scene.call("hold", math.inf)
    order = [rollout.prompt.uid for rollout in rollouts]
    assert sorted(order) == sorted(["long0", "long1", "short0", "short1", *[f"more{i}" for i in range(20) for _ in (0, 1)]])
    assert order[0] in ("short0", "short1") and set(order[-2:]) == {"long0", "long1"}
    expect(scene, rollouts)
    assert list(pool.completed()) == [], "each rollout is handed over once"


def test_waiting_has_an_end_that_is_told_and_an_iteration_that_is_given_up_loses_nothing(scene: Scene) -> None:
    pool = scene.reset(max_staleness=1)
    with held(scene):
        pool.submit(prompts("long", 6), 1, LONG)
        assert list(pool.completed(wait_s=0.2)) == []
    first = next(pool.completed())
    rest = list(pool.completed())
    assert uids([first, *rest]) == [f"long{i}" for i in range(6)]
    pool.options = replace(pool.options, step_timeout_s=1.0)
    with held(scene):
        ids = pool.submit(prompts("late", 2), 1, LONG)
        message = r"no response ended for 1 s on rollout\d \(1 in flight\), rollout\d \(1 in flight\)"
        with pytest.raises(ClusterError, match=message):
            list(pool.completed())
        pool.forget(ids)


def test_generate_gives_its_own_rollouts_while_others_are_under_way(scene: Scene) -> None:
    pool = scene.reset(max_staleness=1)
    pool.submit(prompts("long", 2), 1, LONG)
    seen: list[Rollout] = []
    own = pool.generate(prompts("own", 3), 2, SHORT, seen.append, greedy=True)
    assert [(r.prompt.uid, r.sample_index) for r in own] == [(f"own{i}", n) for i in range(3) for n in (0, 1, GREEDY)]
    assert sorted(map(id, seen)) == sorted(map(id, own))
    assert uids(list(pool.completed())) == ["long0", "long1"]


def test_a_rollout_is_asked_for_once_and_may_be_forgotten(scene: Scene) -> None:
    pool = scene.reset(max_staleness=1)
    ids = pool.submit(prompts("p", 3), 1, LONG)
    with pytest.raises(ValueError, match="rollouts are being sampled already: p1/0"):
        pool.submit([*prompts("other", 1), prompts("p", 2)[1]], 1, LONG)
    pool.forget(ids[:2])
    assert uids(list(pool.completed())) == ["p2"], "and the refused call asked for nothing"
    assert uids(list(pool.generate(prompts("p", 3), 1, SHORT))) == ["p0", "p1", "p2"]


def test_requests_live_through_an_update_and_carry_the_version_of_each_token(scene: Scene) -> None:
    pool, before = scene.reset(max_staleness=1), scene.actor.version
    with held(scene):
        submit_and_hold(scene, prompts("long", 14))
        scene.actor.train()
        pool.sync_weights(scene.actor)
    rollouts = list(pool.completed())
    assert uids(rollouts) == sorted(f"long{i}" for i in range(14))
    expect(scene, rollouts)
    spans = [[version for version, _ in rollout.versions] for rollout in rollouts]
    # Each of the two replicas is given five at once.
    assert spans.count([before, before + 1]) == 10 and spans.count([before + 1]) == 4
    assert {rollout.oldest_version for rollout in rollouts} == {before, before + 1}


def test_a_token_older_than_the_bound_is_an_error(scene: Scene) -> None:
    pool, before = scene.reset(), scene.actor.version
    with held(scene):
        ids = submit_and_hold(scene, prompts("long", 1))
        scene.actor.train()
        pool.sync_weights(scene.actor)
    with pytest.raises(WeightVersionError, match=f"long0/0 was sampled with weights of version {before}, the actor's are"):
        list(pool.completed())
    pool.forget(ids)
    pool = scene.reset(max_staleness=1)
    with held(scene):
        submit_and_hold(scene, prompts("two", 1))
        for _ in range(2):
            scene.actor.train()
            pool.sync_weights(scene.actor)
    with pytest.raises(WeightVersionError, match="and at most 1 versions older are allowed"):
        list(pool.completed())


def test_a_replica_that_dies_while_requests_live_through_an_update_loses_none(scene: Scene) -> None:
    pool, before = scene.reset(max_staleness=1), scene.actor.version
    victim = pool.replicas.serving[0]
    with held(scene):
        submit_and_hold(scene, prompts("long", 10))
        scene.call("arm", "rollout.weights.bucket:kill9@n=2", only=victim)
        scene.actor.train()
        pool.sync_weights(scene.actor)
    rollouts = list(pool.completed())
    assert uids(rollouts) == [f"long{i}" for i in range(10)]
    expect(scene, rollouts)
    # What the lost replica had is sampled from its beginning, with the new weights; the other's went on.
    assert sorted([version for version, _ in rollout.versions] for rollout in rollouts) == (
        [[before, before + 1]] * 5 + [[before + 1]] * 5
    )
    until(lambda: bool(pool.replicas.ready()) or len(pool.replicas.serving) == 2, START_S, "the replacement is ready")
    expect(scene, pool.generate(prompts("again", 8), 1, SHORT))
    assert len(pool.replicas.serving) == 2


def test_a_replica_that_comes_back_while_the_actor_trains_gets_its_weights_afterwards(scene: Scene) -> None:
    pool, actor = scene.reset(max_staleness=1), scene.actor
    victim = pool.replicas.serving[0]
    with held(scene):
        submit_and_hold(scene, prompts("long", 6))
    with pool.keep_weights():
        victim.kill("for a test")
        until(lambda: bool(pool.replicas.ready()), START_S, "the replacement is ready")
        # The ranks have weights by now that no version names yet, as in the middle of an update.
        actor.worker_group.call("update", actor.AMOUNT)
        rollouts = list(pool.completed())
        assert uids(rollouts) == [f"long{i}" for i in range(6)] and len(pool.replicas.serving) == 1
        expect(scene, rollouts)
    actor.count_update()
    pool.sync_weights(actor)
    assert len(pool.replicas.serving) == 2
    expect(scene, pool.generate(prompts("again", 8), 1, SHORT))


@pytest.mark.parametrize("takes_weights", [True, False], ids=["partial_rollout=false", "an engine that takes none in flight"])
def test_requests_end_with_the_weights_they_began_with_if_that_is_asked_for_or_the_engine_needs_it(
    scene: Scene, takes_weights: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, before = scene.reset(max_staleness=1), scene.actor.version
    pool.options = replace(pool.options, partial_rollout=not takes_weights)
    scene.call("take_weights_in_flight", takes_weights)
    monkeypatch.setattr(pool, "_updates_in_flight", None)
    with held(scene):
        submit_and_hold(scene, prompts("long", 14))
    scene.actor.train()
    pool.sync_weights(scene.actor)
    rollouts = list(pool.completed())
    assert len(rollouts) == len(set(uids(rollouts))) == 14
    expect(scene, rollouts)
    spans = [rollout.versions for rollout in rollouts]
    assert spans.count(((before, LONG.max_tokens),)) == 10 and spans.count(((before + 1, LONG.max_tokens),)) == 4
    scene.call("take_weights_in_flight", True)
