"""A run of an agent from files as verl's GSM8K example has them: the configuration file, and a tool configuration with our class."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from whole_runs import arithmetic, train

from grpo_rl.models import builtin
from grpo_rl.models.load import load_tokenizer

pytestmark = pytest.mark.campaign

CONFIG = """
hydra:
  searchpath:
    - file://verl/trainer/config

defaults:
  - ppo_trainer
  - _self_

data:
  max_response_length: 96

actor_rollout_ref:
  hybrid_engine: True
  rollout:
    name: hf
    multi_turn:
      enable: True
      max_assistant_turns: 3
"""
TOOLS = """
tools:
  - class_name: "check_answer"
    config:
      type: native
    tool_schema:
      type: "function"
      function:
        name: "calc_gsm8k_reward"
        description: "Scores an answer."
        parameters:
          type: "object"
          properties: {answer: {type: "string"}}
          required: ["answer"]
"""
# A random model writes no calls in any format: here every turn is one.
PARSER = """
def calls(text):
    return [{"name": "calc_gsm8k_reward", "arguments": {"answer": text}}]
"""


def test_a_run_from_verls_files_calls_its_tool_and_trains(tmp_path: Path) -> None:
    model = builtin.build("builtin:arithmetic", tmp_path / "model")
    # Many tokens end a turn, so that a random model ends its turns.
    ends = [load_tokenizer(str(model)).eos_token_id, *range(40, 60)]
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "gsm8k_multiturn_grpo.yaml").write_text(CONFIG)
    (tmp_path / "gsm8k_tool_config.yaml").write_text(TOOLS)
    (tmp_path / "parser.py").write_text(PARSER)
    words = [
        word for word in arithmetic(model) if not word.startswith(("data.max_response_length", "actor_rollout_ref.rollout.kv"))
    ]
    run = train(
        tmp_path,
        "verl",
        f"--config-path={tmp_path / 'config'}",
        "--config-name=gsm8k_multiturn_grpo",
        *words,
        "data.return_raw_chat=True",
        "actor_rollout_ref.rollout.mode=async",
        f"actor_rollout_ref.rollout.multi_turn.tool_config_path={tmp_path / 'gsm8k_tool_config.yaml'}",
        "actor_rollout_ref.rollout.multi_turn.format=parser.py:calls",
        "trainer.total_training_steps=2",
        "trainer.save_freq=-1",
        "trainer.test_freq=-1",
        "trainer.save_rollouts=true",
        "trainer.val_before_train=False",
    )
    assert sorted(run.steps) == [1, 2] and run.steps[2]["episode/tool_calls"] > 0.5
    logged = [line for line in run.rollouts(2) if len(line["episode"]["messages"]) > 1]
    assert logged
    for line in logged:
        answers = [message for message in line["episode"]["messages"] if message["role"] == "tool"]
        assert answers and all(one["name"] == "calc_gsm8k_reward" for one in answers)
        assert all(one["content"].endswith((" is wrong.", " is right.")) for one in answers)
