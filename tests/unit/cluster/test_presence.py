"""A cluster that is not there, or not there any more."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_rl.cluster.session import liveness
from grpo_rl.cluster.session.liveness import ClusterWatch, refuse_unreachable, unanswered, why_not_connected
from grpo_rl.errors import ClusterError


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


@pytest.mark.parametrize("form", ["127.0.0.1:{}", "ray://127.0.0.1:{}"])
def test_an_address_where_nobody_listens_is_refused_at_once_and_by_name(
    listener: socket.socket, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "_PROBE_TIMEOUT_S", 0.2)  # that long a listener is asked which says nothing
    address = form.format(listener.getsockname()[1])
    refuse_unreachable(address)
    refuse_unreachable("auto")  # a word that is left to Ray
    listener.close()
    with pytest.raises(ClusterError) as caught:
        refuse_unreachable(address)
    message = str(caught.value)
    assert message.startswith(f"no Ray cluster at {address}: Connection refused; start it") and "RAY_ADDRESS" in message


def test_a_connection_that_ray_could_not_make_is_told_in_one_line() -> None:
    # Another version, with Ray's own words for it: tests/faults/test_cluster_lost.py.
    refused = ConnectionError("Failed to connect to Ray cluster at auto")
    refused.__cause__ = RuntimeError("InvalidAuthToken: the authentication token is incorrect")
    assert str(why_not_connected("auto", refused)).startswith("the cluster at auto asks for a token, and this process has none")
    assert str(why_not_connected(None, ValueError("no\n  room"))) == "cannot connect to a local Ray: ValueError: no room"


def test_a_place_that_is_gone_is_told_once_with_its_name(
    listener: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "LOOK_S", 0.01)
    path = str(tmp_path / "raylet")
    with socket.socket(socket.AF_UNIX) as local:
        local.bind(path)
        local.listen(100)
        assert unanswered(path) is None
        lost: list[str] = []
        told = threading.Event()

        def on_lost(cause: str) -> None:
            lost.append(cause)
            told.set()

        places: dict[str, Any] = {"its head": listener.getsockname(), "its raylet": path}
        watch = ClusterWatch(places, on_lost, patience_s=0.2)
        assert not told.wait(0.4), "both answer"
        local.close()
        assert told.wait(120)
        watch.close()
    assert len(lost) == 1
    assert re.match(r"the Ray cluster is lost: its raylet has not answered for \d+\.\d s .*refused", lost[0])
