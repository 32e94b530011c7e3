"""One training loses a replica, its reference and its actor, then its controller, and is told to stop: nothing comes of it.

Each start of the program costs many seconds: the run is broken once, and every test reads a part of what was seen.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import oracles
import pytest
from oracles import Training
from sockets import ports_of
from tiny_run import BAD_GRADIENT, BAD_STEP, BATCH_SIZE, SAMPLES, SAVED_EVERY, STEPS

from grpo_rl.cluster.session import launcher
from grpo_rl.telemetry.metrics.metrics_file import read_metrics

END_S = 300.0
pytestmark = pytest.mark.timeout(1200)

NOISE = ("(raylet)", "worker died", "OOM", "cluster is lost", "Traceback")
REPLICA = "rollout.step:kill9@step=1,worker=rollout1,n=5,once"
REFERENCE = "reference.logprobs:kill9@step=3,once"
ACTOR = "actor.update.mid_backward:kill9@step=2,micro_batch=1,once"
MID_STEP = "driver.phase:delay=60@step=4,phase=update_actor"
MID_GENERATION = "driver.response:delay=60@step=4,count=5"


@pytest.fixture(scope="module")
def story(run_words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The same command three times: killed in step 4, stopped in step 4, and left alone."""
    run = Training(tmp_path_factory.mktemp("broken"), "broken", run_words)
    try:
        yield _broken(run)
    finally:
        run.end()


def _broken(run: Training) -> SimpleNamespace:
    seen = SimpleNamespace(run=run, shared_before=oracles.shared_memory())
    run.faults = ";".join([BAD_GRADIENT, REPLICA, REFERENCE, ACTOR, MID_STEP])
    # All workers have been lost once by then.
    # The status names a phase before the fault of that phase is on record.
    seen.lost = run.start().until(lambda status: status["step"] == 4 and MID_STEP in happened(run), END_S)
    family = list(launcher.processes(run.sessions[-1]["token"]))
    seen.names = {Path(f"/proc/{pid}/comm").read_text().strip() for pid in family}
    seen.num_ports, ports = len(ports_of(family)), ports_of([*family, run.status["pid"]])
    run.kill()
    seen.left_after_kill = oracles.left(run, ports=ports)

    run.faults = ";".join([BAD_GRADIENT, MID_GENERATION])
    seen.stopped_in = run.start().until(lambda _: MID_GENERATION in happened(run), END_S)
    # To each process, as a batch system does that finds a job's by their control group: it is the controller's alone.
    for pid in [*launcher.processes(run.sessions[-1]["token"]), run.process.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    seen.stop_code = run.wait(END_S)
    seen.left_after_stop = oracles.left(run)
    seen.stopped, seen.stop_lines = run.status, run.error_lines()

    run.faults = ""
    run.start().until(lambda status: status["phase"] != "start", END_S)
    seen.end_code = run.wait(END_S)
    seen.left_after_end = oracles.left(run)
    return seen


def happened(run: Training) -> list[str]:
    """The faults in order. A bad gradient is one, of however many micro-batches it comes."""
    return [fault for fault, _ in groupby(fired["fault"] for fired in run.fired())]


def rows_of(folder: Path) -> dict[int, Any]:
    return {int(row["step"]): row for row in read_metrics(folder / "metrics.jsonl")}


def test_a_killed_replica_is_replaced_and_a_killed_actor_and_reference_take_the_run_back_once_each(story):
    assert [fault for fault in happened(story.run) if fault != BAD_GRADIENT][:3] == [REPLICA, ACTOR, REFERENCE]
    assert story.lost["restarts"] == {"rollout1": 1, "reference0": 1, "actor0": 1}
    said = " ".join((story.run.folder / "broken.out").read_text().split())
    assert said.count("the run goes back to the first step") == 1 and said.count("the run goes back to step 2, the newest") == 1


def test_a_killed_controller_leaves_no_process_folder_or_port(story):
    assert happened(story.run)[3:5] == [BAD_GRADIENT, MID_STEP]
    assert (story.lost["state"], story.lost["last_commit"]) == ("running", SAVED_EVERY)
    assert {"raylet", "gcs_server"} <= story.names and story.num_ports > 0
    print(f"MEASURED driver killed: nothing left after {story.left_after_kill[1]:.2f} s")
    assert story.left_after_kill[0] == []


def test_a_controller_that_is_told_to_stop_saves_the_last_whole_step_says_so_and_leaves_nothing(story):
    assert happened(story.run)[5:] == [BAD_GRADIENT, MID_GENERATION]
    status = story.stopped_in
    assert (status["state"], status["step"], status["phase"]) == ("running", 4, "gen")
    assert set(status["workers"]) == {"actor0", "functions0", "reference0", "rollout0", "rollout1"}
    assert story.stop_code == 75, story.run.describe()
    [said, first, *others] = story.stop_lines
    assert not [line for line in others if any(words in line for words in NOISE)]
    assert said.startswith("SIGTERM: stopping within 60 s")
    assert first == "stopped: by SIGTERM: step 3 of 4 is saved; the same command goes on from there"
    assert (story.stopped["state"], story.stopped["last_commit"]) == ("preempted", 3)
    assert story.stopped["error"]["exit_code"] == 75
    print(f"MEASURED told to stop: nothing left after {story.left_after_stop[1]:.2f} s")
    assert story.left_after_stop[0] == []


def test_the_run_ends_as_the_undisturbed_one_to_the_last_bit(story, undisturbed):
    assert story.end_code == 0, story.run.describe()
    assert story.run.status["state"] == "done"
    assert oracles.state_hash(story.run.path, STEPS) == oracles.state_hash(undisturbed, STEPS)
    assert oracles.learnt(story.run.path) == oracles.learnt(undisturbed)
    oracles.assert_each_sample_once(story.run.path, STEPS, BATCH_SIZE, SAMPLES)


def test_after_its_end_nothing_of_the_run_is_left(story):
    assert story.left_after_end[0] == []
    assert oracles.shared_memory() <= story.shared_before


def test_a_gradient_that_is_not_finite_is_left_out_once_however_often_its_step_is_begun(story, undisturbed):
    for folder in (undisturbed, story.run.path):
        rows = rows_of(folder)
        assert [step for step in range(1, STEPS + 1) if rows[step]["actor/nonfinite"] != 0.0] == [BAD_STEP]
        assert rows[BAD_STEP]["actor/nonfinite"] == 1.0
        assert all(math.isfinite(rows[step]["actor/grad_norm"]) for step in rows if step != BAD_STEP)
        assert (folder / f"nonfinite_step_{BAD_STEP}.jsonl").read_text().count("\n") == BATCH_SIZE * SAMPLES
