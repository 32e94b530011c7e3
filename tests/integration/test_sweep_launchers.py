"""Sweeps of real runs on Hydra's launchers: the runs beside each other are those one after the other, bit for bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

WORDS = [
    "actor_rollout_ref.model.path=builtin:arithmetic",
    "data.train_files=task:arithmetic?num_rows=64",
    "actor_rollout_ref.rollout.name=hf",
    "actor_rollout_ref.actor.use_kl_loss=false",
    "trainer.total_training_steps=2",
    "data.train_batch_size=8",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "trainer.export_at_end=false",
    "trainer.device=cpu",
]
LAUNCHERS = {"joblib": "hydra_joblib_launcher", "submitit_local": "hydra_submitit_launcher"}


ROWS = [
    "actor_rollout_ref.model.path=builtin:arithmetic",
    "data.train_files=task:arithmetic?num_rows=64",
    "data.responses=rows",
    "data.response_key=reward_model.ground_truth",
    "actor_rollout_ref.actor.policy_loss.loss_mode=sft",
    "trainer.total_training_steps=3",
    "data.train_batch_size=8",
    "trainer.export_at_end=false",
    "trainer.device=cpu",
]
"""Runs without an engine start in half the time."""


def command(folder: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "grpo_rl.main", "-m", *words, f"trainer.default_local_dir={folder}"]


def trained(run: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run without those that are times or amounts of memory."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = ("actor/", "reward/", "advantage/", "response_length/", "val/", "rollout/tokens")
    return [{key: value for key, value in record.items() if key.startswith(kept)} for record in records]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_launcher_gives_the_metrics_of_the_basic_one(tmp_path: Path, launcher: str) -> None:
    if find_spec("hydra_plugins") is None or find_spec(f"hydra_plugins.{LAUNCHERS[launcher]}") is None:
        pytest.skip(f"hydra/launcher={launcher} is not installed: scripts/setup.sh sweep")
    for name, words in (("basic", ()), (launcher, (f"hydra/launcher={launcher}",))):
        done = subprocess.run(
            command(tmp_path, "seed=1,2", f"trainer.experiment_name={name}", *WORDS, *words),
            cwd=tmp_path, capture_output=True, text=True, timeout=900,
        )  # fmt: skip
        assert done.returncode == 0 and "2/2" in done.stdout, done.stdout + done.stderr
    for seed in ("seed=1", "seed=2"):
        assert trained(tmp_path / "basic" / seed) == trained(tmp_path / launcher / seed)


@pytest.mark.parametrize("goes_on", [False, pytest.param(True, marks=pytest.mark.campaign)])
def test_a_signal_to_a_sweep_saves_the_run_starts_no_other_and_the_same_command_goes_on(tmp_path: Path, goes_on: bool) -> None:
    words = command(tmp_path, "seed=1,2", "trainer.experiment_name=s", *ROWS)
    waits = os.environ | {"GRPO_FAULT": "driver.phase:delay=3@step=2,phase=update_actor"}
    sweep = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=waits)
    metrics = tmp_path / "s/seed=1/metrics.jsonl"
    deadline = time.monotonic() + 240
    while not (metrics.is_file() and metrics.read_text()) and time.monotonic() < deadline:
        time.sleep(0.1)
    sweep.send_signal(signal.SIGTERM)
    out, _ = sweep.communicate(timeout=200)
    assert sweep.returncode == 75, out
    assert "by SIGTERM; the same command goes on" in out and not (tmp_path / "s/seed=2").exists()
    if not goes_on:
        return
    again = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert again.returncode == 0 and "2/2" in again.stdout, again.stdout + again.stderr
