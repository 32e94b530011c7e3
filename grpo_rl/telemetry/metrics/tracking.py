"""Sinks behind a thread and a bounded queue, so that no network and no disk of theirs holds up a step; W&B and MLflow."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from grpo_rl.config.schema.tree import TrainerConfig
from grpo_rl.errors import ConfigError
from grpo_rl.telemetry.metrics.metrics_file import jsonable
from grpo_rl.telemetry.rundir import RunDir

QUEUE_SIZE = 1000
CLOSE_TIMEOUT_S = 30.0


class Tracker(Protocol):
    """A connection to a tracking service."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def truncate_after(self, step: int) -> None:
        """Forget later steps, where that is possible."""

    def close(self) -> None: ...


Connect = Callable[[], Tracker]


class Background:
    """A sink that hands metrics to a `Tracker` living in a thread of its own.

    The connection is made in that thread too. Steps that find the queue full, or a tracker that failed,
    are dropped; `close` says how many. The first failure is reported once, through `warn`.
    """

    def __init__(self, name: str, connect: Connect, warn: Callable[[str], None], size: int = QUEUE_SIZE) -> None:
        self.name = name
        self._connect = connect
        self._warn = warn
        self._has_failed = False
        self._num_logged = 0
        self._num_sent = 0
        self._queue: queue.Queue[tuple[int, dict[str, float] | None] | None] = queue.Queue(size)
        self._thread = threading.Thread(target=self._run, name=f"sink-{name}", daemon=True)
        self._thread.start()

    @property
    def num_unsent(self) -> int:
        """The number of steps that were logged and have not arrived: still queued, or dropped."""
        return self._num_logged - self._num_sent

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._num_logged += 1
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait((step, dict(metrics)))

    def truncate_after(self, step: int) -> None:
        """Make the tracker forget later steps, before it gets what is logged from now on."""
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait((step, None))

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Wait at most `timeout_s` for what is queued, then report what was lost."""
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=timeout_s)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._warn(f"{self.name}: still busy after {timeout_s:g} s, left behind")
        if self.num_unsent:
            self._warn(f"{self.name}: {self.num_unsent} steps were not sent; metrics.jsonl has them")

    def _run(self) -> None:
        tracker = self._guard(self._connect)
        while (item := self._queue.get()) is not None:
            step, metrics = item
            if tracker is None or self._has_failed:
                continue
            if metrics is None:
                self._guard(partial(tracker.truncate_after, step))
            else:
                self._guard(partial(tracker.log, step, metrics))
                self._num_sent += not self._has_failed
        if tracker is not None:
            self._guard(tracker.close)

    def _guard(self, action: Callable[[], Any]) -> Any:
        """Return what `action` returns. A service's failure must not reach the training, so any is caught here."""
        try:
            return action()
        except Exception as error:
            if not self._has_failed:
                self._warn(f"{self.name} failed and is switched off: {type(error).__name__}: {error}")
            self._has_failed = True
            return None


class _KeepsHistory:
    def truncate_after(self, step: int) -> None:
        """Do nothing: later values of a step lie beside the earlier ones."""


class _Wandb(_KeepsHistory):
    def __init__(self, run: Any) -> None:
        self._run = run

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


def wandb_tracker(run_dir: RunDir, trainer: TrainerConfig, config: Mapping[str, Any]) -> Connect:
    """Return a function that opens the W&B run of this folder, the same one again after a resume.

    Raises ConfigError when wandb is not installed.
    """
    _require("wandb")

    def connect() -> Tracker:
        wandb = importlib.import_module("wandb")
        run_id = _stored(run_dir.path / "wandb_run_id", lambda: secrets.token_hex(4))
        run = wandb.init(
            project=trainer.project_name,
            name=run_dir.name,
            id=run_id,
            resume="allow",
            dir=str(run_dir.logs),
            config=jsonable(config),
            settings=wandb.Settings(silent=True, console="off"),
        )
        return _Wandb(run)

    return connect


class _Mlflow(_KeepsHistory):
    def __init__(self, client: Any, run_id: str) -> None:
        self._client = client
        self._run_id = run_id
        self._metric = importlib.import_module("mlflow.entities").Metric

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        # MLflow refuses @ in a name, which validation metrics have (mean@1).
        entities = [self._metric(key.replace("@", "_at_"), float(value), now_ms, step) for key, value in metrics.items()]
        self._client.log_batch(self._run_id, metrics=entities)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


def mlflow_tracker(run_dir: RunDir, trainer: TrainerConfig, config: Mapping[str, Any]) -> Connect:
    """Return a function that opens the MLflow run of this folder, the same one again after a resume.

    The server is MLflow's own setting (MLFLOW_TRACKING_URI). Raises ConfigError when it is not installed.
    """
    _require("mlflow")

    def connect() -> Tracker:
        client = importlib.import_module("mlflow").MlflowClient()
        experiment = client.get_experiment_by_name(trainer.project_name)
        experiment_id = experiment.experiment_id if experiment else client.create_experiment(trainer.project_name)
        run_id = _stored(
            run_dir.path / "mlflow_run_id",
            lambda: str(client.create_run(experiment_id, run_name=run_dir.name).info.run_id),
        )
        client.log_dict(run_id, jsonable(config), "config.yaml")
        return _Mlflow(client, run_id)

    return connect


def _require(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"trainer.logger names {package}, which is not installed: pip install '.[{package}]' or take it out of the list"
        )


def _stored(file: Path, make: Callable[[], str]) -> str:
    """Return the identifier in `file`, made and written when there is none."""
    if not file.exists():
        file.write_text(make(), encoding="utf-8")
    return file.read_text(encoding="utf-8")
