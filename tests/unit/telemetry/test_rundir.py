"""The folder of a run: its names, what an earlier run left, and its lock: whoever comes second is refused at once."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_rl.errors import ConfigError
from grpo_rl.telemetry.rundir import LOCK_FILE, RunDir, RunLock, refuse_taken


def test_runs_without_a_name_never_share_a_folder(tmp_path: Path) -> None:
    paths = {RunDir.create(tmp_path).path for _ in range(20)}
    assert len(paths) == 20
    assert all(path.parent == tmp_path for path in paths)


@pytest.mark.parametrize(
    "name", ["..", "../x", "a/../../x", "/tmp/x", "a\0b", "", " ", ".", "a/./b", "a\nb", "\x1b[31m", "x" * 300]
)
def test_a_name_that_leaves_the_base_folder_or_is_no_name_is_refused(tmp_path: Path, name: str) -> None:
    base = tmp_path / "base"
    with pytest.raises(ConfigError, match="experiment_name"):
        RunDir.create(base, name)
    assert not base.exists()


def test_a_link_that_leads_out_of_the_base_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="elsewhere"):
        RunDir.create(tmp_path / "base", "link/run")


def test_starting_fresh_moves_everything_of_the_earlier_run_aside(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path, "named")
    assert run_dir.start_fresh() is None
    for attempt in (1, 2):
        run_dir.metrics_file.write_text(f"metrics of {attempt}")
        (run_dir.rollouts / "step_1.jsonl").write_text(f"rollouts of {attempt}")
        aside = run_dir.start_fresh()
        assert aside == run_dir.path / "earlier" / str(attempt)
        assert not run_dir.metrics_file.exists()
        assert list(run_dir.rollouts.iterdir()) == []
    assert (run_dir.path / "earlier/1/metrics.jsonl").read_text() == "metrics of 1"
    assert (run_dir.path / "earlier/2/rollouts/step_1.jsonl").read_text() == "rollouts of 2"


def test_a_changed_configuration_does_not_replace_the_one_before_a_resume(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path, "named")
    for learning_rate in (1, 1, 2, 3):
        run_dir.write_config(f"lr: {learning_rate}\n", [f"lr={learning_rate}"])
    texts = {path.name: path.read_text() for path in run_dir.path.iterdir() if path.suffix in (".yaml", ".txt")}
    assert texts == {
        "config.yaml": "lr: 3\n",
        "config.1.yaml": "lr: 1\n",
        "config.2.yaml": "lr: 2\n",
        "overrides.txt": "lr=3\n",
        "overrides.1.txt": "lr=1\n",
        "overrides.2.txt": "lr=2\n",
    }


def test_what_differs_from_the_last_start_is_listed_by_key(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path, "named")
    assert run_dir.changes("lr: 1\n") == [], "there was no start before"
    run_dir.write_config("lr: 1.0e-06\ntrainer:\n  steps: 4\n  name: null\nfiles:\n- a\nold: 1\n", [])
    now = "lr: 2.0e-06\ntrainer:\n  steps: 4\n  name: x\nfiles:\n- a\n- b\nnew: true\n"
    assert run_dir.changes(now) == [
        "lr: 1e-06 -> 2e-06",
        "trainer.name: null -> x",
        "files: [a] -> [a,b]",
        "old: 1 -> not set",
        "new: not set -> true",
    ]
    assert run_dir.changes((run_dir.path / "config.yaml").read_text()) == []


HOLDS = """
import sys, time
from grpo_rl.telemetry.rundir import RunDir
RunDir.create(sys.argv[1], "shared")
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture
def owner(tmp_path: Path):
    """Another process that has the run `shared`."""
    process = subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.wait(120)
    process.stdout.close()


def test_the_second_one_learns_whose_the_name_is_until_the_first_one_is_killed(
    owner: subprocess.Popen[str], tmp_path: Path
) -> None:
    before = (tmp_path / "shared" / LOCK_FILE).read_bytes()
    expected = rf"experiment_name=shared: another process \(pid {owner.pid} on {socket.gethostname()}, since 20.*\)"
    for _ in range(2):
        with pytest.raises(ConfigError, match=expected):
            refuse_taken(tmp_path, "shared")
        with pytest.raises(ConfigError, match=expected):
            RunDir.create(tmp_path, "shared")
    assert (tmp_path / "shared" / LOCK_FILE).read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shared"]
    owner.send_signal(signal.SIGKILL)
    owner.wait(120)
    refuse_taken(tmp_path, "shared")
    RunDir.create(tmp_path, "shared").release()


@pytest.fixture
def without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system like Lustre without -o flock."""

    def unsupported(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", unsupported)


def test_without_locks_a_running_process_of_this_machine_keeps_its_name(
    owner: subprocess.Popen[str], tmp_path: Path, without_locks: None
) -> None:
    with pytest.raises(ConfigError, match=f"pid {owner.pid} on"):
        RunLock(tmp_path / "shared")
    owner.kill()
    owner.wait(120)
    RunLock(tmp_path / "shared").release()


def test_without_locks_a_process_elsewhere_keeps_its_name_until_somebody_says_that_it_is_gone(
    tmp_path: Path, without_locks: None
) -> None:
    file = tmp_path / LOCK_FILE
    file.write_text(json.dumps({"pid": 1, "host": "another", "since": "2030-01-01 00:00:00"}))
    with pytest.raises(
        ConfigError, match=f"pid 1 on another, since 2030-01-01 00:00:00.*Remove {file} if that process is gone"
    ):
        RunLock(tmp_path)
    file.unlink()
    lock = RunLock(tmp_path)
    assert json.loads(file.read_text())["pid"] == os.getpid()
    lock.release()
    lock.release()
    assert file.read_text() == "", "nobody has it"
