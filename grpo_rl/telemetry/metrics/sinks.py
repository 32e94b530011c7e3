"""The receivers of a run's metrics: metrics.jsonl; TensorBoard, W&B, MLflow by `trainer.logger`; Prometheus,
which asks. Each tracker has a thread and a bounded queue, so that its network and disk hold up no step.
Trackers get verl's names if verl measures the same thing (`tracker_metrics`)."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from torch.utils.tensorboard import SummaryWriter

from grpo_rl.config.schema.tree import TrainerConfig
from grpo_rl.errors import ConfigError
from grpo_rl.telemetry.metrics.metrics_file import Metrics, MetricsFile, Say, jsonable
from grpo_rl.telemetry.rollout_log import Kind, read_rollouts, step_files
from grpo_rl.telemetry.rundir import RunDir

TABLE = ("data_source", "prompt", "response", "ground_truth", "reward", "advantage", "response_length", "finish_reason")
QUEUE_SIZE = 1000
CLOSE_TIMEOUT_S = 30.0
MOST_CLIENTS, CLIENT_S = 8, 5.0
# Clients at once, and the seconds of each: any user of the machine may connect.
STEP = "training/global_step"  # trackers with a step axis of their own draw over it
_EQUAL = {
    "reward/std": "critic/score/std",
    "advantage/abs_mean": "critic/advantages/abs_mean",
    "advantage/zero_group_fraction": "critic/advantages/zero_group_fraction",
    "trainer/epoch": "training/epoch",
}


_logger = logging.getLogger(__name__)


class Sinks:
    """All destinations of a run. `log` takes milliseconds whatever a tracking server does."""

    def __init__(
        self,
        run_dir: RunDir,
        trainer: TrainerConfig,
        resolved_config: Mapping[str, Any],
        warn: Say = _logger.warning,
        say: Say = _logger.info,
    ) -> None:
        self._table_rows = trainer.log_val_generations
        self._run_dir = run_dir
        self._file = MetricsFile(run_dir.metrics_file, warn)
        kinds: dict[str, Callable[..., Tracker]] = {"wandb": _Wandb, "mlflow": _Mlflow, "tensorboard": TensorBoard}
        self._trackers = [
            Background(name, partial(kind, run_dir, trainer, resolved_config), warn, say)
            for name, kind in kinds.items()
            if name in trainer.logger
        ]
        self._sinks: list[MetricsFile | Background | Prometheus] = [self._file, *self._trackers]
        if trainer.metrics_port is not None:
            self._sinks.append(Prometheus(run_dir.name, trainer.metrics_host, trainer.metrics_port))

    def truncate_after(self, step: int) -> None:
        """Forget later steps, rollout files included; to be called once, on resuming."""
        for sink in self._sinks:
            sink.truncate_after(step)
        for folder in (self._run_dir.rollouts, self._run_dir.val):
            for other_step, file in step_files(folder):
                if other_step > step:
                    file.unlink()

    def flush(self) -> None:
        """Put metrics.jsonl, from which all else can be made again, on the disk."""
        self._file.flush()

    def log(self, step: int, metrics: Metrics) -> None:
        for sink in self._sinks:
            sink.log(step, metrics)

    def written(self, kind: Kind, step: int, file: Path) -> None:
        """Give W&B a table of a validation's first responses, once their file is whole."""
        for tracker in self._trackers if kind == "val" and self._table_rows else ():
            tracker.put(lambda tracker: tracker.table(step, file, self._table_rows))

    def close(self) -> None:
        """Wait some seconds at most for tracking servers."""
        for sink in self._sinks:
            sink.close()


class Tracker:
    place = ""  # the run's address, or the command that sends it there

    def log(self, step: int, metrics: Metrics) -> None:
        raise NotImplementedError

    def truncate_after(self, step: int) -> None:
        """Forget later steps; by default they stay beside the new ones."""

    def table(self, step: int, file: Path, rows: int) -> None:
        """Show the first `rows` rollouts of a file."""

    def close(self) -> None:
        raise NotImplementedError


class Background:
    """Hands metrics to a `Tracker`, which connects and works in a thread of its own. Steps that meet a full
    queue or a failed tracker are dropped; `warn` gets the first failure, and on `close` their number."""

    def __init__(
        self,
        name: str,
        connect: Callable[[], Tracker],
        warn: Say,
        say: Say = _logger.info,
        size: int = QUEUE_SIZE,
    ) -> None:
        self.name = name
        self._connect, self._warn, self._say = connect, warn, say
        self._has_failed = False
        self.num_unsent = 0  # logged steps that have not arrived: queued or dropped
        self._queue: queue.Queue[Callable[[Tracker], None] | None] = queue.Queue(size)
        self._thread = threading.Thread(target=self._run, name=f"sink-{name}", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Metrics) -> None:
        self.num_unsent += 1
        named = tracker_metrics(step, metrics)

        def send(tracker: Tracker) -> None:
            tracker.log(step, named)
            self.num_unsent -= 1

        self.put(send)

    def truncate_after(self, step: int) -> None:
        self.put(lambda tracker: tracker.truncate_after(step))

    def put(self, action: Callable[[Tracker], None]) -> None:
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(action)

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
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
        if tracker is not None and tracker.place:
            self._say(f"{self.name}: {tracker.place}")
        while (action := self._queue.get()) is not None:
            if not self._has_failed:
                self._guard(partial(action, tracker))
        if tracker is not None:
            self._guard(tracker.close)

    def _guard(self, action: Callable[[], Any]) -> Any:
        """A service's failure must not reach the training: any is caught."""
        try:
            return action()
        except Exception as error:
            if not self._has_failed:
                self._warn(f"{self.name} failed and is switched off: {type(error).__name__}: {error}")
            self._has_failed = True
            return None


class _Wandb(Tracker):
    """The W&B run of this folder, the same one after a resume, drawn over the training step. W&B's own step
    only rises, and would drop a resumed run's repeated steps and late tables."""

    def __init__(self, run_dir: RunDir, trainer: TrainerConfig, config: Mapping[str, Any]) -> None:
        import wandb

        self._table = wandb.Table
        # Without a login W&B asks on the terminal, and drops all metrics if nobody answers.
        logged_in = getattr(getattr(wandb, "api", None), "api_key", None) or "WANDB_MODE" in os.environ
        self._run = run = wandb.init(
            project=trainer.project_name,
            name=run_dir.name,
            id=_stored(run_dir.path / "wandb_run_id", lambda: secrets.token_hex(4)),
            resume="allow",
            dir=str(run_dir.logs),
            config=jsonable(config),
            settings=wandb.Settings(silent=True, console="off"),
            **({} if logged_in else {"mode": "offline"}),
        )
        # An offline run prints a warning if asked for its address.
        self.place = f"offline; to send it later: wandb sync {Path(run.dir).parent}" if run.offline else str(run.url or "")
        run.define_metric(STEP)
        run.define_metric("*", step_metric=STEP)

    def log(self, step: int, metrics: Metrics) -> None:
        self._run.log(dict(metrics))

    def table(self, step: int, file: Path, rows: int) -> None:
        data = [
            [value if isinstance(value, str | float | int | None) else json.dumps(value) for value in map(record.get, TABLE)]
            for record in read_rollouts(file)[:rows]
        ]
        self._run.log({"val/generations": self._table(columns=list(TABLE), data=data), STEP: step})

    def close(self) -> None:
        self._run.finish()


class _Mlflow(Tracker):
    def __init__(self, run_dir: RunDir, trainer: TrainerConfig, config: Mapping[str, Any]) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        self._client = client = MlflowClient()
        self._metric = Metric
        experiment = client.get_experiment_by_name(trainer.project_name)
        experiment_id = experiment.experiment_id if experiment else client.create_experiment(trainer.project_name)
        create = partial(client.create_run, experiment_id, run_name=run_dir.name)
        self._run_id = _stored(run_dir.path / "mlflow_run_id", lambda: str(create().info.run_id))
        client.update_run(self._run_id, status="RUNNING")  # the part before a resume has closed it
        client.log_dict(self._run_id, jsonable(config), "config.yaml")
        self.place = f"run {self._run_id} at {client.tracking_uri}"

    def log(self, step: int, metrics: Metrics) -> None:
        now_ms = int(time.time() * 1000)
        # MLflow allows no @ in names (mean@1).
        named = {key.replace("@", "_at_"): float(value) for key, value in metrics.items()}
        self._client.log_batch(self._run_id, metrics=[self._metric(key, value, now_ms, step) for key, value in named.items()])

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


def _stored(file: Path, make: Callable[[], str]) -> str:
    if not file.exists():
        file.write_text(make(), encoding="utf-8")
    return file.read_text(encoding="utf-8")


class TensorBoard(Tracker):
    def __init__(self, run_dir: RunDir, *_: object) -> None:
        self._writer = SummaryWriter(run_dir.tensorboard, flush_secs=10)

    def log(self, step: int, metrics: Metrics) -> None:
        for key, value in metrics.items():
            if key != STEP:
                self._writer.add_scalar(key, value, step)

    def truncate_after(self, step: int) -> None:
        self._writer.close()
        self._writer = SummaryWriter(self._writer.log_dir, purge_step=step + 1, flush_secs=10)

    def close(self) -> None:
        self._writer.close()


class _Bounded(ThreadingMixIn, WSGIServer):
    """At most MOST_CLIENTS clients, each with a deadline; further connections are closed."""

    daemon_threads = True
    request_queue_size = 16

    def __init__(self, *arguments: Any) -> None:
        self._free = threading.BoundedSemaphore(MOST_CLIENTS)
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """The deadline holds however slowly the client talks."""
        # A reading thread wakes up on a shutdown, and would not if the connection were closed here.
        deadline = threading.Timer(CLIENT_S, _hang_up, [request])
        deadline.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            deadline.cancel()
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client has gone."""


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class _Silent(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Write no line for each request."""


class Prometheus:
    """Serves the newest value of every metric: `grpo_rl_reward_mean{run="NAME"}` is `reward/mean`."""

    def __init__(self, run: str, host: str, port: int) -> None:
        from prometheus_client import CollectorRegistry, Gauge, make_wsgi_app

        registry = CollectorRegistry()
        self._make = lambda allowed, name: Gauge(allowed, name, ["run"], registry=registry).labels(run)
        self._gauges: dict[str, Any] = {}
        try:
            self._server = make_server(host, port, make_wsgi_app(registry), _Bounded, _Silent)
        except OSError as error:
            raise ConfigError(f"trainer.metrics_port={port}: {host}:{port} cannot be served: {error.strerror}") from error
        self._thread = threading.Thread(target=self._server.serve_forever, name="prometheus", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Metrics) -> None:
        """Metrics of a validation stay until the next one."""
        for name, value in {**metrics, "step": step}.items():
            allowed = re.sub(r"\W", "_", f"grpo_rl_{name}", flags=re.ASCII)
            if allowed not in self._gauges:
                self._gauges[allowed] = self._make(allowed, name)
            self._gauges[allowed].set(value)

    def truncate_after(self, step: int) -> None:
        """A resumed run has nothing yet."""

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(CLOSE_TIMEOUT_S)


def tracker_metrics(step: int, metrics: Metrics) -> dict[str, float]:
    """Return the metrics under the trackers' names.

    - `reward/mean`, `max`, `min` -> `critic/score/...`, and `critic/rewards/...`, in verl the score less the
      KL penalty, if the reward has no such penalty;
    - `val/SOURCE/mean@n` -> `val-core/SOURCE/acc/mean@n`, `best@n` and `maj@n` -> `.../best@n/mean`,
      `.../maj@n/mean`;
    - the rest of a source's validation -> `val-aux/SOURCE/...`; losses on rows stay `val/loss` and so on.
    """
    # Every source has a mean response length. One source's name may begin another's.
    sources = [match[1] for match in map(re.compile("(?s)val/(.+)/response_length").fullmatch, metrics) if match]
    of_source = re.compile(f"(?s)val/({'|'.join(map(re.escape, sorted(sources, key=len, reverse=True)))})/(.*)")
    named: dict[str, float] = {STEP: float(step)}
    for name, value in metrics.items():
        if name in ("reward/mean", "reward/max", "reward/min"):
            kind = name.removeprefix("reward/")
            named[f"critic/score/{kind}"] = value
            if "actor/reward_kl_penalty" not in metrics:
                named[f"critic/rewards/{kind}"] = value
        elif sources and (match := of_source.fullmatch(name)):
            source, rest = match.groups()
            core = re.fullmatch(r"(mean|best|maj)@\d+", rest)
            ending = "" if core is None or core[1] == "mean" else "/mean"
            named[f"val-core/{source}/acc/{rest}{ending}" if core else f"val-aux/{source}/{rest}"] = value
        else:
            named[_EQUAL.get(name, name)] = value
    return named
