"""The tutorial's own task and reward, run as they are written there: they learn, the doctor finds nothing, and all is left behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from whole_runs import RUN_TIMEOUT_S, Run, assert_group_advantages, assert_trains_like_its_engine

import grpo_rl
from grpo_rl.models import builtin
from grpo_rl.telemetry.metrics.metrics_file import read_metrics

TUTORIAL = Path(grpo_rl.__file__).parents[1] / "docs" / "tutorial.md"
STEPS, SAMPLES = 15, 8
pytestmark = pytest.mark.timeout(RUN_TIMEOUT_S)


def run_part(folder: Path, part: int, name: str) -> Run:
    """The command of this part, beside the files that the tutorial lets its reader write."""
    text = TUTORIAL.read_text()
    for file, code in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", text, re.DOTALL):
        (folder / file).write_text(code)
    (lines,) = re.findall(rf"\n## {part}\..*?```bash\n(.*?)```", text, re.DOTALL)
    lines = lines.replace(" trainer.dry_run=true", "").replace("python ", f"{sys.executable} ")
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": f"{TUTORIAL.parents[1]}"}
    done = subprocess.run(
        ["bash", "-ec", lines], cwd=folder, env=environment, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return Run(folder / "runs" / "grpo_rl" / name, done.stdout)


def assert_learnt(run: Run) -> None:
    report = (run.path / "report.txt").read_text()
    (before, after) = re.findall(r"validation plus_nine/mean@1 +([\d.]+) +([\d.]+)", report)[0]
    assert float(after) > float(before) + 0.3
    assert "Nothing is wrong with this run" in report


@pytest.fixture(scope="module")
def plus_nine(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_part(tmp_path_factory.mktemp("tutorial"), 4, "plus-nine")


def test_the_tutorials_own_task_learns_as_it_is_written(plus_nine: Run) -> None:
    assert_learnt(plus_nine)


@pytest.mark.campaign
def test_the_tutorials_own_reward_learns_as_it_is_written(tmp_path: Path) -> None:
    assert_learnt(run_part(tmp_path, 5, "near"))


def test_the_policy_that_is_updated_is_the_one_that_sampled(plus_nine: Run) -> None:
    assert_trains_like_its_engine(plus_nine, last=STEPS)
    for row in plus_nine.steps.values():
        # One update per batch.
        assert row["actor/ratio_max"] == 1.0 and row["actor/ppo_kl"] == 0.0 and row["actor/pg_clipfrac"] == 0.0
    assert plus_nine.steps[1]["actor/kl_loss"] == pytest.approx(0.0, abs=1e-6)
    assert plus_nine.steps[2]["actor/kl_loss"] > 1e-6
    assert_group_advantages(plus_nine.rollouts(1), SAMPLES)
    assert all(set(record["reward_parts"]) >= {"exact_match"} for record in plus_nine.rollouts(2))
    shown = [record for record in plus_nine.rollouts(2) if "token_ids" in record]
    assert len(shown) == 2 * SAMPLES, "two groups"


def test_the_plain_command_leaves_everything_behind(plus_nine: Run) -> None:
    tokenizer = AutoTokenizer.from_pretrained(plus_nine.path / "model")
    trained = AutoModelForCausalLM.from_pretrained(plus_nine.path / "model", dtype=torch.float32)
    warm = builtin.cache_folder("builtin:arithmetic")
    before = AutoModelForCausalLM.from_pretrained(warm, dtype=torch.float32).state_dict()
    assert all(not torch.equal(value, before[name]) for name, value in trained.state_dict().items())
    ids = tokenizer("1+1=", return_tensors="pt").input_ids
    assert trained.generate(ids, max_new_tokens=2, do_sample=False).shape[1] > ids.shape[1]

    validated = [row["step"] for row in read_metrics(plus_nine.path / "metrics.jsonl") if "val/plus_nine/mean@1" in row]
    assert validated == [0, 10, STEPS]
    expected = ["config.yaml", "overrides.txt", "plots/curves.png", "report.txt", "page.html"]
    expected += [f"val/step_{step}.jsonl" for step in validated]
    assert [name for name in expected if not (plus_nine.path / name).is_file()] == []
    workers = {"actor0.log", "reference0.log", "rollout0.log", "functions0.log", "reward-0.log"}
    assert {log.name for log in plus_nine.path.glob("logs/*.log")} == {"console.log", "ray.log"} | workers
