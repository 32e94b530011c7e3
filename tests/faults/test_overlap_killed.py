"""Trainings that sample while they train, broken on purpose: every prompt is trained exactly once, and no token is too old."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import oracles
import pytest
from tiny_run import BAD_GRADIENT, BATCH_SIZE, SAMPLES, STEPS

from grpo_rl.telemetry.metrics.metrics_file import read_metrics

END_S = 300.0
STEPS_OF_STORY = 6
pytestmark = pytest.mark.timeout(1200)

REPLICA = "rollout.step:kill9@step=2,worker=rollout1,n=3,once"
ACTOR = "actor.update.mid_backward:kill9@step=2,once"
ACTOR_LATER = "actor.update.mid_backward:kill9@step=3,once"
IN_TRAINING = "driver.phase:kill9@step=3,phase=update_actor,once"
IN_WAITING = "driver.phase:kill9@step=5,phase=wait_for_rollouts,once"
SLOWLY = "driver.phase:delay=20@step=6,phase=update_actor,once"


def words_of(run_words: list[str], schedule: str, *more: str) -> list[str]:
    """The tiny run's words for this schedule, on one core for each role whatever the machine has."""
    gone = ("trainer.total_training_steps=", "trainer.recover")
    kept = [word for word in run_words if not word.startswith(gone)]
    return [*kept, f"trainer.schedule={schedule}", f"trainer.total_training_steps={STEPS_OF_STORY}", *more]


PROGRAM = """
import sys
from grpo_rl.main import main
from grpo_rl.trainer import saving

saving.OWN_EVERY_S, saving.OWN_SHARE = 0.0, 1e9
# In the background a checkpoint is committed some phases later: a kill in between goes one further back.
saving.Saving.in_background = property(lambda self: False, lambda self, value: None)
sys.exit(main(sys.argv[1:]))
"""
LOST_AGAIN = "actor.update.forward:kill9@step=4,once"


@pytest.mark.campaign
@pytest.mark.parametrize(("schedule", "staleness"), [("async", 2), ("one_step_off", 1)])
def test_a_training_that_loses_everything_in_turn_trains_each_prompt_once(
    training: Any, run_words: list[str], schedule: str, staleness: int
) -> None:
    own = ["trainer.asynchronous.max_staleness=2"] if schedule == "async" else []
    faults = ";".join([REPLICA, ACTOR, IN_TRAINING, IN_WAITING, SLOWLY])
    run = training("broken", words_of(run_words, schedule, *own), faults)
    assert run.start().wait(END_S) == 128 + signal.SIGKILL, run.describe()
    assert run.start().wait(END_S) == 128 + signal.SIGKILL, run.describe()
    run.start().until(lambda _: SLOWLY in [fault["fault"] for fault in run.fired()], END_S)
    assert run.process is not None
    run.process.send_signal(signal.SIGTERM)
    # The weights were changing: the step is finished, and it was the last one.
    assert run.wait(END_S) in (0, 75), run.describe()
    assert [fault["fault"] for fault in run.fired()] == [REPLICA, ACTOR, IN_TRAINING, IN_WAITING, SLOWLY]
    oracles.assert_each_sample_once(run.path, STEPS_OF_STORY, BATCH_SIZE, SAMPLES, staleness)
    rows = {int(row["step"]): row for row in read_metrics(run.path / "metrics.jsonl") if "staleness/max" in row}
    assert sorted(rows) == list(range(1, STEPS_OF_STORY + 1))
    assert max(row["staleness/max"] for row in rows.values()) <= staleness
    assert max(row["staleness/max"] for row in rows.values()) > 0


@pytest.mark.campaign
def test_async_without_staleness_and_checkpoints_has_the_bits_of_sync_after_it_lost_its_ranks_twice(
    training: Any, run_words: list[str], undisturbed: Path
) -> None:
    words = [word for word in run_words if not word.startswith("trainer.save_freq=")]
    words += ["trainer.schedule=async", "trainer.asynchronous.max_staleness=0"]
    run = training("alone", words, ";".join([BAD_GRADIENT, ACTOR_LATER, LOST_AGAIN]), ("-c", PROGRAM))
    assert run.start().wait(END_S) == 0, run.describe()
    assert [fault["fault"] for fault in run.fired() if fault["fault"] != BAD_GRADIENT] == [ACTOR_LATER, LOST_AGAIN]
    said = " ".join((run.folder / "alone.out").read_text().split())
    assert "the run goes back to step 2, the newest checkpoint" in said and "back to step 3, the newest" in said
    assert run.status["restarts"] == {"actor0": 2} and not (run.path / "recovery").exists()
    # The committed end, and none on the way.
    assert [path.name for path in (run.path / "checkpoints").iterdir()] == ["step_4"]
    oracles.assert_each_sample_once(run.path, STEPS, BATCH_SIZE, SAMPLES)
    rows = {int(row["step"]): row for row in read_metrics(run.path / "metrics.jsonl")}
    assert [step for step, row in sorted(rows.items()) if "recovery/actor_restarts" in row] == [3, 4]

    exports = [(folder / "model" / "model.safetensors").read_bytes() for folder in (run.path, undisturbed)]
    assert exports[0] == exports[1]
    learnt = []
    for folder in (undisturbed, run.path):
        rows_of_run = read_metrics(folder / "metrics.jsonl")
        learnt.append(repr([{k: v for k, v in row.items() if k.startswith(("actor/", "reward/"))} for row in rows_of_run]))
    assert learnt[0] == learnt[1] and learnt[0].count("actor/loss") == STEPS
