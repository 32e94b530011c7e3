"""The examples of CONTRIBUTING.md (and the loss of README.md) are whole files that work together in one run, and each does what its page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from grpo_rl.algos.advantages.contract import AdvantageInput, token_rewards
from grpo_rl.algos.advantages.registered import ADVANTAGES
from grpo_rl.config.compose import compose
from grpo_rl.config.derived import Machine
from grpo_rl.data.tasks.registry import task_rows
from grpo_rl.plan.make import make_plan
from grpo_rl.registry import load_function
from grpo_rl.trainer.sync import SyncSchedule

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
CPU = Machine(num_gpus=0, num_cpus=2, device="cpu")


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The examples in a folder, which is the current one."""
    for name, code in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE + (ROOT / "README.md").read_text(), re.DOTALL):
        (tmp_path / name).write_text(code)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_page_has_an_example_of_every_kind(files: Path) -> None:
    assert {file.stem for file in files.iterdir()} == {"my_estimator", "my_loss", "my_reward", "my_task", "my_schedule"}


def test_the_plan_of_the_command_has_the_formulas_with_their_options(files: Path) -> None:
    command = re.findall(r"python -m grpo_rl\.main (.*?)\n```", PAGE, re.DOTALL)[0].replace("\\\n", " ")
    plan = make_plan(compose([word.strip("'") for word in command.split()]), CPU)
    text = " ".join(plan.render().split())
    assert "A = max(-0.5, min(R - mean(R of group), 0.5))" in text
    assert "pg = -A 0.5 tanh((r - 1) / 0.5)" in text
    assert plan.sizes.total_steps == 3 and plan.schedule.__name__ == "Patient"


def test_the_estimator_bounds_the_distance_to_the_mean(files: Path) -> None:
    lengths_N, group_N, rewards_N = torch.tensor([2, 1, 1]), torch.tensor([0, 0, 0]), torch.tensor([3.0, 0.0, 0.0])
    given = AdvantageInput(token_rewards(rewards_N, lengths_N), lengths_N, group_N, rewards_N)
    advantages_T = ADVANTAGES.get("my_estimator.py:bounded")(given, bound=1.5).advantages_T
    assert advantages_T.tolist() == [1.5, 1.5, -1.0, -1.0]


def test_the_task_makes_each_row_from_its_index_alone(files: Path) -> None:
    rows = task_rows("task:my_task.py:doubling?highest=30&num_rows=40")
    assert list(rows[:10]) == list(task_rows("task:my_task.py:doubling?highest=30&num_rows=10"))
    for row in rows:
        number = int(row["prompt"][0]["content"].partition("+")[0])
        assert 1 <= number <= 30 and row["reward_model"]["ground_truth"] == str(2 * number)


def test_the_reward_takes_half_a_point_off_a_long_response(files: Path) -> None:
    brief = load_function("my_reward.py:brief")
    assert brief("", "it is 8", "8", limit=10) == {"score": 1.0, "acc": 1.0}
    assert brief("", "after long thought 8", "8", limit=10) == {"score": 0.5, "acc": 1.0}
    assert brief("", "9", "8") == {"score": 0.0, "acc": 0.0}


def test_the_schedule_ends_with_a_batch_of_high_reward(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = (patient := load_function("my_schedule.py:Patient")).__new__(patient)
    rewards = iter([0.5, 0.95])
    monkeypatch.setattr(SyncSchedule, "step", lambda self: {"reward/mean": next(rewards)})
    monkeypatch.setattr(SyncSchedule, "ended", lambda self: None)
    ended = []
    for _ in range(2):
        schedule.step()
        ended.append(schedule.ended())
    assert ended == [None, "the mean reward is 0.9"]
