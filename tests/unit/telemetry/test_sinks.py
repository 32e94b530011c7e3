import importlib.util
import math
import shlex
import threading
import tomllib
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from grpo_rl.config.checks.input_rules import INSTALL
from grpo_rl.config.schema.tree import TrainerConfig
from grpo_rl.errors import ConfigError
from grpo_rl.telemetry.metrics.metrics_file import read_metrics
from grpo_rl.telemetry.metrics.sinks import Sinks
from grpo_rl.telemetry.rundir import RunDir

ROOT = Path(__file__).resolve().parents[3]


def tensorboard_points(folder: Path, tag: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_metrics_reach_the_file_and_tensorboard(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path, "r")
    sinks = Sinks(run_dir, TrainerConfig(), {})
    sinks.log(0, {"val/a/mean@1": 0.25, "val/a/response_length": 3.0})
    sinks.log(1, {"reward/mean": 0.5, "actor/kl_loss": math.nan})
    sinks.close()
    assert [record["step"] for record in read_metrics(run_dir.metrics_file)] == [0, 1]
    assert tensorboard_points(run_dir.tensorboard, "critic/score/mean") == [(1, 0.5)]
    assert tensorboard_points(run_dir.tensorboard, "val-core/a/acc/mean@1") == [(0, 0.25)]


def test_without_tensorboard_its_folder_stays_empty(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path, "r")
    sinks = Sinks(run_dir, TrainerConfig(logger=["console"]), {})
    sinks.log(1, {"reward/mean": 0.5})
    sinks.close()
    assert list(run_dir.tensorboard.iterdir()) == []
    assert len(read_metrics(run_dir.metrics_file)) == 1


def test_a_resumed_run_shows_one_curve_everywhere(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path, "r")
    sinks = Sinks(run_dir, TrainerConfig(), {})
    for step in (1, 2, 3):
        sinks.log(step, {"a": float(step)})
    sinks.close()
    resumed = Sinks(run_dir, TrainerConfig(), {})
    resumed.truncate_after(1)
    resumed.log(2, {"a": 20.0})
    resumed.close()
    assert [(record["step"], record["a"]) for record in read_metrics(run_dir.metrics_file)] == [(1, 1.0), (2, 20.0)]
    assert tensorboard_points(run_dir.tensorboard, "a") == [(1, 1.0), (2, 20.0)]


def test_what_tensorboard_had_not_written_when_the_process_was_killed_comes_from_the_file(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path, "r")
    sinks = Sinks(run_dir, TrainerConfig(logger=["console"]), {})
    sinks.log(1, {"a": 1.0})
    sinks.log(2, {"a": 2.0})
    sinks.flush()
    resumed = Sinks(run_dir, TrainerConfig(), {})
    resumed.truncate_after(2)
    resumed.log(3, {"a": 3.0})
    resumed.close()
    assert tensorboard_points(run_dir.tensorboard, "a") == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_a_disk_on_which_tensorboard_hangs_costs_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    monkeypatch.setattr(EventFileWriter, "add_event", lambda self, event: gate.wait(30))
    run_dir = RunDir.create(tmp_path, "r")
    sinks = Sinks(run_dir, TrainerConfig(), {})

    def run() -> None:
        for step in range(50):
            sinks.log(step, {"a": 1.0})

    training = threading.Thread(target=run, daemon=True)
    training.start()
    training.join(10)
    assert not training.is_alive()
    assert len(read_metrics(run_dir.metrics_file)) == 50
    gate.set()
    sinks.close()


@pytest.mark.parametrize("package", ["wandb", "mlflow"])
def test_a_logger_that_is_not_installed_is_refused_at_the_start(
    tmp_path: Path, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    trainer = TrainerConfig(logger=["console", package])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match=f"python -m pip install {package}"):
        Sinks(RunDir.create(tmp_path, "r"), trainer, {})


def test_the_commands_that_install_a_tracker_have_the_versions_of_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    words = {name: shlex.split(command)[4:] for name, command in INSTALL.items()}
    assert words == {name: [word.replace(" ", "") for word in project[name]] for name in INSTALL}
