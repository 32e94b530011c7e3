"""The command: what it prints, how it ends, and that a mistake never shows a traceback."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_rl.errors import CheckpointError, ClusterError, DataError, Preempted
from grpo_rl.main import main
from grpo_rl.models.builtin import build

DRY_RUN = ["trainer.dry_run=true", "trainer.device=cpu"]


def test_a_dry_run_prints_the_plan_and_ends_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(DRY_RUN) == 0
    out, err = capsys.readouterr()
    assert out.startswith("plan: recipe arithmetic/grpo") and "optimizer step" in out and err == ""


def test_a_dry_run_finds_what_a_start_would_in_tokenizer_data_and_rewards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = build("builtin:arithmetic", tmp_path / "model")
    words = [
        *DRY_RUN,
        "recipe=arithmetic/grpo",
        f"actor_rollout_ref.model.path={folder}",
        f"trainer.default_local_dir={tmp_path}/runs",
    ]
    rows = [{"data_source": "arithmetic", "prompt": f"{n}+1=", "reward_model": {"ground_truth": f"{n + 1}"}} for n in range(64)]
    (tmp_path / "plain.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main([*words, f"data.train_files={tmp_path}/plain.jsonl"]) == 0
    assert "8 of 8 are plain strings" in capsys.readouterr().out
    (tmp_path / "mine.py").write_text("import nothing_of_this_name\n")
    assert main([*words, f"reward.functions=[{tmp_path}/mine.py:mine]"]) == 2
    assert "No module named 'nothing_of_this_name'" in capsys.readouterr().err
    (folder / "chat_template.jinja").unlink()
    assert main(words) == 3
    assert "the tokenizer has no chat template" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_mistakes_are_listed_one_per_line_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trainer.save_frq=1", "trainer.test_freq=1.5"]) == 2
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == "" and len(lines) == 3 and "2 problems" in lines[0]
    assert lines[1].startswith("  • trainer.save_frq") and lines[2].startswith("  • trainer.test_freq=1.5")


def test_cfg_prints_a_recipe_that_can_be_given_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--cfg", "job", "trainer.seed=77"]) == 0
    text = capsys.readouterr().out
    assert "seed: 77" in text
    (tmp_path / "again.yaml").write_text(text)
    assert main(["--cfg", f"recipe={tmp_path / 'again.yaml'}"]) == 0
    assert capsys.readouterr().out == text


LOST = ClusterError(
    "actor.update failed on actor1: the process died (killed)\n  log: /run/logs/actor1.log\n  | Traceback\n  | boom"
)
LOST.where = "step 3, update_actor"
LOST.add_note("log: /run/logs/error.log")


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (DataError("bad row 3"), 3, "error: bad row 3\n"),
        (CheckpointError("half a file"), 4, "error: half a file\n"),
        (
            LOST,  # with its logs, and without the traceback
            6,
            "error: step 3, update_actor: actor.update failed on actor1: the process died (killed)\n"
            "  log: /run/logs/actor1.log\n  log: /run/logs/error.log\n",
        ),
        (Preempted("by SIGTERM: step 2 of 4 is saved"), 75, "stopped: by SIGTERM: step 2 of 4 is saved\n"),
        (KeyboardInterrupt(), 130, "\ninterrupted\n"),
        (
            PermissionError(13, "Permission denied", "/m/config.json"),
            2,
            "this configuration cannot be run, 1 problem:\n  • /m/config.json: Permission denied\n",
        ),
    ],
)
def test_every_kind_of_end_has_its_exit_code_and_its_line(
    error: BaseException, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ends_with(error, monkeypatch) == code
    assert capsys.readouterr().err == said


def test_an_error_of_ours_is_one_line_and_a_file(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert ends_with(ZeroDivisionError("by nought"), monkeypatch) == 70
    first, second = capsys.readouterr().err.splitlines()
    assert first == "unexpected ZeroDivisionError: by nought"
    file = Path(second.rpartition(" ")[2])
    assert "ZeroDivisionError: by nought" in file.read_text()
    file.unlink()


def test_a_fault_that_cannot_be_armed_is_refused_like_a_key(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GRPO_FAULT", "nowhere:raise")
    assert main(DRY_RUN) == 2
    assert "no fault point 'nowhere'" in capsys.readouterr().err


def ends_with(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit code when planning ends with `error`."""

    def fail(composed: object) -> None:
        raise error

    monkeypatch.setattr("grpo_rl.plan.make.make_plan", fail)
    return main([])


def test_the_command_runs_from_any_folder_and_refuses_a_misspelt_key_without_loading_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from grpo_rl.main import main; code = main(['trainer.save_frq=1', 'trainer.device=cpu']); "
        "print(code, sorted({'torch', 'ray', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout.strip() == "2 []"
    assert "trainer.save_frq: unknown key. Did you mean trainer.save_freq" in done.stderr


@pytest.mark.parametrize(
    ("words", "redirection", "code"),
    [
        ("--help", "| true", 0),
        ("--version", ">&-", 0),
        ("--cfg job", "> /dev/full", 0),
        ("trainer.save_frq=1", "2>&1 | true", 2),
    ],
)
def test_output_that_nobody_can_read_changes_no_exit_code(words: str, redirection: str, code: int) -> None:
    command = f"{sys.executable} -m grpo_rl.main {words} {redirection}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert done.returncode == code and "Exception" not in done.stderr and "BrokenPipe" not in done.stderr
