"""Local metric files on a disk without room."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from grpo_rl.telemetry.metrics.durable import DurableMetrics
from grpo_rl.telemetry.metrics.metrics_file import MetricsFile, read_metrics


def test_steps_that_found_the_disk_full_are_written_once_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    metrics = DurableMetrics(tmp_path / "metrics.jsonl", warnings.append)
    metrics.log(1, {"a": 1.0})

    def full(self: MetricsFile, step: int, metrics: Mapping[str, float]) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(MetricsFile, "log", full)
        metrics.log(2, {"a": 2.0})
        metrics.log(3, {"a": 3.0})
    metrics.log(4, {"a": 4.0})
    metrics.close()
    assert [(row["step"], row["a"]) for row in read_metrics(tmp_path / "metrics.jsonl")] == [
        (1, 1.0),
        (2, 2.0),
        (3, 3.0),
        (4, 4.0),
    ]
    assert ["cannot be written" in warnings[0], "can be written again; no steps" in warnings[1], len(warnings)] == [
        True,
        True,
        2,
    ]


def test_a_device_that_is_always_full_costs_no_step_and_the_loss_is_told() -> None:
    warnings: list[str] = []
    metrics = DurableMetrics(Path("/dev/full"), warnings.append)
    for step in range(3):
        metrics.log(step, {"a": float(step)})
    metrics.close()
    assert len(warnings) == 2
    assert "No space left" in warnings[0] and "3 steps could not be written" in warnings[1]
