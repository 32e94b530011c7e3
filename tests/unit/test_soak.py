"""The soak's own parts: its faults can be armed, hit nobody else, and its figures are right."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_rl import faults
from grpo_rl.checkpoint.store import CheckpointStore
from grpo_rl.cluster.session import run_watcher

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def soak_faults(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("soak_faults")


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch, soak_faults: Any) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("soak")


def test_every_armed_fault_can_be_armed_and_the_same_seed_draws_the_same(soak_faults: Any, tmp_path: Path) -> None:
    seen = set()
    for seed in range(60):
        first, second = (soak_faults.Source(seed, num_ranks=2, save_freq=2, steps_between=10.0) for _ in range(2))
        entries = first.armed(10, 1000)
        assert entries == second.armed(10, 1000)
        assert [first.draw() for _ in range(5)] == [second.draw() for _ in range(5)]
        faults.arm(";".join(entries), str(tmp_path))
        seen |= {entry.partition("@")[0] for entry in entries}
    faults.arm("")
    assert seen == {template.partition("@")[0] for template in soak_faults.ARMED}
    assert soak_faults.Source(0, 1, 2, 10.0).armed(10, last_step=10) == [], "nothing is armed for after the end"


def test_a_victim_is_a_live_process_of_the_run_in_the_role_that_was_drawn(soak_faults: Any) -> None:
    sleeping = [sys.executable, "-c", "import time; print(flush=True); time.sleep(100)"]
    ours, theirs = (
        subprocess.Popen(sleeping, env=os.environ | {run_watcher.TOKEN: token}, stdout=subprocess.PIPE)
        for token in ("ours", "theirs")
    )
    try:
        for process in (ours, theirs):
            assert process.stdout is not None and process.stdout.readline() == b"\n"
        source = soak_faults.Source(0, 1, 2, 10.0)
        status = {"pid": os.getpid(), "workers": {"rollout0": ours.pid, "rollout1": theirs.pid, "actor0": theirs.pid}}
        picked = {source.victim("kill -9 replica", status, {"token": "ours"}) for _ in range(20)}
        assert picked == {ours.pid}, "the number of a process that is gone may be anybody's by now"
        assert source.victim("SIGSTOP actor rank", status, {"token": "ours"}) is None
        assert source.victim("kill -9 reward process", status, {"token": "ours"}) is None
        assert soak_faults.send(ours.pid, "kill -9 replica")
        assert ours.wait(10) == -9
        assert source.victim("kill -9 replica", status, {"token": "ours"}) is None
    finally:
        for process in (ours, theirs):
            process.kill()
            process.wait(10)
            assert process.stdout is not None
            process.stdout.close()


def test_damage_takes_the_newest_checkpoint_and_never_the_only_one(soak_faults: Any, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    for seed in range(12):
        source = soak_faults.Source(seed, 1, 2, 10.0)
        for step in (2, 4):
            store.save(step, lambda folder: (folder / "weights.bin").write_bytes(bytes(100)) and None, {"step": step})
        damaged = source.damage(store.folder)
        assert damaged is not None and damaged.parent.name == "step_4"
        assert soak_faults.intact(store.folder) == [2]
        assert source.damage(store.folder) is None


def test_effective_time_leaves_out_what_a_recovery_added(soak: Any, tmp_path: Path) -> None:
    rows = [
        {"step": 1, "timing_s/step": 2.0},
        {"step": 2, "timing_s/step": 9.0, "recovery/actor_restarts": 1.0},
        {"step": 3, "timing_s/step": 1.0},
        {"step": 4, "timing_s/step": 1.0, "recovery/rollout_restarts": 1.0},
        {"step": 5, "timing_s/step": 2.5},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    # The median of all is 2: step 2 counts as that, step 4 was faster, the others as they were.
    assert soak.effective_s(tmp_path) == 2.0 + 2.0 + 1.0 + 1.0 + 2.5
    assert soak.spread([3.0, 1.0, 2.0]) == "p50 2.0 s, p99 3.0 s (3)"
