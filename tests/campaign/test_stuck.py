"""Runs that stand still: a reward function sleeps, an engine and a rank are stopped, the disk is full. Each is named."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))

from oracles import Training

from grpo_rl.telemetry.metrics.metrics_file import read_metrics

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(1800)]
END_S = 900.0
POLICY = "actor_rollout_ref"
SLEEPS = """
import time
from pathlib import Path

def reward(data_source, solution_str, ground_truth, extra_info):
    try:
        Path(__file__).with_suffix(".asked").unlink()
    except FileNotFoundError:
        return 1.0
    time.sleep(20)
    return 1.0
"""


def test_what_each_process_does_is_said_before_a_worker_is_given_up(tmp_path):
    own = tmp_path / "sleeps.py"
    own.write_text(SLEEPS)  # it sleeps in the next call after the test has asked for that
    words = [
        "recipe=arithmetic/grpo",
        "data.train_batch_size=16",
        f"{POLICY}.actor.ppo_mini_batch_size=16",
        f"{POLICY}.rollout.name=hf",
        f"{POLICY}.rollout.nnodes=1",
        f"{POLICY}.rollout.n_gpus_per_node=2",
        f"reward.custom_reward_function.path={own}",
        "reward.custom_reward_function.name=reward",
        "reward.timeout_s=60",
        "trainer.total_training_steps=600",
        "trainer.save_freq=2",
        "trainer.stuck_s=8",
        "trainer.heartbeat_s=2",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.export_at_end=false",
    ]
    run = Training(tmp_path, "stuck", words).start()
    console = run.path / "logs" / "console.log"

    def reports() -> list[str]:
        return re.split(r"(?=stuck\? )", console.read_text() if console.exists() else "")[1:]

    try:
        run.until(lambda status: status["step"] >= 1, END_S)
        own.with_suffix(".asked").touch()
        run.until(lambda status: any("sleeps.py" in one and "in reward" in one for one in reports()), END_S)
        run.until(lambda status: status["step"] >= 3, END_S)
        for name in ("rollout0", "actor0"):
            pid = run.status["workers"][name]
            os.kill(pid, signal.SIGSTOP)
            run.until(lambda status, name=name: any(one.startswith(f"stuck? {name} is given up") for one in reports()), END_S)
            (said,) = [one for one in reports() if one.startswith(f"stuck? {name} is given up")]
            assert f"{name} (pid {pid}): no answer within 2 s, stopped by a signal" in said
            assert "controller (pid " in said and "reward process (pid " in said
            run.until(lambda status, name=name, pid=pid: status["workers"].get(name) not in (pid, None), END_S)
            at = run.status["step"]
            run.until(lambda status, at=at: status["step"] > at + 1, END_S)
        run.process.send_signal(signal.SIGTERM)
        assert run.wait(END_S) == 75, run.describe()
    finally:
        run.end()
    print(console.read_text())


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 96 MiB where the runs will be."""
    disk = tmp_path / "runs"
    disk.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96m", "tmpfs", disk], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.strip()}")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_full_disk_costs_no_step_is_named_once_and_is_used_again_when_there_is_room(tmp_path, small_disk):
    words = [
        "recipe=arithmetic/grpo",
        "data.train_batch_size=16",
        f"{POLICY}.actor.ppo_mini_batch_size=16",
        f"{POLICY}.rollout.name=hf",
        "trainer.total_training_steps=600",
        "trainer.save_freq=2",
        "trainer.max_actor_ckpt_to_keep=1",
        "trainer.on_save_error=continue",
        "trainer.stuck_s=30",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.export_at_end=false",
    ]
    run, filler = Training(tmp_path, "full", words).start(), small_disk / "filler"
    screen = tmp_path / "full.out", tmp_path / "full.err"

    def said() -> str:
        return "".join(file.read_text(errors="replace") for file in screen if file.exists())

    try:
        begun = run.until(lambda status: (status["last_commit"] or 0) >= 2, END_S)
        with filler.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(1 << 16))
            except OSError as error:
                assert error.errno == errno.ENOSPC
        # Nothing is written any more, status.json neither: the screen tells how far the run is.
        run.until(lambda status: "NOT SAVED (2 so far)" in said(), END_S)
        text = " ".join(said().split())
        assert "No space left on device" in text and "Earlier checkpoints are untouched" in text
        assert text.count("metrics.jsonl cannot be written: ") == 1, text
        assert "stuck?" not in text, text
        filler.unlink()
        later = run.until(lambda status: status["last_commit"] > begun["last_commit"], END_S)
        run.until(lambda status: status["step"] > later["step"], END_S)
        run.process.send_signal(signal.SIGTERM)
        assert run.wait(END_S) == 75, run.describe()
    finally:
        run.end()
    steps = [int(row["step"]) for row in read_metrics(run.path / "metrics.jsonl")]
    assert steps == list(range(1, steps[-1] + 1)), "the metrics of no step are lost"
