"""A whole run that is ill: the look before its start warns of the reward, and its first alarm ends it as `trainer.stop_on` says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from whole_runs import RUN_TIMEOUT_S, arithmetic, train

from grpo_rl.checkpoint.manifest import verify
from grpo_rl.models import builtin

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(RUN_TIMEOUT_S)]
MINE = "def always_one(data_source, solution_str, ground_truth, extra_info):\n    return 1.0\n"


def test_a_run_whose_reward_is_constant_is_warned_and_ends_with_its_alarm_and_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "constant.py").write_text(MINE)
    words = [
        *arithmetic(builtin.build("builtin:arithmetic", tmp_path / "model")),
        "reward.functions=[constant.py:always_one]",
        "actor_rollout_ref.actor.use_kl_loss=false",
        "actor_rollout_ref.rollout.name=hf",
        "~actor_rollout_ref.rollout.kv_cache_gib",
        "data.val_files=[]",
        "trainer.total_training_steps=6",
        "trainer.stop_on=[kl_runaway,reward_constant]",
    ]
    run = train(tmp_path, "ill", *words, exit_code=76)
    assert "the right answer gets no more than an empty one (1 and 1)" in run.output
    assert "stopped: step 3, save: Every response gets the same reward" in run.output
    assert "[reward_constant, since step 1; trainer.stop_on]" in run.output
    assert "step 3 of 6 is saved: the same command goes on from it" in run.output
    assert list(run.steps) == [1, 2, 3] and run.steps[3]["alarm/reward_constant"] == 1
    assert 0 < run.steps[3]["perf/host_memory_share"] < 1
    assert verify(run.path / "checkpoints" / "step_3").state["step"] == 3
    status = json.loads((run.path / "status.json").read_text())
    assert status["last_commit"] == 3 and status["error"]["exit_code"] == 76
    assert not (run.path / "logs" / "error.log").exists(), "an alarm is no error: there is no traceback to read"
