"""Whole trainings whose workers are killed in the middle of their work end as if nothing had happened."""

from __future__ import annotations

import oracles
import pytest
from tiny_run import BAD_GRADIENT, BATCH_SIZE, SAMPLES, STEPS

from grpo_rl.telemetry.metrics_file import read_metrics

END_S = 300.0
pytestmark = pytest.mark.timeout(700)

REPLICA = "rollout.step:kill9@step=1,worker=rollout1,n=5,once"
REFERENCE = "reference.logprobs:kill9@step=2,once"
ACTOR = "actor.update.mid_backward:kill9@step=3,micro_batch=1,once"


def test_a_replica_the_reference_and_the_actor_are_killed_and_the_run_ends_as_the_undisturbed_one(
    training, run_words, undisturbed
):
    broken = training("broken", run_words, ";".join([BAD_GRADIENT, REPLICA, REFERENCE, ACTOR])).start()
    broken.until(lambda status: status["phase"] != "start", END_S)
    assert broken.wait(END_S) == 0, broken.describe()
    assert undisturbed.wait(END_S) == 0, undisturbed.describe()

    happened = [fault["fault"] for fault in broken.fired() if fault["fault"] != BAD_GRADIENT]
    assert happened == [REPLICA, REFERENCE, ACTOR]
    assert broken.status["restarts"] == {"rollout1": 1, "reference0": 1, "actor0": 1}
    assert undisturbed.status["restarts"] == {}
    rows = {int(row["step"]): row for row in read_metrics(broken.path / "metrics.jsonl")}
    assert rows[1]["recovery/resampled"] > 0, "it was killed with requests in flight"
    assert oracles.state_hash(broken.path, STEPS) == oracles.state_hash(undisturbed.path, STEPS)
    assert oracles.learnt(broken.path) == oracles.learnt(undisturbed.path)
    oracles.assert_each_sample_once(broken.path, STEPS, BATCH_SIZE, SAMPLES)
    oracles.assert_nothing_left(broken)
