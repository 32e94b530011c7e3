"""A vLLM engine split over two processes of its own: none of them outlives its replica or its run."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import oracles
import pytest
from sockets import listening, ports_of

from grpo_rl.cluster.session import launcher
from grpo_rl.processes.family import descendants, state

START_S = 280.0
pytestmark = [pytest.mark.campaign, pytest.mark.timeout(600)]
WAITS = "driver.response:delay=200@step=1,count=1"


def words(run_words: list[str]) -> list[str]:
    """The tiny run's words with vLLM over two processes."""
    own = ("rollout.name=", "rollout.hf.batched=", "actor.kl_loss_coef=")
    kept = [word for word in run_words if not any(key in word for key in own)]
    rollout = [
        f"actor_rollout_ref.rollout.{word}" for word in ("name=vllm", "tensor_model_parallel_size=2", "kv_cache_gib=0.1")
    ]
    return [*kept, *rollout, "actor_rollout_ref.actor.use_kl_loss=false", "trainer.export_at_end=false"]


def segments(pids: Sequence[int]) -> set[str]:
    """Names in /dev/shm that these processes have mapped and other programs could: not Ray's store, which is the run's."""
    found = set()
    for pid in pids:
        try:
            found |= set(
                re.findall(r" /dev/shm/(psm_\S+|sem\.\S+|vllm_dist_\S+)$", Path(f"/proc/{pid}/maps").read_text(), re.MULTILINE)
            )
        except OSError:
            continue
    return found


def has_vllms_code(pid: int) -> bool:
    """Whether a process has loaded vLLM's compiled code. Its name says so only if the library that renames it could."""
    return re.search(r"/vllm/_C\S*\.so$", Path(f"/proc/{pid}/maps").read_text(), re.MULTILINE) is not None


def test_a_killed_replica_and_a_killed_run_leave_no_engine_process_port_or_segment(training, run_words):
    shared_before = oracles.shared_memory()
    run = training("vllm", words(run_words), WAITS).start()
    status = run.until(lambda status: status["phase"] == "gen" and run.fired(), START_S)
    replica = status["workers"]["rollout0"]
    engine = descendants(replica)
    names = [Path(f"/proc/{pid}/comm").read_text().strip() for pid in engine]
    assert sum(has_vllms_code(pid) for pid in engine) >= 2, names
    shared, ports = segments([replica, *engine]), ports_of([replica, *engine])
    print(f"MEASURED engine: {names}, {len(ports)} ports, segments {sorted(shared)}")
    assert shared, "the engine's processes talk through shared memory"

    os.kill(replica, signal.SIGKILL)
    began = time.monotonic()
    left: list[str] = ["not looked yet"]
    while left and time.monotonic() < began + oracles.ORPHANS_S:
        left = [f"process {pid} {name}" for pid, name in zip(engine, names, strict=True) if state(pid) != "has ended"]
        left += [f"port {address}" for address, _ in ports & listening()]
        left += [f"segment {name}" for name in shared & oracles.shared_memory()]
        time.sleep(0.02)
    assert not left, f"{left}\n{run.describe()}"
    print(f"MEASURED replica killed: its engine was gone after {time.monotonic() - began:.2f} s")

    # The run is starting another engine by now.
    run.note_session()
    family = list(launcher.processes(run.sessions[-1]["token"]))
    ports = ports_of([*family, run.status["pid"]])
    run.kill()
    print(f"MEASURED run killed: nothing left after {oracles.assert_nothing_left(run, ports=ports):.2f} s")
    assert oracles.shared_memory() <= shared_before
