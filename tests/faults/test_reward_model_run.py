"""Whole trainings of a reward model that are killed: the run that goes on ends with the same bits, and its export scores alike."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from grpo_rl.config.schema.tree import DataConfig
from grpo_rl.data.prompts import Renderer
from grpo_rl.data.tasks.rated_sums import rated_sums
from grpo_rl.data.training_rows.rated_steps import rated_row, tokenized_steps
from grpo_rl.models import builtin
from grpo_rl.models.heads import ScoreModel, load_score_config, load_scorer, scored_sequences
from grpo_rl.models.load import load_tokenizer
from grpo_rl.telemetry.metrics.metrics_file import read_metrics

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(900)]
RUN_S = 280
KINDS = {
    "pairs": [
        "recipe=paradigm/reward_model",
        "data.train_files=task:arithmetic?carrying=1&forgotten_carries=1&num_rows=64",
        "data.val_files=task:arithmetic?carrying=1&forgotten_carries=1&split=val&num_rows=32",
    ],
    "steps": [
        "recipe=paradigm/process_reward_model",
        "data.train_files=task:rated_sums?num_rows=64",
        "data.val_files=task:rated_sums?split=val&num_rows=32",
    ],
}


def start(folder: Path, model: Path, name: str, kind: str, fault: str = "") -> subprocess.CompletedProcess[str]:
    words = [
        *KINDS[kind],
        f"reward.reward_model.model_path={model}",
        f"trainer.default_local_dir={folder}",
        f"trainer.experiment_name={name}",
        "trainer.logger=[console]",
        "data.train_batch_size=8",
        "trainer.total_training_steps=5",
        "trainer.test_freq=2",
        "trainer.save_freq=2",
        "trainer.n_gpus_per_node=2",
    ]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0", "GRPO_FAULT": fault}
    command = [sys.executable, "-m", "grpo_rl.main", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=RUN_S)


def digest(run: Path) -> str:
    return hashlib.sha256((run / "reward_model" / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_training_goes_on_to_the_same_bits(tmp_path, kind):
    model = builtin.build("builtin:arithmetic", tmp_path / "random")
    whole = start(tmp_path, model, "whole", kind)
    assert whole.returncode == 0, whole.stdout + whole.stderr
    # Checkpoints are committed beside the steps: that of step 2 is complete for certain once the one of step 4 has begun.
    killed = start(tmp_path, model, "killed", kind, "driver.step:kill9@step=5")
    assert killed.returncode != 0 and not (tmp_path / "killed" / "reward_model").exists()
    resumed = start(tmp_path, model, "killed", kind)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "resumed from" in resumed.stdout
    assert digest(tmp_path / "whole") == digest(tmp_path / "killed")
    rows = read_metrics(tmp_path / "whole" / "metrics.jsonl")
    losses = [row["reward_model/loss"] for row in rows if "reward_model/loss" in row]
    again = [
        row["reward_model/loss"] for row in read_metrics(tmp_path / "killed" / "metrics.jsonl") if "reward_model/loss" in row
    ]
    assert len(losses) == 5 and losses == again
    assert {"val/loss", "val/accuracy", "val/auc", "val/calibration_error", "val/brier"} <= {key for row in rows for key in row}
    assert_scores_alike(tmp_path / "whole", kind)


def assert_scores_alike(run: Path, kind: str) -> None:
    """The exported folder is one that reward.reward_model.model_path takes, with the scores of the last validation."""
    folder = str(run / "reward_model")
    model, tokenizer = ScoreModel(load_scorer(folder, load_score_config(folder))), load_tokenizer(folder)
    model.eval()
    if kind == "pairs":
        return
    row = rated_sums(split="val", num_rows=1)[0]
    steps = tokenized_steps(rated_row(row, "", DataConfig()), Renderer(DataConfig(), tokenizer), "\n", "")
    ids, positions = torch.tensor(steps.token_ids.tolist()), torch.tensor(steps.positions.tolist())
    with torch.no_grad():
        scores = model(scored_sequences(ids, torch.tensor([len(ids)]), positions, torch.device("cpu")))
    lines = (run / "val" / "scores_step_5.jsonl").read_text().splitlines()[: len(positions)]
    written = torch.tensor([json.loads(line)["score"] for line in lines])
    torch.testing.assert_close(scores, written, atol=1e-5, rtol=0)
