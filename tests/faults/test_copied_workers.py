"""Workers that are copies of one process compute what those do that were started from nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_rl.cluster.processes import fork_server, forks

pytestmark = pytest.mark.campaign


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_ranks_started_from_nothing_go_on_where_copied_ones_were_lost(actor_ranks, monkeypatch):
    scene = actor_ranks
    servers = {parent(worker.pid) for worker in scene.worker_set.workers}
    (server,) = servers
    assert fork_server.__file__.encode() in Path(f"/proc/{server}/cmdline").read_bytes()
    undisturbed = scene.undisturbed

    with monkeypatch.context() as patch:
        patch.setattr(forks, "runtime_env", lambda environment: {})
        assert scene.train(3, "actor.update.start:kill9") == undisturbed
    assert server not in {parent(worker.pid) for worker in scene.worker_set.workers}
    assert scene.train(3) == undisturbed

    assert scene.train(3, "actor.update.start:kill9") == undisturbed
    assert {parent(worker.pid) for worker in scene.worker_set.workers} == servers
