"""`grpo_rl.Run`: a run is read from the files that the program's own writers make."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import grpo_rl
from grpo_rl.config.compose import compose
from grpo_rl.errors import ConfigError, DataError, Preempted
from grpo_rl.telemetry.metrics.metrics_file import MetricsFile
from grpo_rl.telemetry.report import final_report
from grpo_rl.telemetry.rollout_log import RolloutLog
from grpo_rl.telemetry.rundir import RunDir
from grpo_rl.telemetry.status import Status
from grpo_rl.types import Prompt, Rollout


def write_run(base: Path, name: str = "r", words: Sequence[str] = (), rewards: Sequence[float] = (0.25, 0.5, 0.75)) -> RunDir:
    """Write the folder of a run with one step per reward, which is still running."""
    run_dir = RunDir.create(base, name)
    composed = compose(
        ["recipe=arithmetic/grpo", f"trainer.default_local_dir={base}", f"trainer.experiment_name={name}", *words]
    )
    run_dir.write_config(composed.yaml(), composed.overrides)
    file, log = MetricsFile(run_dir.metrics_file), RolloutLog(run_dir)
    file.log(0, {"val/sums/mean@1": 0.1, "val/sums/response_length": 4.0})
    log.write("val", 0, [_rollout("v-1", 0, "9", 0.0)])
    for step, reward in enumerate(rewards, start=1):
        file.log(step, {"reward/mean": reward, "actor/kl_loss": math.nan, "timing_s/step": 1.5, "response_length/mean": 1.0})
        log.write("rollouts", step, [_rollout("t-1", 0, "8", 1.0), _rollout("t-1", 1, "9", 0.0)], [0.5, None])
    log.flush()
    file.close()
    return run_dir


def _rollout(uid: str, sample: int, text: str, reward: float) -> Rollout:
    prompt = Prompt(uid, (1, 2, 3), "4+4=", "sums", "8")
    return Rollout(prompt, sample, (4,), (-0.5,), "stop", ((0, 1),), text, reward, {"auto": reward})


def ended(run_dir: RunDir, error: BaseException | None = None) -> None:
    status = Status(run_dir.status_file)
    status.update(step=3, total=3)
    status.end(error)


def test_the_package_loads_nothing_before_a_name_is_used() -> None:
    program = "import sys, grpo_rl; print(len([m for m in sys.modules if m.startswith('grpo_rl.')]), grpo_rl.Run.__name__)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=240)
    assert done.stdout.split() == ["0", "Run"]
    assert {"Run", "train"} <= set(dir(grpo_rl))
    with pytest.raises(AttributeError, match="no attribute 'tran'"):
        _ = grpo_rl.tran  # type: ignore[attr-defined]


def test_metrics_are_a_frame_with_a_row_per_step_and_a_wrong_name_is_refused_with_the_nearest(tmp_path: Path) -> None:
    run = grpo_rl.Run(write_run(tmp_path).path)
    frame = run.metrics()
    assert list(frame.index) == [0, 1, 2, 3] and frame.index.name == "step"
    assert list(frame["reward/mean"][1:]) == [0.25, 0.5, 0.75] and math.isnan(frame["reward/mean"][0])
    assert frame["actor/kl_loss"].isna().all() and str(frame["time"].dtype).endswith("UTC]")
    assert list(run.metrics("timing_s/step", "reward/mean").columns) == ["timing_s/step", "reward/mean"]
    with pytest.raises(DataError, match=r"no step has a metric 'reward/men'\. Did you mean reward/mean"):
        run.metrics("reward/men")


def test_rollouts_are_a_frame_with_a_column_per_part_of_the_reward(tmp_path: Path) -> None:
    run = grpo_rl.Run(write_run(tmp_path).path)
    assert (run.rollout_steps(), run.rollout_steps(val=True)) == ([1, 2, 3], [0])
    frame = run.rollouts(2)
    assert list(frame["response"]) == ["8", "9"] and list(frame["reward/auto"]) == [1.0, 0.0]
    assert frame.groupby("uid")["reward"].mean().to_dict() == {"t-1": 0.5}
    assert list(run.rollouts(val=True)["response"]) == ["9"]
    with pytest.raises(DataError, match="there is no step 7; there are 1, 2, 3"):
        run.rollouts(7)


def test_the_configuration_is_nested_and_a_wrong_key_is_refused_with_the_nearest(tmp_path: Path) -> None:
    run = grpo_rl.Run(write_run(tmp_path, words=["trainer.seed=7"]).path)
    assert run.config["trainer"]["seed"] == run.setting("trainer.seed") == 7
    assert run.overrides[0] == "recipe=arithmetic/grpo" and "trainer.seed=7" in run.overrides
    with pytest.raises(ConfigError, match=r"trainer\.sed.*trainer\.seed"):
        run.setting("trainer.sed")


def test_the_state_says_how_a_run_ended_and_finds_one_whose_process_is_gone(tmp_path: Path) -> None:
    assert grpo_rl.Run(write_run(tmp_path, "a").path).state == "unknown"
    for name, error, state in (
        ("b", None, "done"),
        ("c", DataError("bad row"), "failed"),
        ("d", Preempted("by SIGTERM"), "preempted"),
    ):
        run_dir = write_run(tmp_path, name)
        ended(run_dir, error)
        assert grpo_rl.Run(run_dir.path).state == state
    run_dir = write_run(tmp_path, "e")
    program = f"from pathlib import Path; from grpo_rl.telemetry.status import Status; import os, time\ns = Status(Path({str(run_dir.status_file)!r}))\nwhile not s.path.exists(): time.sleep(0.01)\nos._exit(9)"
    subprocess.run([sys.executable, "-c", program], timeout=240)
    assert grpo_rl.Run(run_dir.path).state == "lost"
    (run_dir.status_file).write_text(run_dir.status_file.read_text().replace('"pid": ', f'"pid": {os.getpid()}, "was": '))
    run = grpo_rl.Run(run_dir.path)
    assert run.state == "running" and "running, step 0" in repr(run)


def test_checkpoints_are_those_that_were_committed(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path)
    for name in ("step_2", "step_10", ".writing_step_12_0123abcd", "step_11"):
        (run_dir.checkpoints / name).mkdir()
    for name in ("step_2", "step_10", ".writing_step_12_0123abcd"):
        (run_dir.checkpoints / name / "manifest.json").write_text("{}")
    assert grpo_rl.Run(run_dir.path).checkpoints == {2: run_dir.checkpoints / "step_2", 10: run_dir.checkpoints / "step_10"}


def test_the_report_is_that_of_the_end_or_made_now_and_nothing_is_written(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path)
    run = grpo_rl.Run(run_dir.path)
    assert "training reward" in run.report and not run_dir.report_file.exists()
    final_report(run_dir, seconds=61)
    ended(run_dir)
    assert "Finished in" in run.report
    assert "step" in run.doctor()


def test_a_plot_has_the_curves_or_a_panel_per_metric(tmp_path: Path) -> None:
    run = grpo_rl.Run(write_run(tmp_path).path)
    assert [axes.get_title(loc="left") for axes in run.plot().axes][:1] == ["Reward and validation"]
    figure = run.plot("reward/mean", "timing_s/step", "val/sums/mean@1", "actor/kl_loss")
    assert [axes.get_title(loc="left") for axes in figure.axes][:2] == ["reward/mean", "timing_s/step"]
    assert list(figure.axes[0].lines[0].get_ydata()) == [0.25, 0.5, 0.75]
    figure.savefig(tmp_path / "x.png")
    with pytest.raises(DataError, match="no step has a metric 'nothing'"):
        run.plot("nothing")


@pytest.mark.parametrize("folder", ["missing", "."])
def test_a_folder_without_a_run_is_refused(tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path, "mine")
    monkeypatch.chdir(tmp_path)
    hint: Any = {"missing": "'missing' is no run", ".": "The runs below it are mine"}[folder]
    with pytest.raises(DataError, match=hint):
        grpo_rl.Run(folder)
