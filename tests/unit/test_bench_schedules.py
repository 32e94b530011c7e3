"""The figures of the benchmark of schedules, from runs whose times are known."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
STEPS = 10


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("bench_schedules")


def write_speed_run(folder: Path, step_s: float, *, overlapped: bool) -> None:
    """Write ten steps: 2 s of sampling and 2 s of training each, one after the other or side by side; the first is slow."""
    folder.mkdir(parents=True)
    lines, records, now = [], [], 0.0
    for step in range(1, STEPS + 1):
        whole = step_s if step > 1 else 10 * step_s
        training = now if overlapped else now + 2.0
        for role, start, end in (
            ("rollout", now, now + 2.0),
            ("actor", training, training + 2.0),
            ("reward", now, now + 0.5),
            ("step", now, now + whole),
        ):
            lines.append({"step": step, "role": role, "what": role, "start": start, "end": end})
        staleness = {"staleness/mean": 0.5, "staleness/max": 1.0} if overlapped else {}
        records.append({"step": step, "time": 0.0, "timing_s/step": whole} | staleness)
        now += whole
    (folder / "timeline.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "report.txt").write_text("done\n")


def test_a_run_is_measured_without_its_first_and_last_steps(bench: Any, tmp_path: Path) -> None:
    write_speed_run(tmp_path / "run", 4.0, overlapped=False)
    found = bench.measured(tmp_path / "run")
    assert found.seconds == pytest.approx(4.0) and found.rollouts_s == pytest.approx(256 / 4.0)
    assert (found.sampling_s, found.training_s) == pytest.approx((2.0, 2.0))
    assert found.idle == pytest.approx({"rollout": 0.5, "actor": 0.5, "reward": 0.875})
    assert found.staleness == (0.0, 0.0)


def test_the_table_has_the_ratio_to_sync_and_the_bar(bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_speed_run(tmp_path / "speed-sync-1", 4.0, overlapped=False)
    write_speed_run(tmp_path / "speed-async-1", 2.0, overlapped=True)
    assert bench.speed_table(tmp_path)
    out = capsys.readouterr().out
    assert "| async | 1 | 2.00 | 128.0 | 2.00 | 0.50 / 1 | 0% | 0% | 75% |" in out
    assert "sampling 2.00 s, training 2.00 s: 1.00 x" in out
    write_speed_run(tmp_path / "speed-one_step_off-1", 3.0, overlapped=True)
    assert not bench.speed_table(tmp_path), "4 s against 3 s is less than the bar"


def test_the_words_of_a_run_are_keys_that_there_are(bench: Any) -> None:
    from grpo_rl.config.compose import compose

    for schedule in bench.SCHEDULES:
        composed = compose([*bench.POOLS, *bench.SPEED, *bench.schedule_words(schedule, 2), "trainer.device=cpu"])
        assert composed.config.trainer.schedule == schedule and composed.config.data.train_batch_size == bench.BATCH
