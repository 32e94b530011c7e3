"""What a finished run answers when its command is typed again, and what it keeps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_rl.config.relative_paths import function_files
from grpo_rl.errors import ConfigError
from grpo_rl.source_code import digest, user_sources
from grpo_rl.telemetry.finished import contents_changed, contents_of, nothing_left, refuse_rewind, set_aside_after
from grpo_rl.telemetry.rundir import RunDir


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[RunDir]:
    """A run of 30 steps that has ended well."""
    run_dir = RunDir.create(tmp_path, "run")
    run_dir.status_file.write_text(json.dumps({"state": "done", "step": 30, "total": 30}))
    run_dir.metrics_file.write_text("".join(json.dumps({"step": step, "time": 1.0}) + "\n" for step in range(31)))
    run_dir.model.mkdir()
    (run_dir.model / "config.json").write_text("{}")
    for step in (9, 10, 30):
        (run_dir.rollouts / f"step_{step}.jsonl").write_text("{}\n")
    yield run_dir
    run_dir.release()


def test_a_finished_run_has_nothing_left_unless_it_is_to_be_longer_or_its_model_is_missing(run_dir: RunDir) -> None:
    said = nothing_left(run_dir.path, 30, {}, exports=True)
    assert said is not None and "step 30 of 30 is done" in said and str(run_dir.model) in said
    assert nothing_left(run_dir.path, 34, {}, exports=True) is None
    (run_dir.model / "config.json").unlink()
    assert (
        nothing_left(run_dir.path, 30, {}, exports=True) is None
        and nothing_left(run_dir.path, 30, {}, exports=False) is not None
    )
    for state in ("failed", "preempted", "running"):
        run_dir.status_file.write_text(json.dumps({"state": state, "step": 30, "total": 30}))
        assert nothing_left(run_dir.path, 30, {}, exports=False) is None
    assert nothing_left(run_dir.path / "nothing", 30, {}, exports=False) is None


def test_a_function_that_was_changed_since_is_named_with_its_helpers(run_dir: RunDir, tmp_path: Path) -> None:
    reward, helper = tmp_path / "rw.py", tmp_path / "scores.py"
    reward.write_text("import json\nfrom scores import score\n")
    helper.write_text("score = 1\n")
    config = {"reward": {"functions": [f"{reward}:extract"]}}
    functions = digest(user_sources(function_files(config)))
    run_dir.status_file.write_text(json.dumps({"state": "done", "step": 30, "functions": functions}))
    assert not contents_changed(run_dir.path, config)
    helper.write_text("score = 2\n")
    assert contents_changed(run_dir.path, config)
    said = nothing_left(run_dir.path, 30, config, exports=True)
    assert said is not None and "the files of your functions or models have changed since" in said


def test_a_teachers_folder_that_was_changed_since_is_another_one(run_dir: RunDir, tmp_path: Path) -> None:
    teacher = tmp_path / "teacher"
    teacher.mkdir()
    (teacher / "config.json").write_text("{}")
    (teacher / "model.safetensors").write_bytes(b"1" * 100)
    config = {"distillation": {"teacher_models": {"a": {"model_path": str(teacher)}}}}
    run_dir.status_file.write_text(json.dumps({"state": "done", "step": 30} | contents_of(config)))
    assert not contents_changed(run_dir.path, config)
    (teacher / "model.safetensors").write_bytes(b"1" * 99 + b"2")
    assert contents_changed(run_dir.path, config)


def test_a_finished_run_does_not_go_back_to_an_earlier_checkpoint_by_itself(run_dir: RunDir) -> None:
    with pytest.raises(ConfigError, match=r"has ended with step 30, and its newest checkpoint is of step 9: .*resume_path"):
        refuse_rewind(run_dir.path, 9)
    refuse_rewind(run_dir.path, 30)
    run_dir.status_file.write_text(json.dumps({"state": "failed", "step": 30}))
    refuse_rewind(run_dir.path, 9)


def test_what_a_run_made_after_the_step_from_which_it_is_told_to_go_on_moves_aside(run_dir: RunDir) -> None:
    assert set_aside_after(run_dir, 30) is None
    aside = set_aside_after(run_dir, 9)
    assert aside == run_dir.path / "earlier" / "1"
    assert (aside / "model" / "config.json").is_file() and not run_dir.model.exists()
    assert (aside / "metrics.jsonl").read_bytes() == run_dir.metrics_file.read_bytes()
    assert sorted(path.name for path in (aside / "rollouts").iterdir()) == ["step_10.jsonl", "step_30.jsonl"]
    assert [path.name for path in run_dir.rollouts.iterdir()] == ["step_9.jsonl"]


@pytest.mark.parametrize("length", [300, 4000, 100_000])
def test_texts_that_are_no_names_of_files_have_no_contents(length: int) -> None:
    config = {"data": {"chat_template": "x" * length, "train_files": [f"{'y' * length}.py:rows"]}}
    assert contents_of(config) == contents_of({})
