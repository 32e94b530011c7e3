"""If metrics go: the file, TensorBoard, W&B and MLflow, and the names that they have there."""

from __future__ import annotations

import contextlib
import http.client
import importlib.machinery
import importlib.util
import math
import re
import socket
import sys
import threading
import time
import types
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from sockets import free_port
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from grpo_rl.config.schema.tree import TrainerConfig
from grpo_rl.errors import ConfigError
from grpo_rl.telemetry.metrics.metrics_file import read_metrics
from grpo_rl.telemetry.metrics.sinks import MOST_CLIENTS, STEP, TABLE, Background, Sinks, Tracker, tracker_metrics
from grpo_rl.telemetry.rollout_log import RolloutLog
from grpo_rl.telemetry.rundir import RunDir
from grpo_rl.types import Prompt, Rollout


def tensorboard_points(folder: Path, tag: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_metrics_reach_the_file_and_tensorboard_and_a_resumed_run_shows_one_curve(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path, "r")
    sinks = Sinks(run_dir, TrainerConfig(), {})
    sinks.log(0, {"val/a/mean@1": 0.25, "val/a/response_length": 3.0})
    for step in (1, 2, 3):
        sinks.log(step, {"reward/mean": float(step), "actor/kl_loss": math.nan})
    sinks.close()
    resumed = Sinks(run_dir, TrainerConfig(), {})
    resumed.truncate_after(1)
    resumed.log(2, {"reward/mean": 20.0})
    resumed.close()
    logged = [(record["step"], record.get("reward/mean")) for record in read_metrics(run_dir.metrics_file)]
    assert logged == [(0, None), (1, 1.0), (2, 20.0)]
    assert tensorboard_points(run_dir.tensorboard, "critic/score/mean") == [(1, 1.0), (2, 20.0)]
    assert tensorboard_points(run_dir.tensorboard, "val-core/a/acc/mean@1") == [(0, 0.25)]


def test_prometheus_reads_the_newest_values_under_names_of_its_own(tmp_path: Path) -> None:
    port = free_port()
    refusal = f"127.0.0.1:{port} cannot be served: Address already in use"
    with socket.create_server(("127.0.0.1", port)), pytest.raises(ConfigError, match=refusal):
        Sinks(RunDir.create(tmp_path, "taken"), TrainerConfig(metrics_port=port), {})
    sinks = Sinks(RunDir.create(tmp_path, "it's"), TrainerConfig(metrics_port=port), {})
    sinks.log(0, {"val/a/mean@1": 0.25, "reward/mean": 0.0})
    sinks.log(3, {"reward/mean": 0.5, "val/数/mean@1": 2.0, "actor/kl_loss": math.nan})
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=240) as answer:
        text = answer.read().decode()
    sinks.close()
    values = dict(re.findall(r"^grpo_rl_(\w+)\{run=\"it's\"\} (\S+)$", text, re.MULTILINE))
    assert values == {
        "val_a_mean_1": "0.25",
        "reward_mean": "0.5",
        "val___mean_1": "2.0",
        "actor_kl_loss": "NaN",
        "step": "3.0",
    }
    with socket.create_server(("127.0.0.1", port)):
        pass  # free again


def test_idle_clients_cost_prometheus_no_thread_each_and_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_rl.telemetry.metrics.sinks.CLIENT_S", 0.2)
    port, before = free_port(), threading.active_count()
    sinks = Sinks(RunDir.create(tmp_path, "run"), TrainerConfig(metrics_port=port, logger=["console"]), {})
    sinks.log(1, {"reward/mean": 0.5})
    idle = [socket.create_connection(("127.0.0.1", port), 10) for _ in range(60)]
    threads = threading.active_count() - before
    # Eight and their deadlines, the server's own, and those of other sinks.
    assert threads <= 2 * MOST_CLIENTS + 3
    began, text = time.monotonic(), ""
    while "reward_mean" not in text and time.monotonic() < began + 60:
        with contextlib.suppress(OSError, http.client.HTTPException):
            text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
    print(f"{threads} threads for 60 idle clients; answered after {time.monotonic() - began:.1f} s")
    assert "grpo_rl_reward_mean" in text
    for client in idle:
        client.close()
    sinks.close()


class Recorder(Tracker):
    """A tracker that keeps what it gets, once `gate` is open."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.steps: list[int] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.gate.wait(120)
        self.steps.append(step)

    def close(self) -> None:
        pass


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
        log.flush()
        sinks.log(step, {"val/sums/mean@1": step / 2, "val/sums/response_length": 1.0, "reward/mean": float(step)})
    sinks.close()
    return said


class FakeWandb(types.ModuleType):
    """The functions of W&B that are called, as a run that is offline has them."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
        self.ids: list[str] = []
        self.history: list[dict[str, Any]] = []
        self.offline, self.dir = True, "/runs/offline-run-1/files"
        self.api = types.SimpleNamespace(api_key=None)
        self.modes: list[str | None] = []

    def init(self, *, id: str, resume: str, **options: Any) -> FakeWandb:
        self.ids.append(id)
        self.modes.append(options.get("mode"))
        return self

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        pass

    def log(self, values: dict[str, Any]) -> None:
        self.history.append(values)

    def finish(self) -> None:
        self.history.append({"finished": 1})

    def Settings(self, **options: Any) -> None:
        pass

    def Table(self, columns: list[str], data: list[list[Any]]) -> list[list[Any]]:
        return [columns, *data]


def test_wandb_goes_on_with_the_same_run_over_the_training_step_with_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    run_dir = RunDir.create(tmp_path, "r")
    said = logged(run_dir, "wandb", [1, 2, 3]) + logged(run_dir, "wandb", [3, 4], first=3)
    assert said == ["wandb: offline; to send it later: wandb sync /runs/offline-run-1"] * 2
    assert wandb.modes == ["offline"] * 2, "without a login nobody is asked for one"
    assert wandb.ids == [(run_dir.path / "wandb_run_id").read_text()] * 2
    rewards = [(each[STEP], each["critic/score/mean"]) for each in wandb.history if "critic/score/mean" in each]
    # The step that a resumed run repeats stands there twice: W&B would have dropped it by its own step.
    assert rewards == [(1, 1), (2, 2), (3, 3), (3, 3), (4, 4)]
    tables = [(name, table) for each in wandb.history for name, table in each.items() if name.endswith("/generations")]
    assert [(name, len(table) - 1) for name, table in tables] == [("val/generations", 2)] * 5
    assert tables[0][1][0] == list(TABLE) and tables[0][1][1][:5] == ["sums", "4+4=", "0", '{"answer": 8}', 0.0]
    wandb.api.api_key = "a" * 40
    logged(RunDir.create(tmp_path, "logged in"), "wandb", [1])
    assert wandb.modes[-1] is None


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        ("reward/mean", "critic/score/mean critic/rewards/mean"),
        ("reward/max actor/reward_kl_penalty", "critic/score/max actor/reward_kl_penalty"),
        ("reward/std trainer/epoch", "critic/score/std training/epoch"),
        (
            "val/open/math/response_length val/open/math/mean@4 val/open/math/best@4 val/open/math/auto/mean@4",
            "val-aux/open/math/response_length val-core/open/math/acc/mean@4 val-core/open/math/acc/best@4/mean "
            "val-aux/open/math/auto/mean@4",
        ),
        (
            "val/a/response_length val/a/b/response_length val/a/b/mean@1 val/a/mean@1",
            "val-aux/a/response_length val-aux/a/b/response_length val-core/a/b/acc/mean@1 val-core/a/acc/mean@1",
        ),
        ("actor/kl_loss val/loss reward/auto alarm/kl", "actor/kl_loss val/loss reward/auto alarm/kl"),
    ],
)
def test_trackers_get_the_names_of_verl_where_verl_measures_the_same(names: str, shown: str) -> None:
    assert [name for name in tracker_metrics(3, dict.fromkeys(names.split(), 1.0)) if name != STEP] == shown.split()
