"""Spare processes: there is none before the first failure, and then one takes over, unless it is lost itself."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest
import tiny_roles
from recovery_ground import START_S, Ground, is_alive, until

from grpo_rl.cluster import watch
from grpo_rl.cluster.host import PRELOADED
from grpo_rl.cluster.placement import Pool
from grpo_rl.cluster.spares import NAME
from grpo_rl.cluster.supervised import SupervisedGroup


@pytest.fixture(scope="module")
def ground(slots: Pool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    made = Ground(slots, tmp_path_factory.mktemp("logs"))
    yield made
    made.close()


@pytest.fixture
def actors(ground: Ground) -> Iterator[SupervisedGroup]:
    group = ground.ranks("actor", 1, tiny_roles.make_actor, ground.supervisor(recover="memory"), stateful=True)
    yield group
    assert group.supervisor is not None
    group.supervisor.close()
    group.shutdown()
    until(lambda: not spares(group), START_S, "no spare outlives the run")


def spares(group: SupervisedGroup) -> set[int]:
    """Processes that print to the log of the group's spares: one that took a place prints to another."""
    log = group.workers[0].log_file.with_name(f"{NAME}.log")
    return {pid for pid in watch.processes(os.environ[watch.TOKEN]) if _prints_to(pid) == str(log)}


def _prints_to(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/fd/1")
    except OSError:
        return None


def kill(pid: int | None) -> None:
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    until(lambda: not is_alive(pid), START_S, "its end")


def one_spare(group: SupervisedGroup) -> int:
    until(lambda: len(spares(group)) == 1, START_S, "one spare")
    return spares(group).pop()


def test_a_spare_takes_the_place_of_the_next_one_that_is_lost(actors):
    assert actors.call("update", 3) == [9]
    assert spares(actors) == set()

    kill(actors.workers[0].pid)
    assert actors.call("update", 3) == [27]
    spare = one_spare(actors)
    log = actors.workers[0].log_file.with_name(f"{NAME}.log")
    until(lambda: PRELOADED in log.read_text(), START_S, "the spare has imported everything")

    kill(actors.workers[0].pid)
    began = time.monotonic()
    assert actors.call("update", 3) == [54]
    print(f"\nan actor's rank is back after {time.monotonic() - began:.2f} s with a spare")
    assert actors.workers[0].pid == spare
    assert actors.workers[0].name == "actor0"
    assert one_spare(actors) != spare


def test_a_spare_that_is_lost_itself_is_not_needed(actors):
    kill(actors.workers[0].pid)
    assert actors.call("update", 3) == [9]
    lost = one_spare(actors)
    kill(lost)

    kill(actors.workers[0].pid)
    assert actors.call("update", 3) == [27]
    assert actors.workers[0].pid != lost
