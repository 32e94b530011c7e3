"""Where metrics go: the file, TensorBoard, W&B and MLflow, and the names that they have there."""

from __future__ import annotations

import importlib.util
import json
import math
import shlex
import struct
import threading
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from grpo_rl.config.checks.inputs import INSTALL
from grpo_rl.config.schema.tree import TrainerConfig
from grpo_rl.errors import ConfigError
from grpo_rl.telemetry.metrics.metrics_file import read_metrics
from grpo_rl.telemetry.metrics.sinks import STEP, TABLE, Background, Sinks, tracker_metrics
from grpo_rl.telemetry.rollouts.rollout_log import RolloutLog
from grpo_rl.telemetry.rundir import RunDir
from grpo_rl.types import Prompt, Rollout

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


class Recorder:
    """A tracker that keeps what it gets, once `gate` is open."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.steps: list[int] = []
        self.closed = False
        self.truncated: list[tuple[int, int]] = []
        self.shown: list[tuple[int, list[str], int]] = []
        self.place = "here"

    def tables(self, step: int, files: Mapping[str, Path], rows: int) -> None:
        self.shown.append((step, list(files), rows))

    def truncate_after(self, step: int) -> None:
        self.truncated.append((step, len(self.steps)))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.gate.wait(30)
        self.steps.append(step)

    def close(self) -> None:
        self.closed = True


def test_a_tracker_forgets_later_steps_before_it_gets_new_ones() -> None:
    recorder, warnings = Recorder(), list[str]()
    recorder.gate.set()
    sink = Background("service", lambda: recorder, warnings.append)
    sink.log(1, {})
    sink.truncate_after(1)
    sink.log(2, {})
    sink.close()
    assert (recorder.truncated, recorder.steps) == ([(1, 1)], [1, 2])
    assert warnings == [] and sink.num_unsent == 0


def test_a_service_that_hangs_costs_metrics_but_never_a_step() -> None:
    recorder, warnings = Recorder(), list[str]()
    sink = Background("service", lambda: recorder, warnings.append, size=3)
    for step in range(50):
        sink.log(step, {})
    sink.close(timeout_s=0.2)
    assert warnings == [
        "service: still busy after 0.2 s, left behind",
        "service: 50 steps were not sent; metrics.jsonl has them",
    ]
    recorder.gate.set()
    sink.close()
    assert 0 < len(recorder.steps) <= 4  # one may have been in hand, three were queued


def test_a_service_that_cannot_be_reached_is_reported_once_and_its_losses_counted() -> None:
    def connect() -> Recorder:
        raise ConnectionError("no route")

    warnings: list[str] = []
    sink = Background("service", connect, warnings.append)
    for step in range(5):
        sink.log(step, {})
    sink.close()
    assert warnings == [
        "service failed and is switched off: ConnectionError: no route",
        "service: 5 steps were not sent; metrics.jsonl has them",
    ]


def test_it_is_said_where_a_person_finds_the_run_and_tables_take_their_turn() -> None:
    recorder, said = Recorder(), list[str]()
    recorder.gate.set()
    sink = Background("service", lambda: recorder, pytest.fail, said.append)
    sink.tables(4, {"val/generations": Path("x")}, 8)
    sink.close()
    assert said == ["service: here"] and recorder.shown == [(4, ["val/generations"], 8)] and sink.num_unsent == 0


def rollout(text: str, reward: float) -> Rollout:
    return Rollout(Prompt("u", (1, 2), "4+4=", "sums", {"answer": 8}), 0, (3,), (-0.5,), "stop", ((0, 1),), text, reward)


def logged(run_dir: RunDir, logger: str, steps: Sequence[int], first: int | None = None) -> list[str]:
    """Let a run log these steps with a validation each, after a resume from the step before `first`; return what it said."""
    said: list[str] = []
    trainer = TrainerConfig(logger=["console", logger], log_val_generations=2)  # type: ignore[list-item]
    sinks = Sinks(run_dir, trainer, {"a": 1}, said.append, said.append)
    if first is not None:
        sinks.truncate_after(first - 1)
    log = RolloutLog(run_dir, written=sinks.written)
    for step in steps:
        log.write("rollouts", step, [rollout("8", 1.0)], [0.5])
        log.write("val", step, [rollout(str(number), 0.0) for number in range(3)])
        sinks.log(step, {"val/sums/mean@1": step / 2, "val/sums/response_length": 1.0, "reward/mean": float(step)})
    sinks.close()
    return said


def test_wandb_goes_on_with_the_same_run_over_the_training_step_with_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed: the extra `wandb`")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run_dir = RunDir.create(tmp_path, "r")
    said = logged(run_dir, "wandb", [1, 2, 3])
    said += logged(run_dir, "wandb", [3, 4], first=3)
    assert len(said) == 2 and all("offline; to send it later: wandb sync " in line for line in said)
    run_id = (run_dir.path / "wandb_run_id").read_text()
    parts = sorted(run_dir.logs.rglob("*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    assert len(parts) == 2 and all(run_id in path.name for path in parts)
    assert all(Path(line.rpartition(" ")[2]) == part.parent for line, part in zip(said, parts, strict=True))
    history = [record for part in parts for record in wandb_history(part)]
    rewards = [
        (record["training/global_step"], record["critic/score/mean"]) for record in history if "critic/score/mean" in record
    ]
    # The step that a resumed run repeats stands there twice: W&B would have dropped it by its own step.
    assert rewards == [(1, 1), (2, 2), (3, 3), (3, 3), (4, 4)]
    tables = [(name, record[name]) for record in history for name in record if name.endswith("/nrows")]
    assert tables == [("val/generations/nrows", 2), ("train/generations/nrows", 1)] * 5
    [first, *_] = [json.loads(path.read_text()) for path in sorted(run_dir.logs.rglob("val/generations*.table.json"))]
    assert first["columns"] == list(TABLE) and first["data"][0][:5] == ["sums", "4+4=", "0", '{"answer": 8}', 0.0]


def wandb_history(part: Path) -> list[dict[str, Any]]:
    """Return what an offline run has logged, in its order."""
    from wandb.proto import wandb_internal_pb2

    found = []
    for data in records_of(part.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            found.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item})
    return found


def records_of(content: bytes, block: int = 32_768) -> Iterator[bytes]:
    """Yield the records of a file in LevelDB's log format: blocks of pieces with checksum, length and kind (1: whole; 2, 3, 4: begin, middle, end)."""
    position, parts = 7, list[bytes]()  # after W&B's own header
    while position < len(content):
        if block - position % block < 7:
            position += block - position % block
            continue
        length, kind = struct.unpack_from("<HB", content, position + 4)
        parts.append(content[position + 7 : position + 7 + length])
        position += 7 + length
        if kind in (1, 4):
            yield b"".join(parts)
            parts = []


def test_mlflow_goes_on_with_the_same_run_with_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed: the extra `mlflow`")
    pytest.importorskip("pandas", reason="pandas is not installed: the extra `mlflow`")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("grpo_rl.telemetry.metrics.sinks.CLOSE_TIMEOUT_S", 120.0)
    run_dir = RunDir.create(tmp_path, "r")
    said = logged(run_dir, "mlflow", [1, 2]) + logged(run_dir, "mlflow", [3], first=3)
    run_id = (run_dir.path / "mlflow_run_id").read_text()
    assert said == [f"mlflow: run {run_id} at sqlite:///{tmp_path}/mlflow.db"] * 2
    client = mlflow.MlflowClient()
    history = client.get_metric_history(run_id, "val-core/sums/acc/mean_at_1")
    assert [(metric.step, metric.value) for metric in history] == [(1, 0.5), (2, 1.0), (3, 1.5)]
    assert client.get_run(run_id).info.status == "FINISHED"
    table = json.loads(Path(client.download_artifacts(run_id, "val_generations.json", str(tmp_path))).read_text())
    assert table["columns"] == ["step", *TABLE] and [row[0] for row in table["data"]] == [1, 1, 2, 2, 3, 3]


def named(*names: str) -> list[str]:
    return [name for name in tracker_metrics(3, dict.fromkeys(names, 1.0)) if name != STEP]


def test_scores_are_rewards_too_unless_the_reward_has_a_kl_penalty() -> None:
    assert named("reward/mean") == ["critic/score/mean", "critic/rewards/mean"]
    assert named("reward/max", "actor/reward_kl_penalty") == ["critic/score/max", "actor/reward_kl_penalty"]


def test_validation_is_core_where_it_is_over_responses_and_else_beside_it() -> None:
    of_source = ["mean@4", "best@4", "maj@4", "reward", "response_length", "auto/mean@4"]
    assert named(*(f"val/open/math/{name}" for name in of_source)) == [
        "val-core/open/math/acc/mean@4",
        "val-core/open/math/acc/best@4/mean",
        "val-core/open/math/acc/maj@4/mean",
        "val-aux/open/math/reward",
        "val-aux/open/math/response_length",
        "val-aux/open/math/auto/mean@4",
    ]


def test_a_source_that_begins_as_another_one_keeps_its_own_measures() -> None:
    names = ["val/a/response_length", "val/a/b/response_length", "val/a/b/mean@1", "val/a/mean@1"]
    assert named(*names)[2:] == ["val-core/a/b/acc/mean@1", "val-core/a/acc/mean@1"]


def test_what_verl_does_not_measure_keeps_its_name_and_nothing_is_lost() -> None:
    same = ["actor/kl_loss", "response_length/mean", "timing_s/gen", "val/loss", "reward/auto", "rollout/entropy", "alarm/kl"]
    assert named(*same) == same
    found = tracker_metrics(7, {"reward/std": 0.5, "advantage/abs_mean": 2.0, "trainer/epoch": 1.0})
    assert found == {"critic/score/std": 0.5, "critic/advantages/abs_mean": 2.0, "training/epoch": 1.0, STEP: 7.0}
