"""What the commands that sample take over from a run whose rollouts are episodes of several turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from run_folders import make_run

from grpo_rl.commands.sampling_plan import EPISODES, data_of_run, sampling_plan, settings_of_run
from grpo_rl.models import builtin
from grpo_rl.plan.decisions import Plan


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "runs", "games", "actor_rollout_ref.rollout.name=hf", recipe="agents/word_game")


def planned(run: Path, *words: str) -> tuple[Plan, dict[str, Any]]:
    keys = settings_of_run(run) | {"data.val_files": data_of_run(run), "trainer.device": "cpu"}
    model = builtin.build("builtin:arithmetic", run / "model")
    return sampling_plan(keys, words, str(model), run / "logs" / "settings.yaml")


def test_an_evaluation_plays_the_episodes_of_the_run_with_any_processes(run: Path) -> None:
    plan, settings = planned(run)
    assert plan.plays_episodes and plan.reward.scores
    own = plan.config.actor_rollout_ref.rollout.multi_turn
    assert own.environment.name == "word_game" and own.environment.options == {"turns": 8}
    assert settings_of_run(run, "vllm")[f"{EPISODES}environment.name"] == "word_game", "with any engine"
    assert planned(run, f"{EPISODES}environment.num_workers=1")[1] == settings
    assert planned(run, f"{EPISODES}environment.options={{turns: 3}}")[1] != settings


def test_in_a_conversation_a_person_is_the_environment(run: Path) -> None:
    found = settings_of_run(run, without=("reward.", EPISODES))
    assert found["actor_rollout_ref.rollout.name"] == "hf"
    assert not any(key.startswith((EPISODES, "reward.")) for key in found)
