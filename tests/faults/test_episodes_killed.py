"""Trainings on episodes, whose driver is killed: every prompt is trained exactly once, in every schedule."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import oracles
import pytest
from tiny_run import BATCH_SIZE, SAMPLES, STEPS

from grpo_rl.models.load import load_tokenizer
from grpo_rl.telemetry.metrics.metrics_file import read_metrics
from grpo_rl.telemetry.rollouts.rollout_log import read_rollouts

END_S = 300.0
pytestmark = [pytest.mark.campaign, pytest.mark.timeout(1200)]
GAME = """
from grpo_rl.envs.contract import Observation

class Digits:
    async def reset(self, start):
        return Observation()

    async def step(self, turn):
        done = turn.index == 2
        digits = sum(letter.isdigit() for letter in turn.text)
        return Observation(() if done else ({"role": "user", "content": "and"},), float(digits % 3), done, {"digits": digits})

    async def close(self):
        pass
"""
KILLED = "driver.phase:kill9@step=3,phase=update_actor,once"


@pytest.fixture(scope="module")
def many_ends(run_words: list[str]) -> None:
    """Give the random model more tokens that end a turn, so that its episodes have several."""
    (word,) = [word for word in run_words if word.startswith("actor_rollout_ref.model.path=")]
    folder = Path(word.partition("=")[2])
    ends = [load_tokenizer(str(folder)).eos_token_id, *range(40, 60)]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))


@pytest.mark.parametrize(("schedule", "staleness"), [("sync", 0), ("one_step_off", 1), ("async", 2)])
def test_a_killed_training_on_episodes_goes_on_and_trains_each_prompt_once(
    training: Any, run_words: list[str], many_ends: None, tmp_path: Path, schedule: str, staleness: int
) -> None:
    (tmp_path / "game.py").write_text(GAME)
    turns = "actor_rollout_ref.rollout.multi_turn"
    words = [word for word in run_words if not word.startswith(("reward.functions=", "data.max_response_length="))]
    words += [
        f"{turns}.enable=true",
        f"{turns}.environment.name={tmp_path / 'game.py'}:Digits",
        f"{turns}.environment.num_workers=1",
        "reward.functions=[]",
        "data.max_response_length=80",
        "trainer.save_rollouts=true",
        f"trainer.schedule={schedule}",
        *(["trainer.asynchronous.max_staleness=2"] if schedule == "async" else []),
    ]
    run = training("episodes", words, KILLED)
    assert run.start().wait(END_S) == -signal.SIGKILL, run.describe()
    assert run.start().wait(END_S) == 0, run.describe()
    oracles.assert_each_sample_once(run.path, STEPS, BATCH_SIZE, SAMPLES, staleness)
    rows = [row for row in read_metrics(run.path / "metrics.jsonl") if "actor/loss" in row]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all(row["episode/turns"] > 1 and row["episode/failed"] == 0 and "env/digits" in row for row in rows)
    assert all(0 < row["episode/context_token_fraction"] < 1 for row in rows)
    if schedule == "sync":
        # Trainer and engine agree on every sampled token, over whole contexts.
        assert max(row["rollout/logprob_diff_max"] for row in rows) < 1e-4
    for row in read_rollouts(run.path / "rollouts" / f"step_{STEPS}.jsonl"):
        assert sum(message.get("reward") or 0 for message in row["episode"]["messages"]) == row["reward"]
