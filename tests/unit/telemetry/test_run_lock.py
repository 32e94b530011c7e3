"""One name, one run: whoever comes second is refused at once, and whoever was first does not notice."""

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
    process.wait(10)
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
    owner.wait(10)
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
        RunLock.take(tmp_path / "shared")
    owner.kill()
    owner.wait(10)
    RunLock.take(tmp_path / "shared").release()


def test_without_locks_a_process_elsewhere_keeps_its_name_until_somebody_says_that_it_is_gone(
    tmp_path: Path, without_locks: None
) -> None:
    file = tmp_path / LOCK_FILE
    file.write_text(json.dumps({"pid": 1, "host": "another", "since": "2030-01-01 00:00:00"}))
    with pytest.raises(
        ConfigError, match=f"pid 1 on another, since 2030-01-01 00:00:00.*Remove {file} if that process is gone"
    ):
        RunLock.take(tmp_path)
    file.unlink()
    lock = RunLock.take(tmp_path)
    assert json.loads(file.read_text())["pid"] == os.getpid()
    lock.release()
    lock.release()
    assert file.read_text() == "", "nobody has it"
