"""Nothing of a session outlives its controller: with real processes, and without Ray."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from grpo_rl.cluster.session import run_watcher
from grpo_rl.cluster.session.ray_session import clean_earlier, watched
from grpo_rl.processes.family import state

SLEEPER = "import os, time; os.setsid(); print(os.getpid(), flush=True); time.sleep(600)"
"""A process that has left its parent's session, as an engine's core does."""
FORK = multiprocessing.get_context("fork")


def becomes_true(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def be_a_controller(record: Path, stays: bool, answer: Connection) -> None:
    """Start a session with one child, which leaves it; send the child's process id and the session's folder."""
    with watched(record) as folder:
        child = subprocess.Popen([sys.executable, "-c", SLEEPER], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        answer.send((int(child.stdout.readline()), folder))
        time.sleep(600 if stays else 0)


def controller(record: Path, *, stays: bool) -> tuple[multiprocessing.process.BaseProcess, int, Path]:
    """Return a controller in a process of its own, its child's process id and its folder."""
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=be_a_controller, args=(record, stays, theirs))
    process.start()
    theirs.close()
    assert ours.poll(30)
    return (process, *ours.recv())


@pytest.mark.parametrize("ends", ["killed", "well"])
def test_a_controller_takes_a_child_in_a_session_of_its_own_and_its_folder_with_it(tmp_path: Path, ends: str) -> None:
    record = tmp_path / "session.json"
    process, child, folder = controller(record, stays=ends == "killed")
    if ends == "killed":
        assert state(child) != "has ended" and folder.is_dir()
        process.kill()
    process.join(30)
    assert becomes_true(lambda: state(child) == "has ended" and not folder.exists())
    assert ends == "killed" or (process.exitcode == 0 and not record.exists())


def test_the_next_run_ends_what_the_last_one_left_and_nothing_else(tmp_path: Path) -> None:
    record = tmp_path / "session.json"
    stranger = subprocess.Popen([sys.executable, "-c", SLEEPER], env={**os.environ, run_watcher.TOKEN: "f" * 32})
    with watched() as folder:
        # As after the death of the watching process: the record is there, and so is the child.
        token = (folder / run_watcher.MARKER).read_text()
        child = subprocess.Popen([sys.executable, "-c", SLEEPER])
        assert becomes_true(lambda: child.pid in run_watcher.processes(token))
        # Of the id of the controller another process has been made since.
        found = {"token": token, "folder": str(folder), "host": os.uname().nodename, "pid": os.getpid(), "started": 1}
        record.write_text(json.dumps(found))
        # The process that watches does not carry the token of what it watches.
        assert clean_earlier(record) == [child.pid]
        assert child.wait(10) == -signal.SIGKILL
        assert not folder.exists() and not record.exists()
    assert stranger.poll() is None
    stranger.kill()
    stranger.wait(10)


def test_the_copy_of_a_running_run_s_folder_ends_nothing_of_that_run(tmp_path: Path) -> None:
    process, child, folder = controller(tmp_path / "session.json", stays=True)
    copy = tmp_path / "copy.json"
    copy.write_bytes((tmp_path / "session.json").read_bytes())
    ended = clean_earlier(copy), state(child) == "has ended", folder.is_dir()
    process.kill()
    process.join(30)
    assert ended == ([], False, True)
    assert becomes_true(lambda: state(child) == "has ended" and not folder.exists())


def test_a_folder_without_the_session_s_marker_is_never_removed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("data")
    run_watcher.clean("0" * 32, tmp_path)
    (tmp_path / run_watcher.MARKER).write_text("somebody else's")
    run_watcher.clean("0" * 32, tmp_path)
    assert (tmp_path / "precious").exists()


def test_a_broken_record_is_nothing_to_clean(tmp_path: Path) -> None:
    for text in ("", "{", "[]", '{"token": "x"}'):
        (tmp_path / "session.json").write_text(text)
        assert clean_earlier(tmp_path / "session.json") == []


def test_shared_memory_that_no_tracker_knows_goes_with_the_file_it_is_called_after(tmp_path: Path) -> None:
    token = "0" * 31 + "2"
    (tmp_path / run_watcher.MARKER).write_text(token)
    name = f"vllm_dist_{os.getpid()}{time.monotonic_ns()}"
    ours, other = (Path("/dev/shm") / f"{start}-tp:0-[0-1]-cpushm_0" for start in (name, f"{name}0"))
    try:
        for segment in (ours, other):
            segment.write_bytes(b"")
        engine = tmp_path / "engine-1"
        engine.mkdir()
        (engine / name).write_text("")
        assert run_watcher.clean(token, tmp_path) == []
        assert not ours.exists() and other.exists() and not tmp_path.exists()
    finally:
        for segment in (ours, other):
            segment.unlink(missing_ok=True)
