from __future__ import annotations

import threading
from pathlib import Path

import pytest

from grpo_rl.errors import ClusterError, Preempted
from grpo_rl.telemetry.status import Status, read_status


def test_the_newest_fields_are_on_disk_when_a_run_has_ended(tmp_path: Path) -> None:
    status = Status(tmp_path / "status.json")
    for step in range(1, 50):
        status.update(step=step, phase="gen", last_commit=step - 1)
    status.update(workers={"actor0": 10, "rollout0": 11})
    for pid in (None, 12, None, 13):
        status.count_restart("rollout0", pid)
    status.end()
    found = read_status(tmp_path)
    assert (found["state"], found["step"], found["last_commit"], found["restarts"]) == ("done", 49, 48, {"rollout0": 2})
    assert found["workers"] == {"actor0": 10, "rollout0": 13}
    assert found["error"] is None and not (tmp_path / "status.tmp").exists()


@pytest.mark.parametrize(
    ("error", "state", "code"),
    [
        (ClusterError("actor1 died\n  log: actor1.log"), "failed", 6),
        (Preempted("stopped by SIGTERM"), "preempted", 75),
        (ZeroDivisionError("by nought"), "failed", 70),
    ],
)
def test_how_a_run_ended_is_told_with_its_exit_code(tmp_path: Path, error: BaseException, state: str, code: int) -> None:
    status = Status(tmp_path / "status.json")
    status.update(step=3, phase="update_actor")
    if isinstance(error, ClusterError):
        error.where, error.advice = status.where(), status.going_on()
    status.end(error)
    found = read_status(tmp_path)
    assert (found["state"], found["error"]["exit_code"], found["error"]["type"]) == (state, code, type(error).__name__)
    if isinstance(error, ClusterError):
        assert found["error"]["message"] == (
            "step 3, update_actor: actor1 died; no step is saved yet (trainer.save_freq): the same command begins anew"
        )


def test_an_update_never_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    let_go = threading.Event()
    monkeypatch.setattr(Status, "_write", lambda self, text: let_go.wait())
    status = Status(tmp_path / "status.json")
    for step in range(1000):
        status.update(step=step)  # one that waited would wait for ever
    let_go.set()


def test_the_first_word_on_how_a_run_ended_stays(tmp_path: Path) -> None:
    status = Status(tmp_path / "status.json")
    status.end(Preempted("by SIGHUP: step 4 of 5 is saved"))
    status.end(ClusterError("the Ray cluster is lost"))
    status.end()
    found = read_status(tmp_path)
    assert (found["state"], found["error"]["exit_code"], status.ended_with) == ("preempted", 75, 75)
    lost = Status(tmp_path / "gone" / "status.json")
    lost.end()
    assert read_status(tmp_path / "gone") == {}, "a disk that fails does not fail the run"
