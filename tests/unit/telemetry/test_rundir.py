from pathlib import Path

import pytest

from grpo_rl.errors import ConfigError
from grpo_rl.telemetry.rundir import RunDir


def test_runs_without_a_name_never_share_a_folder(tmp_path: Path) -> None:
    paths = {RunDir.create(tmp_path).path for _ in range(20)}
    assert len(paths) == 20
    assert all(path.parent == tmp_path for path in paths)


@pytest.mark.parametrize(
    "name", ["..", "../x", "a/../../x", "/tmp/x", "a\0b", "", " ", ".", "a/./b", "a\nb", "\x1b[31m", "x" * 300]
)
def test_a_name_that_leaves_the_base_folder_or_is_no_name_is_refused(tmp_path: Path, name: str) -> None:
    base = tmp_path / "base"
    with pytest.raises(ConfigError, match="experiment_name"):
        RunDir.create(base, name)
    assert not base.exists()


def test_a_link_that_leads_out_of_the_base_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="elsewhere"):
        RunDir.create(tmp_path / "base", "link/run")


def test_starting_fresh_moves_everything_of_the_earlier_run_aside(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path, "named")
    assert run_dir.start_fresh() is None
    for attempt in (1, 2):
        run_dir.metrics_file.write_text(f"metrics of {attempt}")
        (run_dir.rollouts / "step_1.jsonl").write_text(f"rollouts of {attempt}")
        aside = run_dir.start_fresh()
        assert aside == run_dir.path / "earlier" / str(attempt)
        assert not run_dir.metrics_file.exists()
        assert list(run_dir.rollouts.iterdir()) == []
    assert (run_dir.path / "earlier/1/metrics.jsonl").read_text() == "metrics of 1"
    assert (run_dir.path / "earlier/2/rollouts/step_1.jsonl").read_text() == "rollouts of 2"


def test_a_changed_configuration_does_not_replace_the_one_before_a_resume(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path, "named")
    for learning_rate in (1, 1, 2, 3):
        run_dir.write_config(f"lr: {learning_rate}\n", [f"lr={learning_rate}"])
    texts = {path.name: path.read_text() for path in run_dir.path.iterdir() if path.suffix in (".yaml", ".txt")}
    assert texts == {
        "config.yaml": "lr: 3\n",
        "config.1.yaml": "lr: 1\n",
        "config.2.yaml": "lr: 2\n",
        "overrides.txt": "lr=3\n",
        "overrides.1.txt": "lr=1\n",
        "overrides.2.txt": "lr=2\n",
    }


def test_what_differs_from_the_last_start_is_listed_by_key(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path, "named")
    assert run_dir.changes("lr: 1\n") == [], "there was no start before"
    run_dir.write_config("lr: 1.0e-06\ntrainer:\n  steps: 4\n  name: null\nfiles:\n- a\nold: 1\n", [])
    now = "lr: 2.0e-06\ntrainer:\n  steps: 4\n  name: x\nfiles:\n- a\n- b\nnew: true\n"
    assert run_dir.changes(now) == [
        "lr: 1e-06 -> 2e-06",
        "trainer.name: null -> x",
        "files: [a] -> [a,b]",
        "old: 1 -> not set",
        "new: not set -> true",
    ]
    assert run_dir.changes((run_dir.path / "config.yaml").read_text()) == []
