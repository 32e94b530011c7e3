"""Every example runs: the scripts in processes of their own, the cells of the notebooks in their order."""

from __future__ import annotations

import ast
import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from compositions import compose
from test_run_folder import ended, write_run

import grpo_rl
from grpo_rl.config.derived import Machine
from grpo_rl.plan.make import make_plan

EXAMPLES = Path(grpo_rl.__file__).parents[1] / "examples"
ALONE = ["grpo_loss.py", "mcp_tool.py", "own_environment.py", "own_estimator.py", "own_loss.py", "own_reward.py", "own_task.py"]
OF_RUNS = ["read_a_run.py", "plot_runs.py"]
RUNS = ["train_from_python.py", "rl_loop.py", "best_of_n.py", "by_pass_rate.py", "self_correction.py"]
"""The examples that train: tests/integration/test_scripts.py and test_sessions.py run them."""
LOOPS = ["dynamic_sampling.py", "on_policy_distillation.py", "rejection_sampling.py", "two_policies.py"]
"""Those that tests/unit/trainer/test_example_loops.py runs."""
NOTEBOOKS = sorted(path.name for path in EXAMPLES.glob("*.ipynb"))
GAMES = ["answers_in_turns.py", "countdown.py", "grid_world.py", "word_game.py"]
"""The tasks and environments that have a registered name."""
ALONE += GAMES


def run(folder: Path, *command: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(EXAMPLES.parent)}
    done = subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs, written by the program's own writers."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("first", "second"):
        ended(write_run(folder, name))
    return folder


def test_every_file_is_run_by_a_test_and_stands_in_the_table() -> None:
    files = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")}
    assert files == {*ALONE, *OF_RUNS, *RUNS, *LOOPS, *NOTEBOOKS} and len(NOTEBOOKS) >= 2
    rows = [row for row in (EXAMPLES / "README.md").read_text().splitlines() if row.startswith("| [")]
    assert {name for row in rows for name in re.findall(r"\[([\w.]+)\]\(\1\)", row)} == files


EXPECTED = {
    "grpo_loss.py": r"five lines   (0\.\d+)\nthe program  \1\n",
    "mcp_tool.py": r"count_letters: 3; without a letter: failed\n",
    "own_environment.py": r"331: 3 right\nopened 1, reward 1\.0\n",
    "own_estimator.py": r"median   \[-0\.5, -0\.5, 0\.5, 8\.5\]",
    "own_loss.py": r"1\.000    -1\.000\n",
    "own_reward.py": r"'the sum is 55'    \{'score': 0\.5, 'acc': 1\.0",
    "own_task.py": r"(\d+)\+(\d+)= -> (\1|\2)\n",
    "answers_in_turns.py": r"24 -> higher\n52 -> lower\n42 -> right\n",
    "countdown.py": r"(\d+ ){2,3}\d+ -> \d+ by <answer>.*</answer>\n",
    "grid_world.py": r"the shortest way: [nesw]( [nesw]){3,}\n",
    "word_game.py": r"assistant [a-e]{3}\nuser [-+o]{3}\n",
}


@pytest.mark.campaign
@pytest.mark.parametrize("name", ALONE)
def test_an_example_shows_what_it_says(name: str, tmp_path: Path) -> None:
    if name == "mcp_tool.py":
        pytest.importorskip("mcp", reason="a server of MCP is asked by its package, which vLLM brings")
    assert re.search(EXPECTED[name], run(tmp_path, str(EXAMPLES / name)))


def test_a_run_is_read_and_drawn(runs: Path, tmp_path: Path) -> None:
    out = run(tmp_path, str(EXAMPLES / "read_a_run.py"), str(runs / "first"))
    assert "in step 3, 1 of 1 prompts had better and worse responses" in out and "(0): '4+4=' -> '9'" in out
    run(tmp_path, str(EXAMPLES / "plot_runs.py"), str(runs / "first"), str(runs / "second"))
    pictures = ("curves.png", "metrics.png", "compared.png")
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in pictures)


@pytest.mark.campaign
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs_from_top_to_bottom(name: str, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUN", str(runs / "first"))
    content = json.loads((EXAMPLES / name).read_text())
    assert content["nbformat"] == 4 and len({cell["id"] for cell in content["cells"]}) == len(content["cells"])
    cells = ["".join(cell["source"]) for cell in content["cells"] if cell["cell_type"] == "code"]
    # A notebook shows the last value of a cell; here it is printed, so that it is made.
    script = tmp_path / "cells.py"
    script.write_text("\n".join(map(shown, cells)))
    assert run(tmp_path, str(script))
    assert not any(cell.get("outputs") for cell in content["cells"])


def shown(cell: str) -> str:
    """Return a cell that prints the value of its last line, if that is an expression."""
    module = ast.parse(cell)
    last = module.body[-1]
    if isinstance(last, ast.Expr):
        module.body[-1] = ast.Expr(ast.Call(ast.Name("print"), [last.value], []))
    return ast.unparse(ast.fix_missing_locations(module))


COMMANDS = [
    command
    for path in sorted(EXAMPLES.glob("*.py"))
    for command in re.findall(r"python -m grpo_rl\.main (.*?)\n\n|$", (ast.get_docstring(ast.parse(path.read_text())) or "") + "\n\n", re.DOTALL)
    if command
]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS, ids=[command[:70] for command in COMMANDS])
def test_the_command_in_an_example_is_planned(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    words = [word.strip("'") for word in command.replace("\\\n", " ").split()]
    assert make_plan(compose(words), Machine(num_gpus=0, num_cpus=2, device="cpu")).render()


class Planned(Exception):
    """The first verb of a session whose words are good."""


class Verbs:
    def __getattr__(self, name: str) -> None:
        raise Planned


@pytest.mark.parametrize("name", ["rl_loop.py", "two_policies.py"])
def test_the_sessions_of_an_example_are_planned(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def session(*words: str) -> Iterator[Verbs]:
        make_plan(compose(words), Machine(num_gpus=0, num_cpus=2, device="cpu"))
        yield Verbs()

    monkeypatch.setattr(grpo_rl, "session", session, raising=False)
    monkeypatch.setattr(sys, "argv", [name])
    with pytest.raises(Planned):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_the_training_is_planned_with_the_functions_of_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    sys.path.insert(0, str(EXAMPLES))
    import train_from_python

    given: list[str] = []
    monkeypatch.setattr(grpo_rl, "train", given.extend, raising=False)
    train_from_python.train("trainer.test_freq=5")
    text = " ".join(make_plan(compose(given), Machine(num_gpus=0, num_cpus=2, device="cpu")).render().split())
    assert "A = 1 (R - median(R of group))" in text and "pg = -A 0.3 tanh((r - 1) / 0.3)" in text
