"""Copies of a process that has imported everything: with real processes, and a script in Ray's place."""

from __future__ import annotations

import array
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_rl.cluster.processes import fork_server, forks
from grpo_rl.cluster.processes.forks import ForkServer, environment_of, modules_for, runtime_env
from grpo_rl.errors import ClusterError
from grpo_rl.rollout.engine import EngineSpec
from grpo_rl.rollout.engine_environment import SESSION_FOLDER, engine_environment

SCRIPT = """
import json, os, random, signal, sys
if "SLEEP" in os.environ:
    import time; print(os.getpid(), flush=True); time.sleep(600)
umask = os.umask(0)
print(json.dumps({
    "has": [name for name in ("ready_early", "ready_late") if name in sys.modules],
    "parent": os.getppid(), "group": os.getpgid(0), "pid": os.getpid(), "words": sys.argv[1:], "folder": os.getcwd(),
    "environment": dict(os.environ), "umask": umask, "nice": os.getpriority(os.PRIO_PROCESS, 0),
    "oom": open("/proc/self/oom_score_adj").read(), "input": sys.stdin.read(), "name": __name__,
    "child": signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL, "random": random.random(),
}))
"""
RAY = {"RAY_JOB_ID": "01000000", "RAY_RAYLET_PID": "7"}


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Modules to be imported early and late."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "ready_early.py").write_text("import random, os\nassert 'RAY_JOB_ID' not in os.environ\n")
    (folder / "ready_late.py").write_text("import os\nassert os.environ['RAY_JOB_ID'] == '01000000'\n")
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.syspath_prepend(str(folder))
    return folder


@pytest.fixture
def serve(modules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ForkServer]]:
    """Starts a server, and ends it."""
    monkeypatch.setattr(forks, "WITH_RAY", ("ready_late",))
    monkeypatch.delenv("RAY_JOB_ID", raising=False)
    made: list[ForkServer] = []

    def start(*names: str) -> ForkServer:
        made.append(ForkServer(tmp_path, names))
        return made[-1]

    yield start
    for each in made:
        each.close()


def ask(folder: Path, *words: str, before: Any = None, **environment: str) -> subprocess.Popen[str]:
    client = [fork_server.__file__, str(folder / forks.SOCKET)]
    command = [sys.executable, "-S", "-E", *client, str(folder / "script.py"), *words]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return subprocess.Popen(
        command,
        env=inherited | RAY | environment,
        cwd=folder / "modules",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=before,
    )


def answer(process: subprocess.Popen[str], given: str = "") -> dict[str, Any]:
    out, _ = process.communicate(given, timeout=60)
    return dict(json.loads(out))


def test_a_copy_is_what_would_have_been_started_with_everything_imported(serve, tmp_path):
    def before() -> None:
        os.umask(0o027)
        os.nice(3)

    server = serve("ready_early")
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    process = ask(tmp_path, "--word", "two words", before=before, MINE="yes")
    found = answer(process, "something to read")
    assert found["parent"] == server.pid and found["pid"] != process.pid
    assert found["has"] == ["ready_early", "ready_late"]
    assert found["words"] == ["--word", "two words"] and found["name"] == "__main__"
    assert found["input"] == "something to read"
    assert found["folder"] == str(tmp_path / "modules")
    assert found["group"] == found["pid"], "it is ended with its group"
    assert (found["umask"], found["nice"]) == (0o027, min(19, nice + 3))
    assert found["oom"] == Path("/proc/self/oom_score_adj").read_text()
    assert found["child"]
    assert found["environment"].items() >= {**RAY, "MINE": "yes"}.items()
    # What only the process that is copied was told stays there.
    assert {"GOMP_SPINCOUNT", "OPENBLAS_NUM_THREADS"}.isdisjoint(found["environment"].keys() - os.environ.keys())


def test_what_cannot_be_copied_is_started_from_nothing(serve, tmp_path):
    server = serve("ready_early")
    first, again = answer(ask(tmp_path)), answer(ask(tmp_path))
    assert first["parent"] == again["parent"] == server.pid and first["random"] != again["random"]
    # Ray's C++ part has read its variables, and they were others; then there is no process to copy.
    for environment in ({"RAY_JOB_ID": "02000000"}, {}):
        process = ask(tmp_path, "a word", **environment)
        other = answer(process, "something to read")
        assert (other["pid"], other["words"], other["input"]) == (process.pid, ["a word"], "something to read")
        assert other["has"] == [] and other["environment"].items() >= environment.items()
        os.kill(server.pid, signal.SIGKILL)


def test_who_no_longer_waits_for_a_copy_gets_none(serve, tmp_path):
    server = serve("ready_early")
    fields = {"words": [str(tmp_path / "script.py")], "environment": RAY, "folder": "/"}
    fields |= {"umask": 0, "priority": 0, "oom_score": "0"}
    reading, writing = os.pipe()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(tmp_path / forks.SOCKET))
        data = json.dumps(fields).encode() + b"\n"
        connection.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [reading, writing, writing]))])
        assert connection.recv(64) == b"ready"
    os.close(writing)
    with open(reading) as output:
        assert output.read() == "", "two processes would take themselves for the same worker"
    assert answer(ask(tmp_path))["parent"] == server.pid


def test_it_ends_with_its_controller_and_its_copies_stay(serve, tmp_path):
    server = serve("ready_early")
    process = ask(tmp_path, SLEEP="yes")
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    try:
        server.close()
        assert not Path(f"/proc/{server.pid}").exists()
        assert Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    finally:
        os.kill(pid, signal.SIGKILL)
        process.communicate(timeout=60)


def test_only_workers_whose_variables_are_read_late_or_are_everybodys_are_copied(serve, tmp_path, monkeypatch):
    monkeypatch.setenv(SESSION_FOLDER, str(tmp_path))
    assert runtime_env({}) == {}, "nothing to copy"
    serve("ready_early")
    read_later = {"OMP_NUM_THREADS": "2", "GRPO_FAULT": "driver.step:kill9"}
    command = runtime_env(read_later | environment_of(alone=False))["py_executable"]
    assert command.split()[-1] == str(tmp_path / forks.SOCKET)
    assert runtime_env(engine_environment(EngineSpec("m", 10, name="hf"))) == {"py_executable": command}
    assert runtime_env(engine_environment(EngineSpec("m", 10, name="vllm"))) == {}
    assert runtime_env({"CUDA_VISIBLE_DEVICES": "0"}) == {}
    assert runtime_env(environment_of(alone=True)) == {"py_executable": command}
    assert runtime_env(environment_of(alone=False) | {"GOMP_SPINCOUNT": "1"}) == {}


def test_the_model_says_which_code_is_imported(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert modules_for(str(tmp_path))[-1] == "transformers.models.llama.modeling_llama"
    assert modules_for("builtin:arithmetic")[-1] == "transformers.models.qwen3.modeling_qwen3"
    assert modules_for(str(tmp_path / "missing")) == forks.MODULES


@pytest.mark.parametrize("mode", [0o1777, 0o770, 0o705])
def test_neither_end_uses_a_folder_that_others_may_write_or_look_into(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(ClusterError, match="not this user's alone"):
        ForkServer(tmp_path, [])
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(fork_server.NotOurs, match="not this user's alone"):
        fork_server.granted(str(tmp_path / forks.SOCKET), ["script"])
