"""A value that several calls carry is fetched by a process once."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_rl.cluster.processes import worker_group
from grpo_rl.cluster.processes.worker_group import RemoteError, Stored, WorkerHost
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

    monkeypatch.setattr(worker_group, "_get", get)
    return found


def make_host() -> WorkerHost:
    host = WorkerHost.__new__(WorkerHost)
    host._instruments = Instruments("host")
    host._worker, host._fetched, host._calls = Echo(), ("", None), {}
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


def test_a_value_that_is_gone_is_reported_as_any_other_failure_and_asked_for_again(fetched: list[str]) -> None:
    host = make_host()
    for _ in range(2):
        with pytest.raises(RemoteError, match="the object is gone"):
            host.call("both", Stored("lost", "3"))
    assert host.call("both", Stored("a", "1")) == ("A", None)


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
