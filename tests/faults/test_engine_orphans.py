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
from recovery_ground import is_alive

from grpo_rl.cluster.session import run_watcher
from grpo_rl.processes.family import descendants

START_S = 280.0
pytestmark = [pytest.mark.campaign, pytest.mark.timeout(600)]
WAITS = "driver.response:delay=200@step=1,count=1"


def words(model_word: str) -> list[str]:
    return [
        model_word,
        "data.train_files=task:arithmetic?split=train&num_rows=8",
        "data.train_batch_size=4",
        "data.max_prompt_length=16",
        "data.max_response_length=12",
        "reward.functions=[format]",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.use_kl_loss=false",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.n_gpus_per_node=2",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
        "actor_rollout_ref.rollout.kv_cache_gib=0.1",
        "trainer.heartbeat_s=2",
        "trainer.total_training_steps=2",
        "trainer.export_at_end=false",
    ]


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
    """Whether a process has loaded vLLM's compiled code. Its name says so only where the library that renames it could."""
    return re.search(r"/vllm/_C\S*\.so$", Path(f"/proc/{pid}/maps").read_text(), re.MULTILINE) is not None


def test_a_killed_replica_and_a_killed_run_leave_no_engine_process_port_or_segment(training, run_words):
    shared_before = oracles.shared_memory()
    run = training("vllm", words(run_words[0]), WAITS).start()
    status = run.until(lambda status: status["phase"] == "gen" and run.fired(), START_S)
    replica = status["workers"]["rollout0"]
    engine = descendants(replica)
    names = [Path(f"/proc/{pid}/comm").read_text().strip() for pid in engine]
    assert sum(has_vllms_code(pid) for pid in engine) >= 2, names
    shared, ports = segments([replica, *engine]), oracles.ports_of([replica, *engine])
    print(f"MEASURED engine: {names}, {len(ports)} ports, segments {sorted(shared)}")
    assert shared, "the engine's processes talk through shared memory"

    os.kill(replica, signal.SIGKILL)
    began = time.monotonic()
    left: list[str] = ["not looked yet"]
    while left and time.monotonic() < began + oracles.ORPHANS_S:
        left = [f"process {pid} {name}" for pid, name in zip(engine, names, strict=True) if is_alive(pid)]
        left += [f"port {address}" for address, _ in ports & oracles.listening()]
        left += [f"segment {name}" for name in shared & oracles.shared_memory()]
        time.sleep(0.02)
    assert not left, f"{left}\n{run.describe()}"
    print(f"MEASURED replica killed: its engine was gone after {time.monotonic() - began:.2f} s")

    # The run is starting another engine by now.
    run.note_session()
    family = list(run_watcher.processes(run.sessions[-1]["token"]))
    ports = oracles.ports_of([*family, run.process.pid])
    run.kill()
    print(f"MEASURED run killed: nothing left after {oracles.assert_nothing_left(run, ports=ports):.2f} s")
    assert oracles.shared_memory() <= shared_before
