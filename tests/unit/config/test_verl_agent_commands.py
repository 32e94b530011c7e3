"""verl's launch commands for agents: GSM8K with a tool, GSM8K with an interaction, and ReTool, composed as whole command lines."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from config_tools import EIGHT_GPUS, R, verls_commands

from grpo_rl.config.checks.all_rules import check
from grpo_rl.config.compose import Composed, compose
from grpo_rl.errors import ConfigError

AGENTS = {name: [f"{key}={value}" for key, value in words.items()] for name, words in verls_commands().items()}
SHARED = AGENTS["agents/gsm8k"]

GSM8K_FILE = """
hydra:
  searchpath:
    - file://verl/trainer/config

defaults:
  - ppo_trainer
  - _self_

data:
  max_prompt_length: 1024
  max_response_length: 1024
  train_batch_size: 256
  return_raw_chat: True

actor_rollout_ref:
  hybrid_engine: True
  rollout:
    name: vllm
    multi_turn:
      enable: True
      max_assistant_turns: 5
"""


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Return a folder with files of verl's examples, their contents as verl has them where a configuration is composed."""
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "gsm8k_multiturn_grpo.yaml").write_text(GSM8K_FILE)
    (tmp_path / "tools.yaml").write_text("tools: [{class_name: check_answer, config: {type: native}}]\n")
    (tmp_path / "interaction.yaml").write_text("interaction: [{name: gsm8k, class_name: gsm8k, config: {}}]\n")
    (tmp_path / "recipe" / "retool").mkdir(parents=True)
    (tmp_path / "recipe" / "retool" / "retool.py").write_text("class CustomRLHFDataset: ...\n")
    return tmp_path


@pytest.fixture(autouse=True)
def _wandb_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands log to it; whether it is there is not their subject, and it comes with an extra that tests do not install."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: object() if name == "wandb" else find_spec(name, *more))


def taken(words: list[str]) -> Composed:
    """Return what the words compose, which no rule between keys refuses on eight GPUs."""
    composed = compose(words)
    assert check(composed.config, EIGHT_GPUS) == []
    return composed


def launched(files: Path, *more: str) -> list[str]:
    return [f"--config-path={files}/config", "--config-name='gsm8k_multiturn_grpo'", *SHARED, *more]


def test_gsm8k_with_a_tool_is_taken_as_it_is(files: Path) -> None:
    composed = taken(launched(files, f"{R}.multi_turn.tool_config_path={files}/tools.yaml"))
    turns = composed.config.actor_rollout_ref.rollout.multi_turn
    assert (turns.enable, turns.max_assistant_turns, turns.format) == (True, 5, "hermes")
    assert turns.tool_config_path == f"{files}/tools.yaml"
    assert composed.config.data.train_batch_size == 256 and composed.config.actor_rollout_ref.rollout.n == 16
    noted = {note.partition("=")[0] for note in composed.notes}
    assert f"{R}.trace.backend" in noted


def test_gsm8k_with_an_interaction_is_taken_as_it_is(files: Path) -> None:
    words = launched(
        files, f"{R}.multi_turn.interaction_config_path={files}/interaction.yaml", f"{R}.multi_turn.max_user_turns=5"
    )
    turns = taken(words).config.actor_rollout_ref.rollout.multi_turn
    assert (turns.interaction_config_path, turns.environment.name) == (f"{files}/interaction.yaml", None)
    (problem,) = check(compose([*words, f"{R}.multi_turn.environment.name=gsm8k"]).config, EIGHT_GPUS)
    assert "keep one" in problem


def test_retool_is_taken_where_its_reward_is_named_as_verl_named_it_and_names_it_now(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(files)
    own = ["reward.custom_reward_function.path=recipe/retool/retool.py", "reward.custom_reward_function.name=compute_score"]
    words = AGENTS["agents/retool"]
    config = taken([*words, *own]).config
    turns = config.actor_rollout_ref.rollout.multi_turn
    assert (turns.enable, turns.max_user_turns, turns.max_assistant_turns, turns.format) == (True, 16, 16, "hermes")
    assert config.actor_rollout_ref.rollout.val_kwargs.n == 30
    older = taken([*words, *(word.removeprefix("reward.") for word in own)])
    assert older.config == config
    assert "custom_reward_function.name=compute_score: is reward.custom_reward_function.name here" in older.notes


def test_a_file_that_is_named_without_its_folder_is_answered_with_a_recipe() -> None:
    with pytest.raises(ConfigError) as raised:
        compose(["--config-name=gsm8k_multiturn_grpo", *SHARED])
    (problem,) = raised.value.problems
    assert "recipe=FOLDER/gsm8k_multiturn_grpo.yaml" in problem
    assert compose(["--config-path=config", "--config-name=ppo_trainer", *SHARED]).recipe is None
