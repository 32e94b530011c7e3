"""The controller is stopped and killed in the middle of a step, and a gradient is not finite: what comes out is the same."""

from __future__ import annotations

import math
import signal
from pathlib import Path

import oracles
import pytest
from tiny_run import BAD_GRADIENT, BATCH_SIZE, SAMPLES, STEPS

from grpo_rl.cluster import watch
from grpo_rl.telemetry.metrics_file import read_metrics

START_S, END_S = 240.0, 240.0
pytestmark = pytest.mark.timeout(1200)

MID_GENERATION = "driver.response:delay=60@step=3,count=5"
MID_STEP = "driver.phase:delay=60@step=4,phase=update_actor"


def test_a_run_that_is_stopped_and_then_killed_ends_as_the_undisturbed_one(training, run_words, undisturbed):
    shared_before = oracles.shared_memory()
    broken = training("broken", run_words, f"{BAD_GRADIENT};{MID_GENERATION}").start()

    status = broken.until(lambda status: status["step"] == 3 and status["phase"] == "gen" and len(broken.fired()) > 1, START_S)
    assert status["state"] == "running"
    assert set(status["workers"]) == {"actor0", "reference0", "rollout0", "rollout1"}
    broken.process.send_signal(signal.SIGTERM)
    assert broken.wait(END_S) == 75, broken.describe()
    [said, first, *_] = broken.error_lines()
    assert said.startswith("SIGTERM: stopping within 60 s")
    assert first == "stopped: by SIGTERM: step 2 of 4 is saved; the same command goes on from there"
    assert (broken.status["state"], broken.status["last_commit"]) == ("preempted", 2)
    assert broken.status["error"]["exit_code"] == 75
    oracles.assert_nothing_left(broken, seconds=0.5)

    broken.faults = MID_STEP
    broken.start().until(lambda status: status["step"] == 4 and status["phase"] == "update_actor", START_S)
    session = broken.sessions[-1]
    family = list(watch.processes(session["token"]))
    names = {Path(f"/proc/{pid}/comm").read_text().strip() for pid in family}
    assert {"raylet", "gcs_server"} <= names and len(oracles.ports_of(family)) > 0
    ports = oracles.ports_of([*family, broken.process.pid])
    broken.kill()
    print(f"MEASURED driver killed: nothing left after {oracles.assert_nothing_left(broken, ports=ports):.2f} s")

    broken.faults = ""
    assert broken.start().wait(START_S) == 0, broken.describe()
    assert broken.status["state"] == "done"
    assert undisturbed.wait(END_S) == 0, undisturbed.describe()
    assert oracles.shared_memory() <= shared_before

    assert oracles.state_hash(broken.path, STEPS) == oracles.state_hash(undisturbed.path, STEPS)
    assert oracles.learnt(broken.path) == oracles.learnt(undisturbed.path)
    oracles.assert_each_sample_once(broken.path, STEPS, BATCH_SIZE, SAMPLES)
    for run in (undisturbed, broken):
        rows = {int(row["step"]): row for row in read_metrics(run.path / "metrics.jsonl")}
        assert [rows[step]["actor/nonfinite"] for step in range(1, STEPS + 1)] == [1.0, 0.0, 0.0, 0.0]
        assert all(math.isfinite(rows[step]["actor/grad_norm"]) for step in range(2, STEPS + 1))
        assert (run.path / "nonfinite_step_1.jsonl").read_text().count("\n") == BATCH_SIZE * SAMPLES
