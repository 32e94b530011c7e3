import json
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from grpo_rl.config.schema.tree import TrainerConfig
from grpo_rl.telemetry.metrics.sinks import Sinks
from grpo_rl.telemetry.metrics.tracking import TABLE, Background
from grpo_rl.telemetry.rollouts.rollout_log import RolloutLog
from grpo_rl.telemetry.rundir import RunDir
from grpo_rl.types import Prompt, Rollout


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
    monkeypatch.setattr("grpo_rl.telemetry.metrics.tracking.CLOSE_TIMEOUT_S", 120.0)
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


def test_no_table_is_made_where_none_is_wanted(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path, "r")
    sinks = Sinks(run_dir, TrainerConfig(log_val_generations=0), {})
    recorder = Recorder()
    recorder.gate.set()
    sinks._trackers.append(Background("service", lambda: recorder, pytest.fail))
    log = RolloutLog(run_dir, written=sinks.written)
    log.write("val", 1, [rollout("8", 1.0)])
    sinks._table_rows = 1
    log.write("rollouts", 2, [rollout("8", 1.0)])
    log.write("val", 3, [rollout("8", 1.0)])
    for tracker in sinks._trackers:
        tracker.close()
    assert recorder.shown == [(3, ["val/generations"], 1)]
