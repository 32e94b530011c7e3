import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from grpo_rl.config.schema.tree import TrainerConfig
from grpo_rl.telemetry.metrics.tracking import Background, mlflow_tracker, wandb_tracker
from grpo_rl.telemetry.rundir import RunDir


class Recorder:
    """A tracker that keeps what it gets, once `gate` is open."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.steps: list[int] = []
        self.closed = False
        self.truncated: list[tuple[int, int]] = []

    def truncate_after(self, step: int) -> None:
        self.truncated.append((step, len(self.steps)))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.gate.wait(30)
        self.steps.append(step)

    def close(self) -> None:
        self.closed = True


def test_everything_logged_arrives_in_order_before_close_returns() -> None:
    recorder, warnings = Recorder(), list[str]()
    recorder.gate.set()
    sink = Background("service", lambda: recorder, warnings.append)
    for step in range(100):
        sink.log(step, {})
    sink.close()
    assert recorder.steps == list(range(100))
    assert recorder.closed and warnings == [] and sink.num_unsent == 0


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


def test_a_failure_in_the_middle_switches_the_service_off() -> None:
    class Breaks(Recorder):
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            if step == 2:
                raise OSError("quota")
            super().log(step, metrics)

    tracker, warnings = Breaks(), list[str]()
    tracker.gate.set()
    sink = Background("service", lambda: tracker, warnings.append)
    for step in range(5):
        sink.log(step, {})
    sink.close()
    assert tracker.steps == [0, 1] and tracker.closed
    assert warnings == [
        "service failed and is switched off: OSError: quota",
        "service: 3 steps were not sent; metrics.jsonl has them",
    ]


def test_wandb_gets_the_steps_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run_dir = RunDir.create(tmp_path, "r")
    warnings: list[str] = []
    sink = Background("wandb", wandb_tracker(run_dir, TrainerConfig(), {"a": 1}), warnings.append)
    sink.log(1, {"val/x/mean@1": 0.5})
    sink.close()
    assert warnings == []
    assert len(list(run_dir.logs.rglob("*.wandb"))) == 1


def test_mlflow_gets_the_steps_and_goes_on_with_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)
    run_dir = RunDir.create(tmp_path, "r")
    warnings: list[str] = []
    for step in (1, 2):
        sink = Background("mlflow", mlflow_tracker(run_dir, TrainerConfig(), {"a": 1}), warnings.append)
        sink.log(step, {"val/x/mean@1": step / 2})
        sink.close(timeout_s=120)
    run_id = (run_dir.path / "mlflow_run_id").read_text()
    history = mlflow.MlflowClient().get_metric_history(run_id, "val/x/mean_at_1")
    assert warnings == []
    assert [(metric.step, metric.value) for metric in history] == [(1, 0.5), (2, 1.0)]
