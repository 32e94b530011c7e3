"""Names of models and runs: folders, steps, names below runs/, and what is said if there is nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_folders import make_run

import grpo_rl
from grpo_rl.__main__ import main
from grpo_rl.commands.targets import Target, find_target
from grpo_rl.errors import CheckpointError, ConfigError, DataError


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return make_run(tmp_path / "runs" / "grpo_rl", "first")


def model_in(folder: Path) -> str:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return str(folder)


def checkpoint(run: Path, step: int) -> None:
    (run / "checkpoints" / f"step_{step}").mkdir()
    (run / "checkpoints" / f"step_{step}" / "manifest.json").write_text("{}")


def test_a_run_is_its_exported_model_and_before_that_its_newest_checkpoint(run: Path) -> None:
    with pytest.raises(DataError, match="no exported model and no checkpoint yet"):
        find_target(str(run))
    checkpoint(run, 2)
    checkpoint(run, 10)
    assert find_target(str(run)) == Target(f"{run}@10", "", run, 10)
    model = model_in(run / "model")
    assert find_target(str(run)) == Target(str(run), model, run)


def test_a_step_names_a_checkpoint(run: Path) -> None:
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        find_target(f"{run}@4")
    checkpoint(run, 4)
    found = find_target(f"{run}@4")
    assert (found.run, found.step, found.export_folder) == (run, 4, run / "exports" / "step_4")
    assert find_target(f"{run}@last").step == 4
    assert find_target(f"{run}@start").model == "builtin:arithmetic"
    with pytest.raises(CheckpointError, match="no checkpoint of step 5; there are 4"):
        find_target(f"{run}@5")


def test_every_command_that_looks_at_a_run_takes_its_name(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["doctor"], ["page"], ["watch", "--once"]):
        code = main([words[0], "first", *words[1:]])
        assert "is no run" not in capsys.readouterr().err and code != 70
        assert main([words[0], "frist", *words[1:]]) == 2
        assert "'frist' is no run (a folder with config.yaml, or its name). Did you mean first?" in capsys.readouterr().err
    assert grpo_rl.Run("first").path.resolve() == run.resolve()
    with pytest.raises(DataError, match="Did you mean first"):
        grpo_rl.Run("frist")


def test_models_without_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = model_in(tmp_path / "m")
    assert find_target("m") == Target("m", "m") and find_target(folder).model == folder
    assert find_target("builtin:arithmetic").model == "builtin:arithmetic"
    assert find_target("owner/name").model == "owner/name"
    for wrong in ("../nothing", "nothing", "", "nothing@3"):
        with pytest.raises(ConfigError, match="is no run"):
            find_target(wrong)
