"""The examples of CONTRIBUTING.md (and the loss of README.md) are whole files that work together in one run, and each does what its page says."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from grpo_rl.config.compose import compose
from grpo_rl.config.derived import Machine
from grpo_rl.data.tasks.registry import task_rows
from grpo_rl.plan.make import make_plan

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


def test_the_plan_of_the_command_has_the_formulas_with_their_options(files: Path) -> None:
    command = re.findall(r"python -m grpo_rl\.main (.*?)\n```", PAGE, re.DOTALL)[0].replace("\\\n", " ")
    plan = make_plan(compose([word.strip("'") for word in command.split()]), CPU)
    text = " ".join(plan.render().split())
    assert "A = max(-0.5, min(R - mean(R of group), 0.5))" in text
    assert "pg = -A 0.5 tanh((r - 1) / 0.5)" in text
    assert plan.sizes.total_steps == 3 and plan.schedule.__name__ == "patient"


def test_the_task_makes_each_row_from_its_index_alone(files: Path) -> None:
    rows = task_rows("task:my_task.py:doubling?highest=30&num_rows=40")
    assert list(rows[:10]) == list(task_rows("task:my_task.py:doubling?highest=30&num_rows=10"))
    for row in rows:
        number = int(row["prompt"][0]["content"].partition("+")[0])
        assert 1 <= number <= 30 and row["reward_model"]["ground_truth"] == str(2 * number)


def test_the_test_of_a_loss_passes_as_it_is_printed_and_fails_for_a_loss_without_its_width(files: Path) -> None:
    name, printed, loss = "test_the_width_decides_the_gradient", "test_my_loss.py", Path("my_loss.py").read_text()
    runpy.run_path(printed)[name]()
    Path("plain_loss.py").write_text(loss.replace("width * torch.tanh((ratio_T - 1.0) / width)", "ratio_T"))
    Path("test_plain.py").write_text(Path(printed).read_text().replace("my_loss.py", "plain_loss.py"))
    with pytest.raises(AssertionError):
        runpy.run_path("test_plain.py")[name]()
