"""Whole trainings whose workers are killed in the middle of their work end as if nothing had happened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import oracles
import pytest
from oracles import Training

from grpo_rl.models import builtin
from grpo_rl.telemetry.metrics_file import read_metrics

END_S, STEPS = 300.0, 4
pytestmark = pytest.mark.timeout(700)

REPLICA = "rollout.step:kill9@step=1,worker=rollout1,n=5,once"
REFERENCE = "reference.logprobs:kill9@step=2,once"
ACTOR = "actor.update.mid_backward:kill9@step=3,micro_batch=1,once"


def words(model: Path) -> list[str]:
    return [
        f"actor_rollout_ref.model.path={model}",
        "data.train_files=task:arithmetic?split=train&num_rows=32",
        "data.train_batch_size=4",
        "data.max_prompt_length=16",
        "data.max_response_length=12",
        "reward.functions=[format]",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
        "actor_rollout_ref.actor.use_dynamic_bsz=false",
        "actor_rollout_ref.actor.kl_loss_coef=0.1",
        "actor_rollout_ref.actor.entropy_coeff=0.01",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.n_gpus_per_node=2",
        "trainer.heartbeat_s=2",
        f"trainer.total_training_steps={STEPS}",
        f"trainer.save_freq={STEPS}",
        "trainer.export_at_end=false",
    ]


def test_a_replica_the_reference_and_the_actor_are_killed_and_the_run_ends_as_the_undisturbed_one(
    tmp_path: Path, training: Callable[..., Training]
) -> None:
    model = builtin.build("builtin:arithmetic", tmp_path / "random")
    undisturbed = training("undisturbed", words(model)).start()
    broken = training("broken", words(model), ";".join([REPLICA, REFERENCE, ACTOR])).start()
    broken.until(lambda status: status["phase"] != "start", END_S)
    assert broken.wait(END_S) == 0, broken.describe()
    assert undisturbed.wait(END_S) == 0, undisturbed.describe()

    assert [fault["fault"] for fault in broken.fired()] == [REPLICA, REFERENCE, ACTOR]
    assert broken.status["restarts"] == {"rollout1": 1, "reference0": 1, "actor0": 1}
    assert undisturbed.status["restarts"] == {}
    rows = {int(row["step"]): row for row in read_metrics(broken.path / "metrics.jsonl")}
    assert rows[1]["recovery/resampled"] > 0, "it was killed with requests in flight"
    assert oracles.state_hash(broken.path, STEPS) == oracles.state_hash(undisturbed.path, STEPS)
    assert oracles.learnt(broken.path) == oracles.learnt(undisturbed.path)
    oracles.assert_each_sample_once(broken.path, STEPS, batch_size=4, n=4)
    oracles.assert_nothing_left(broken)
