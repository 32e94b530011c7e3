"""A value that several calls carry is fetched by a process once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grpo_rl.cluster.processes import worker_host
from grpo_rl.cluster.processes.worker_host import RemoteError, Stored, WorkerHost
from grpo_rl.cluster.recovery import supervised_sets
from grpo_rl.cluster.recovery.supervised_sets import Keeper
from grpo_rl.cluster.session.ray_session import store_bytes
from grpo_rl.workers.instruments import Instruments


class Echo:
    def both(self, one: Any, other: Any = None) -> tuple[Any, Any]:
        return one, other


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The references that were fetched, in order; each is fetched as itself in upper case."""
    found: list[str] = []

    def get(ref: str) -> str:
        if ref == "lost":
            raise OSError("the object is gone")
        found.append(ref)
        return ref.upper()

    monkeypatch.setattr(worker_host, "_get", get)
    return found


def make_host() -> WorkerHost:
    host = WorkerHost.__new__(WorkerHost)
    host._instruments = Instruments("host")
    host._worker, host._fetched = Echo(), ("", None)
    return host


def test_calls_that_carry_a_stored_value_fetch_it_once_until_another_takes_its_place(fetched: list[str]) -> None:
    host, first, second = make_host(), Stored("a", "1"), Stored("b", "2")
    assert host.call("both", first, 5) == ("A", 5)
    assert host.call("both", first) == ("A", None)
    assert host.call("both", "plain", first) == ("plain", "A")
    assert fetched == ["a"]
    assert host.call("both", second) == ("B", None)
    assert host.call("both", first) == ("A", None)
    assert fetched == ["a", "b", "a"]


def test_a_process_that_takes_anothers_place_fetches_the_value_itself(fetched: list[str]) -> None:
    value = Stored("a", "1")
    assert [make_host().call("both", value)[0] for _ in range(2)] == ["A", "A"]
    assert fetched == ["a", "a"]


def test_a_value_that_is_gone_is_reported_as_any_other_failure_and_asked_for_again(fetched: list[str]) -> None:
    host = make_host()
    for _ in range(2):
        with pytest.raises(RemoteError, match="the object is gone"):
            host.call("both", Stored("lost", "3"))
    assert host.call("both", Stored("a", "1")) == ("A", None)


def test_a_value_of_one_call_only_leaves_the_kept_one_where_it_is(fetched: list[str]) -> None:
    host, share, once = make_host(), Stored("share", "1"), Stored("update", "2", stays=False)
    assert host.call("both", share, once) == ("SHARE", "UPDATE")
    assert host.call("both", share) == ("SHARE", None)
    assert fetched == ["share", "update"] and host._fetched == ("1", "SHARE")


class StoringSet:
    """The part of a worker set that a keeper uses: a store, and calls that are noted."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.calls: list[tuple[str, Any]] = []

    def store(self, values: Any, *, stays: bool = True) -> list[Stored]:
        self.values += values
        return [Stored(f"ref {len(self.values)}", str(len(self.values)), stays) for _ in values]

    def parts(self, method: str) -> list[str]:
        return [method]

    def call_once(self, method: str, arguments: Any) -> None:
        self.calls.append((method, arguments))


def test_updates_that_a_recovery_may_make_again_lie_in_the_store_and_not_in_the_controllers_memory() -> None:
    ranks = StoringSet()
    keeper = Keeper(ranks)  # type: ignore[arg-type]
    share = Stored("share", "s")
    sent = keeper.stored([(share, "columns")])
    assert sent == [(share, Stored("ref 1", "1", stays=False))] and ranks.values == ["columns"]
    keeper.after("update", sent)
    keeper.restore()
    assert ranks.calls == [("update", sent)], "the same references again: nothing is sent twice"
    keeper.in_memory = True
    assert keeper.stored([(share, "columns")]) == [(share, "columns")]


def test_updates_count_as_unsaved_until_a_save_begins_that_contains_them() -> None:
    keeper = Keeper(StoringSet())  # type: ignore[arg-type]
    for number in range(3):
        keeper.after("update", [(f"share {number}",)])
    assert keeper.num_unsaved == 3
    keeper.after("begin_save", [("folder",)])
    keeper.after("update", [("share 3",)])
    assert (keeper.num_unsaved, keeper.num_updates) == (1, 4), "until the commit they are kept all the same"
    keeper.committed(Path("folder"))
    assert (keeper.num_unsaved, keeper.num_updates) == (1, 1)


def copied_after(ranks: StoringSet, seconds: list[float], copy_s: float, *, value: Any = "columns") -> list[int]:
    """The updates of these lengths after which a copy in memory is made, where making one takes `copy_s`."""
    keeper = Keeper(ranks)  # type: ignore[arg-type]
    keeper.in_memory = True
    made: list[int] = []
    clock = iter(number * copy_s for number in range(1000))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervised_sets.time, "monotonic", lambda: next(clock))
        patch.setattr(ranks, "parts", lambda method: made.append(number) or [f"copy {number}"])
        for number, length in enumerate(seconds):
            keeper.after("update", [(f"share {number}", value)], length)
    keeper.restore()
    return made


def test_a_copy_follows_every_update_that_takes_long_and_several_of_those_that_do_not() -> None:
    ranks = StoringSet()
    assert copied_after(ranks, [1.0] * 4, copy_s=0.01) == [0, 1, 2, 3]
    assert copied_after(ranks, [0.5] * 7, copy_s=1 / 64) == [0, 2, 4, 6], "2 % of the updates' time"
    assert copied_after(ranks, [6.0] * 5, copy_s=5.0) == [0, 2, 4], "at the latest after 10 s"
    assert copied_after(ranks, [0.1] * 18, copy_s=5.0) == [0, 8, 16], "at the latest after 8 of them"


def test_what_came_after_the_copy_is_made_again() -> None:
    ranks = StoringSet()
    copied_after(ranks, [0.1] * 11, copy_s=5.0)
    assert ranks.calls == [("restore", [("copy 8",)]), *(("update", [(f"share {n}", "columns")]) for n in (9, 10))]


def test_whole_weights_are_not_kept_where_a_copy_takes_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervised_sets.ray, "ObjectRef", str)
    assert copied_after(StoringSet(), [0.1] * 3, copy_s=5.0) == [0, 1, 2]


@pytest.mark.parametrize(
    ("free", "total", "shared", "size"),
    [
        (500, 1000, 500, 150),
        (500, 1000, 100, 80),
        (900, 100, 500, 30),
        (4, 8, 8, 2),
        (500, 1000, 0.06, 2),
    ],
    ids=["a large machine", "a small /dev/shm", "a container's limit", "a laptop", "a container's own /dev/shm"],
)
def test_the_object_store_grows_with_the_machine(free: float, total: float, shared: float, size: float) -> None:
    assert store_bytes(free * 2**30, total * 2**30, shared * 2**30) == size * 2**30
