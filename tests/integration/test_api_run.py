"""A whole training from Python: the example that trains, with the functions of one's own in its folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import grpo_rl

pytestmark = pytest.mark.campaign

EXAMPLE = Path(grpo_rl.__file__).parents[1] / "examples" / "train_from_python.py"


def test_the_example_trains_and_reads_its_run(tmp_path: Path) -> None:
    pytest.importorskip("pandas", reason="pandas is not installed: the extra `frames`")
    command = [
        sys.executable,
        str(EXAMPLE),
        "trainer.total_training_steps=3",
        "trainer.test_freq=-1",
        "trainer.logger=[console]",
    ]
    environment = os.environ | {"PYTHONPATH": str(EXAMPLE.parents[1]), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stdout + done.stderr
    run = grpo_rl.Run(tmp_path / "runs" / "grpo_rl" / "from-python")
    assert "Finished in" in done.stdout and f"model: {run.model.relative_to(tmp_path)}" in done.stdout
    assert run.state == "done" and list(run.metrics("reward/terse/needless").dropna().index) == [1, 2, 3]
    assert run.rollouts(3).groupby("uid")["advantage"].median().abs().max() == 0
