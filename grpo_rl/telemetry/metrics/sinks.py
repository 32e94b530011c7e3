"""The receivers of a run's metrics: metrics.jsonl always, TensorBoard, W&B and MLflow by `trainer.logger`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from grpo_rl.config.schema.tree import TrainerConfig
from grpo_rl.telemetry.metrics.durable import DurableMetrics
from grpo_rl.telemetry.metrics.metrics_file import read_metrics
from grpo_rl.telemetry.metrics.tracker_names import STEP, tracker_metrics
from grpo_rl.telemetry.metrics.tracking import Background, Connect, mlflow_tracker, wandb_tracker
from grpo_rl.telemetry.rollouts.rollout_log import Kind, RolloutLog, step_files
from grpo_rl.telemetry.rundir import RunDir

_logger = logging.getLogger(__name__)


class Sink(Protocol):
    """One destination of metrics."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def truncate_after(self, step: int) -> None: ...

    def close(self) -> None: ...


class Sinks:
    """All destinations of one run. `log` costs milliseconds whatever a tracking server does.

    Raises ConfigError when `trainer.logger` names a package that is not installed.
    """

    def __init__(
        self,
        run_dir: RunDir,
        trainer: TrainerConfig,
        resolved_config: Mapping[str, Any],
        warn: Callable[[str], None] = _logger.warning,
        say: Callable[[str], None] = _logger.info,
    ) -> None:
        self._table_rows = trainer.log_val_generations
        trackers = {"wandb": wandb_tracker, "mlflow": mlflow_tracker}
        connects: dict[str, Connect] = {
            name: connect(run_dir, trainer, resolved_config) for name, connect in trackers.items() if name in trainer.logger
        }
        if "tensorboard" in trainer.logger:
            connects["tensorboard"] = lambda: TensorBoard(run_dir.tensorboard, run_dir.metrics_file)
        self._rollouts = RolloutLog(run_dir)
        self._file = DurableMetrics(run_dir.metrics_file, warn)
        self._sinks: list[Sink] = [self._file]
        self._trackers = [Background(name, connect, warn, say) for name, connect in connects.items()]
        self._sinks += self._trackers

    def truncate_after(self, step: int) -> None:
        """Forget what was written for later steps, rollout files included. To be called once, on resuming from `step`."""
        for sink in self._sinks:
            sink.truncate_after(step)
        self._rollouts.truncate_after(step)

    def flush(self) -> None:
        """Put metrics.jsonl, from which the rest can be made again, on the disk."""
        self._file.flush()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand the metrics of one step to every destination."""
        for sink in self._sinks:
            sink.log(step, metrics)

    def written(self, kind: Kind, step: int, file: Path) -> None:
        """Give W&B and MLflow a table of a validation's first responses, and one of the step's training rollouts beside it.

        To be called when a file of rollouts is whole, which that of a step's training is before that of its validation.
        """
        if kind != "val" or not self._table_rows:
            return
        files = {"val/generations": file}
        trained = dict(step_files(file.parents[1] / "rollouts")).get(step)
        if trained is not None:
            files["train/generations"] = trained
        for tracker in self._trackers:
            tracker.tables(step, files, self._table_rows)

    def close(self) -> None:
        """Write out what is still under way. Waits for tracking servers for some seconds only."""
        for sink in self._sinks:
            sink.close()


class TensorBoard:
    """Scalars in TensorBoard's own event files."""

    place = ""

    def __init__(self, folder: Path, metrics_file: Path) -> None:
        self._writer = EventFileWriter(str(folder), flush_secs=10)
        self._metrics_file = metrics_file

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._add(step, metrics, time.time())

    def truncate_after(self, step: int) -> None:
        """Begin anew with the content of metrics.jsonl: a process that was killed may have left less here, and later steps."""
        # TensorBoard hides the events at or after the step of a START that comes later in the folder.
        start = SessionLog(status=SessionLog.SessionStatus.START)
        self._writer.add_event(Event(step=0, wall_time=time.time(), session_log=start))
        for row in read_metrics(self._metrics_file):
            if row["step"] <= step:
                metrics = {name: value for name, value in row.items() if name not in ("step", "time")}
                self._add(int(row["step"]), metrics, row["time"])

    def tables(self, step: int, files: Mapping[str, Path], rows: int) -> None:
        """Do nothing: event files have no tables."""

    def close(self) -> None:
        self._writer.close()

    def _add(self, step: int, metrics: Mapping[str, float], wall_time: float) -> None:
        named = tracker_metrics(step, metrics)
        values = [Summary.Value(tag=key, simple_value=float(value)) for key, value in named.items() if key != STEP]
        self._writer.add_event(Event(step=step, wall_time=wall_time, summary=Summary(value=values)))
