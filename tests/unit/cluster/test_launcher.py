"""Nothing of a session outlives its controller: with real processes, and without Ray."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from grpo_rl.cluster.run_session import behind_ray
from grpo_rl.cluster.session import launcher
from grpo_rl.cluster.session.launcher import Session
from grpo_rl.cluster.session.ray_session import clean_earlier, watched
from grpo_rl.errors import Preempted
from grpo_rl.processes.family import state
from grpo_rl.telemetry.status import read_status

SLEEPER = "import os, time; os.setsid(); print(os.getpid(), flush=True); time.sleep(600)"
"""A process that has left its parent's session, as an engine's core does."""
FORK = multiprocessing.get_context("fork")


def becomes_true(condition: Callable[[], bool], seconds: float = 120.0) -> bool:
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
    assert ours.poll(120)
    return (process, *ours.recv())


@pytest.mark.parametrize("ends", ["killed", "well"])
def test_a_controller_takes_a_child_in_a_session_of_its_own_and_its_folder_with_it(tmp_path: Path, ends: str) -> None:
    record = tmp_path / "session.json"
    process, child, folder = controller(record, stays=ends == "killed")
    if ends == "killed":
        assert state(child) != "has ended" and folder.is_dir()
        process.kill()
    process.join(120)
    assert becomes_true(lambda: state(child) == "has ended" and not folder.exists())
    assert ends == "killed" or (process.exitcode == 0 and not record.exists())


def test_the_next_run_ends_what_the_last_one_left_and_nothing_else(tmp_path: Path) -> None:
    record = tmp_path / "session.json"
    stranger = subprocess.Popen([sys.executable, "-c", SLEEPER], env={**os.environ, launcher.TOKEN: "f" * 32})
    with watched() as folder:
        # As after the death of the watching process: the record is there, and so is the child.
        token = (folder / launcher.MARKER).read_text()
        child = subprocess.Popen([sys.executable, "-c", SLEEPER])
        assert becomes_true(lambda: child.pid in launcher.processes(token))
        # Of the id of the controller another process has been made since.
        found = {"token": token, "folder": str(folder), "host": os.uname().nodename, "pid": os.getpid(), "started": 1}
        record.write_text(json.dumps(found))
        # The process that watches does not carry the token of what it watches.
        assert clean_earlier(record) == [child.pid]
        assert child.wait(120) == -signal.SIGKILL
        assert not folder.exists() and not record.exists()
    assert stranger.poll() is None
    stranger.kill()
    stranger.wait(120)


def test_the_copy_of_a_running_run_s_folder_ends_nothing_of_that_run(tmp_path: Path) -> None:
    process, child, folder = controller(tmp_path / "session.json", stays=True)
    copy = tmp_path / "copy.json"
    copy.write_bytes((tmp_path / "session.json").read_bytes())
    ended = clean_earlier(copy), state(child) == "has ended", folder.is_dir()
    process.kill()
    process.join(120)
    assert ended == ([], False, True)
    assert becomes_true(lambda: state(child) == "has ended" and not folder.exists())


def test_a_folder_without_the_session_s_marker_is_never_removed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("data")
    Session("0" * 32, tmp_path).clean()
    (tmp_path / launcher.MARKER).write_text("somebody else's")
    Session("0" * 32, tmp_path).clean()
    assert (tmp_path / "precious").exists()


def test_a_broken_record_is_nothing_to_clean(tmp_path: Path) -> None:
    for text in ("", "{", "[]", '{"token": "x"}'):
        (tmp_path / "session.json").write_text(text)
        assert clean_earlier(tmp_path / "session.json") == []


def test_shared_memory_that_no_tracker_knows_goes_with_the_file_it_is_called_after(tmp_path: Path) -> None:
    token = "0" * 31 + "2"
    (tmp_path / launcher.MARKER).write_text(token)
    name = f"vllm_dist_{os.getpid()}{time.monotonic_ns()}"
    ours, other = (Path("/dev/shm") / f"{start}-tp:0-[0-1]-cpushm_0" for start in (name, f"{name}0"))
    try:
        for segment in (ours, other):
            segment.write_bytes(b"")
        engine = tmp_path / "engine-1"
        engine.mkdir()
        (engine / name).write_text("")
        assert Session(token, tmp_path).clean() == []
        assert not ours.exists() and other.exists() and not tmp_path.exists()
    finally:
        for segment in (ours, other):
            segment.unlink(missing_ok=True)


# ---- the launcher: with a run that does nothing but wait -------------------------------------------------

RUN = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
from grpo_rl.cluster.session import launcher
from grpo_rl.cluster.session.ray_session import watched
from grpo_rl.errors import Preempted
from grpo_rl.main import exit_code_after
from grpo_rl.telemetry.status import Status

def work():
    run, came = Path(sys.argv[1]), []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: came.append(number))
    with watched(run / "session.json") as folder:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        status = Status(run / "status.json")
        status.update(step=3, phase="gen", last_commit=2, workers={"child": child.pid}, folder=str(folder))
        while not came:
            time.sleep(0.01)
        time.sleep(0.3)
        if sys.argv[2] == "at once":  # as on a second Ctrl-C
            os._exit(130)
        if sys.argv[2] == "dies":
            os._exit(1)
        error = Preempted(f"by {came}")
        status.end(error)
    raise error

launcher.launches = True
sys.exit(exit_code_after(lambda: launcher.launched(lambda: exit_code_after(work))))
"""


@dataclass(frozen=True)
class Launched:
    """A launcher with its run."""

    process: subprocess.Popen[str]
    status: dict[str, Any]
    run: Path

    def ends(self) -> tuple[int, str]:
        """Return its exit code and what it said, once nothing is left of the run."""
        _, said = self.process.communicate(timeout=240)
        assert becomes_true(lambda: state(self.status["workers"]["child"]) == "has ended")
        assert becomes_true(lambda: not Path(self.status["folder"]).exists() and not (self.run / "session.json").exists())
        return self.process.returncode, said


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    started: list[subprocess.Popen[str]] = []

    def start(*words: str) -> Launched:
        command = [sys.executable, "-c", RUN, str(tmp_path), *(words or ("ends",))]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
        started.append(process)
        assert becomes_true(lambda: "folder" in read_status(tmp_path))
        return Launched(process, read_status(tmp_path), tmp_path)

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_group_reaches_the_controller_once_and_its_exit_code_is_the_launchers(
    launched: Callable[..., Launched], number: int
) -> None:
    run = launched()
    assert os.getpgid(run.status["pid"]) != run.process.pid, "it is not of the group that a terminal signals"
    os.killpg(run.process.pid, number)
    os.killpg(run.process.pid, signal.SIGCONT)  # as Slurm's scancel does
    assert run.ends() == (75, f"stopped: by [{number}]\n")
    assert read_status(run.run)["state"] == "preempted"


def test_a_run_that_a_second_interrupt_ends_is_not_said_to_run(launched: Callable[..., Launched]) -> None:
    run = launched("at once")
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.ends() == (130, "")
    status = read_status(run.run)
    assert status["state"] == "preempted" and status["error"]["exit_code"] == 130
    assert status["error"]["message"] == "interrupted again: ended at once"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_the_launcher_says_which_signal_ended_the_controller_and_where_the_run_goes_on(
    launched: Callable[..., Launched], number: int
) -> None:
    run = launched()
    os.kill(run.status["pid"], number)
    code, said = run.ends()
    assert code == 128 + number
    name = signal.Signals(number).name
    assert said.startswith(f"error: step 3, gen: the run's controller (process {run.status['pid']}) was ended by {name}")
    assert ("SIGKILL, and not for lack of memory" in said) == (number == signal.SIGKILL)
    assert "the same command goes on from step 2, the last commit\n  log: " in said
    status = read_status(run.run)
    assert (status["state"], status["error"]["exit_code"]) == ("failed", code)


def test_ctrl_z_stops_the_controller_too_until_the_launcher_goes_on(launched: Callable[..., Launched]) -> None:
    run = launched()
    pid = run.status["pid"]
    run.process.send_signal(signal.SIGTSTP)
    assert becomes_true(lambda: state(pid) == state(run.process.pid) == "stopped by a signal")
    run.process.send_signal(signal.SIGCONT)
    assert becomes_true(lambda: state(pid) == "waits")
    run.process.terminate()
    assert run.ends()[0] == 75


def test_an_end_by_ray_is_a_cluster_that_is_lost(launched: Callable[..., Launched]) -> None:
    run = launched("dies")
    run.process.terminate()
    code, said = run.ends()
    assert code == 6 and said.startswith("error: step 3, gen: the Ray cluster is lost: its raylet on the controller's machine")
    assert read_status(run.run)["error"]["exit_code"] == 6


def test_a_controller_whose_launcher_is_killed_is_told_to_stop_and_cleans_up_itself(
    launched: Callable[..., Launched],
) -> None:
    run = launched()
    run.process.kill()
    assert run.ends()[0] == -signal.SIGKILL
    assert read_status(run.run)["state"] == "preempted"


def test_what_starts_a_session_has_not_imported_ray_before_and_one_for_tests_never_does() -> None:
    program = (
        "import sys, grpo_rl.cluster.sampling, grpo_rl.cluster.run_session, grpo_rl.commands.chat, grpo_rl.cluster.warm_start; "
        "import grpo_rl.testing; "
        "assert 'ray' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=240)


def test_ray_that_was_imported_before_a_local_session_is_refused_and_not_without_a_token() -> None:
    program = "import ray; from grpo_rl.cluster.session.ray_session import set_environment; set_environment()"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=240)
    assert "ClusterError: Ray was imported before the run's session began" in done.stderr


def test_a_stop_in_the_middle_of_ray_is_a_stop_however_many_signals_came() -> None:
    stop, broken = Preempted("by SIGTERM"), SystemError("wait returned a result with an exception set")
    assert behind_ray(broken) is broken
    for raised in (stop, caused(SystemError(), stop), caused(SystemError(), caused(SystemError(), stop))):
        assert behind_ray(raised) is stop


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error
