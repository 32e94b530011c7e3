"""The cluster is lost, is not there, or is another one: named soon, with exit code 6."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import oracles
import pytest
import ray
from oracles import Training
from tiny_run import two_workers

from grpo_rl.cluster.session.launcher import processes

START_S = 240.0
NAMED_S = 30.0
"""The goal is 10 s, which a quiet machine keeps and a busy one need not: what was measured is printed."""
pytestmark = pytest.mark.timeout(600)

CONNECTS = """
import json, sys, time
from grpo_rl.cluster.session.ray_session import ray_session, set_environment
from grpo_rl.config.schema.tree import RayInitConfig
from grpo_rl.errors import ClusterError
set_environment(sys.argv[1])
import ray
ray.__version__ = sys.argv[2]
began = time.monotonic()
try:
    with ray_session(RayInitConfig(address=sys.argv[1], allow_insecure=True), 1):
        text = "connected"
except ClusterError as error:
    text = str(error)
print(json.dumps([text, time.monotonic() - began]))
"""


def connect(address: str, version: str, **environment: str) -> subprocess.Popen[str]:
    """A process of this version of Ray that connects."""
    return subprocess.Popen(
        [sys.executable, "-c", CONNECTS, address, version],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def told(process: subprocess.Popen[str]) -> tuple[str, float]:
    """Return the message that the process printed, and after how many seconds."""
    with process:
        try:
            out, err = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == 0, err
    text, seconds = json.loads(out.splitlines()[-1])
    return text, seconds


def process_of(training: Training, name: str) -> int:
    """The process of the run's own cluster that has this name."""
    for pid in processes(training.sessions[-1]["token"]):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text().strip() == name:
                return pid
    raise AssertionError(f"the run has no {name}")


LOST_IN = {
    "gcs_server": ("start", 200, "its head (gcs_server)"),
    "raylet": ("update_actor", 1, "its raylet"),
    "ray::RuntimeEnv": ("update_actor", 1, "its raylet"),
    "ray::DashboardA": ("save", 1, "its raylet"),
}
"""The process of the cluster that is killed; the phase of the run in which it is, and for how many seconds the controller is
asleep then; what the run names. A raylet ends with its agents, and Ray a controller that hands an object to one that has gone."""


@pytest.mark.parametrize(
    "victim", [one if one == "raylet" else pytest.param(one, marks=pytest.mark.campaign) for one in LOST_IN]
)
def test_a_run_whose_cluster_is_killed_says_so_and_ends(training: Any, run_words: list[str], victim: str) -> None:
    phase, seconds, name = LOST_IN[victim]
    fault = f"driver.phase:delay={seconds}@step=1,phase={phase}"
    run = training("lost", [*two_workers(run_words), "trainer.save_freq=1"], fault).start()
    # Ray is connected when the first worker has a log.
    run.until(lambda status: status["phase"] == phase and (run.path / "logs" / "rollout0.log").exists(), START_S)
    os.kill(process_of(run, victim), signal.SIGKILL)
    began = time.monotonic()
    assert run.wait(START_S) == 6, run.describe()
    took = time.monotonic() - began
    print(f"MEASURED {victim} killed: the run ended {took:.2f} s later")
    assert took < NAMED_S
    [line] = [line for line in run.error_lines() if "the Ray cluster is lost" in line]
    assert line.startswith("error: ") and f"the Ray cluster is lost: {name} " in line
    assert "the same command begins anew" in line
    status = run.status
    assert (status["state"], status["error"]["exit_code"], status["error"]["type"]) == ("failed", 6, "ClusterError")
    oracles.assert_nothing_left(run)


STOPS_THE_RAYLET = """
import os, signal, time
from pathlib import Path
from grpo_rl.cluster.session import launcher
from grpo_rl.cluster.session.ray_session import ray_session
from grpo_rl.config.schema.tree import RayInitConfig
with ray_session(RayInitConfig(), 1):
    import ray
    family = launcher.processes(os.environ[launcher.TOKEN])
    [raylet] = [pid for pid in family if Path(f"/proc/{pid}/comm").read_text().strip() == "raylet"]
    os.kill(raylet, signal.SIGSTOP)
    time.sleep(6.0)
    os.kill(raylet, signal.SIGCONT)
    print("answers", ray.get(ray.remote(lambda: 3).remote(), timeout=60))
"""


def test_a_local_raylet_that_gets_no_core_for_long_goes_on_afterwards() -> None:
    """Ray's times are shortened: with its own threshold of five misses the raylet ends after one second."""
    quick = {f"RAY_health_check_{name}_ms": "100" for name in ("period", "timeout", "initial_delay")}
    words = [sys.executable, "-c", STOPS_THE_RAYLET]
    done = subprocess.run(words, env=os.environ | quick, capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines()[-1:] == ["answers 3"], done.stderr


def test_another_version_another_token_and_an_address_where_nobody_listens_are_named(slots):
    ours, nobody = ray.get_runtime_context().gcs_address, "127.0.0.1:1"
    same, other, lost = [connect(*words) for words in ((ours, ray.__version__), (ours, "2.0.0"), (nobody, ray.__version__))]
    stranger = connect(ours, ray.__version__, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    assert told(same)[0] == "connected"
    text, seconds = told(other)
    assert text.startswith(f"the cluster at {ours} runs Ray {ray.__version__} on Python 3.")
    assert ", this process Ray 2.0.0 on Python 3." in text and seconds < NAMED_S
    assert text.endswith(f'uv pip install --python {sys.executable} "ray=={ray.__version__}"')
    text, seconds = told(lost)
    assert text.startswith(f"no Ray cluster at {nobody}: Connection refused; ") and seconds < NAMED_S
    text, seconds = told(stranger)
    assert (
        text.startswith(f"the cluster at {ours} asks for a token, and this process has none or another") and seconds < NAMED_S
    )
