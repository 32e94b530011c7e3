"""The reference of iterated training: bit for bit the policy of the iteration's beginning, whatever is lost meanwhile."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import ray
import torch
from ranks_ground import Scene, _policy, make_batch, reference_ranks
from recovery_ground import START_S, Ground

from grpo_rl.cluster.processes.placement import Pool
from grpo_rl.cluster.processes.worker_sets import wait_all
from grpo_rl.cluster.recovery.supervised_sets import SupervisedSet
from grpo_rl.cluster.roles.reference_role import MovingReferenceRole
from grpo_rl.errors import CheckpointError

pytestmark = pytest.mark.campaign


@dataclass
class Pair:
    """An actor and a reference of two ranks each."""

    actor: Scene
    reference: MovingReferenceRole
    ground: Ground

    def arm(self, fault: str, rank: int) -> None:
        worker = self.reference.worker_set.workers[rank]
        wait_all([worker], [worker.call("arm", fault)], START_S, "arm")

    def same(self) -> bool:
        """Whether every rank of the reference has the bits of the actor's rank in its place."""
        return all(map(_equal, weights(self.actor.worker_set, "weights"), weights(self.reference.worker_set, "snapshot")))

    def moved(self, num_updates: int) -> list[dict[str, torch.Tensor]]:
        """The reference's weights after it became an actor with so many updates."""
        self.actor.begin(num_updates)
        self.reference.become(self.actor.role)
        return weights(self.reference.worker_set, "snapshot")

    def logprobs(self) -> torch.Tensor:
        found = self.reference.logprobs(make_batch(9)).ref_logprobs_T
        assert found is not None
        return found


def weights(worker_set: SupervisedSet, method: str) -> list[dict[str, torch.Tensor]]:
    return [ray.get(part, timeout=60) for part in worker_set.parts(method)]


def _equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def pair(actor_ranks: Scene, slots: Pool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    policy = replace(_policy(tmp_path_factory), train=False)
    with reference_ranks(slots, tmp_path_factory, policy) as (ground, reference):
        yield Pair(actor_ranks, reference, ground)


def test_it_is_the_policy_bit_for_bit_until_the_policy_moves_on(pair: Pair) -> None:
    first = pair.moved(0)
    second = pair.moved(2)
    assert pair.same() and not any(map(_equal, first, second))
    assert torch.equal(pair.logprobs(), pair.actor.role.logprobs(make_batch(9)))
    pair.actor.role.update(make_batch(7))
    assert not pair.same() and all(map(_equal, second, weights(pair.reference.worker_set, "snapshot")))


@pytest.mark.parametrize(("fault", "rank"), [("reference.update:kill9", 0), ("reference.update:kill9", 1)])
def test_ranks_that_are_lost_while_they_take_over_the_weights_take_them_over_again(pair: Pair, fault: str, rank: int) -> None:
    pair.moved(0)
    pair.arm(fault, rank)
    pair.moved(1)
    assert pair.same()


def test_ranks_that_are_lost_later_come_back_as_what_they_had_become_and_not_as_the_models_folder(pair: Pair) -> None:
    expected = pair.moved(2)
    logprobs = pair.logprobs()
    pair.actor.role.update(make_batch(5))
    pair.arm("reference.logprobs:kill9", 1)
    assert torch.equal(pair.logprobs(), logprobs)
    assert all(map(_equal, expected, weights(pair.reference.worker_set, "snapshot")))
    assert pair.ground.lines.warnings[-1][1].startswith("recovery: reference is back after ")


def test_an_actor_that_is_lost_before_it_hands_over_its_weights_has_them_when_it_is_back(pair: Pair) -> None:
    pair.actor.begin(2)
    before = weights(pair.actor.worker_set, "weights")
    os.kill(pair.actor.worker_set.workers[0].pid, signal.SIGKILL)
    pair.reference.become(pair.actor.role)
    assert all(map(_equal, before, weights(pair.reference.worker_set, "snapshot")))


def test_a_checkpoint_has_the_reference_of_its_moment(pair: Pair, tmp_path: Path) -> None:
    expected = pair.moved(1)
    files = pair.reference.save(tmp_path)
    assert sorted(files) == ["reference/training.json", *(f"reference/weights_rank{rank}.safetensors" for rank in (0, 1))]
    later = tmp_path / "later"
    later.mkdir()
    pair.reference.begin_save(later, check=True)
    pair.moved(2)  # which waits until what is saved is copied
    while (written := pair.reference.saved(START_S)) is None:
        pass
    assert written == files, "the same bytes, in the background"
    pair.reference.load(later)
    assert all(map(_equal, expected, weights(pair.reference.worker_set, "snapshot")))
    pair.arm("reference.logprobs:kill9", 0)
    pair.logprobs()
    assert all(map(_equal, expected, weights(pair.reference.worker_set, "snapshot")))
    with pytest.raises(CheckpointError, match="has no reference"):
        pair.reference.load(tmp_path / "elsewhere")


def test_without_a_copy_in_memory_it_comes_from_the_checkpoint_and_what_it_became_since(
    pair: Pair, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, keeper = tmp_path_factory.mktemp("checkpoint"), pair.reference.worker_set.keeper
    assert keeper is not None
    keeper.in_memory = False
    try:
        pair.moved(0)
        pair.reference.save(folder)
        pair.reference.committed(folder)
        assert keeper.num_updates == 0
        expected = pair.moved(1)
        assert keeper.num_updates == 1
        pair.arm("reference.logprobs:kill9", 0)
        pair.logprobs()
        assert all(map(_equal, expected, weights(pair.reference.worker_set, "snapshot")))
    finally:
        keeper.in_memory = True
