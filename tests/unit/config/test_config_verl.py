"""Launch commands written for verl: taken as they are where their meaning exists, answered where it does not."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
from config_tools import EIGHT_GPUS, A, R, verls_commands

from grpo_rl.config.checks.all_rules import check
from grpo_rl.config.compose import Composed, compose
from grpo_rl.config.overrides import read
from grpo_rl.config.schema.fields import free_mapping, leaves, sections
from grpo_rl.config.verl.verl_answers import ANSWERS, reply
from grpo_rl.errors import ConfigError
from grpo_rl.plan.make import make_plan

COMMANDS = {name: words for name, words in verls_commands().items() if not name.startswith("agents/")}


@pytest.fixture(autouse=True)
def _wandb_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands log to it; whether it is there is not their subject, and it comes with an extra that tests do not install."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: object() if name == "wandb" else find_spec(name, *more))


def test_no_key_of_the_schema_has_an_answer_for_keys_that_are_missing() -> None:
    assert not set(ANSWERS) & set(leaves())
    assert not set(ANSWERS) & set(sections())
    assert not [key for key in ANSWERS if free_mapping(key)]


@pytest.mark.parametrize("key", sorted(ANSWERS))
def test_every_answer_takes_its_right_values_and_null_and_refuses_or_notes_others_with_advice(key: str) -> None:
    answer = ANSWERS[key]
    for value in (None, *answer.accepts):
        assert reply(key, value) == ([], [])
    other = reply(key, "something else")
    assert other is not None
    problems, notes = other
    (line,) = [*problems, *notes]
    assert line.startswith(key) and answer.advice in line
    assert bool(notes) == answer.hint == ("has no meaning here" in line)


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("actor_rollout_ref.model.use_remove_padding", [True, "True", "true"]),
        (f"{A}.fsdp_config.model_dtype", ["fp32", "float32"]),
        (f"{R}.over_sample_rate", [0, "0", 0.0]),
    ],
)
def test_the_right_value_is_right_in_any_spelling(key: str, values: list[object]) -> None:
    for value in values:
        assert reply(key, value) == ([], [])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (f"{R}.over_sample_rate", False),
        (f"{R}.do_sample", 1),
        (f"{R}.pipeline_model_parallel_size", True),
        (f"{R}.logprobs_mode", "raw_logprobs"),
    ],
)
def test_other_values_are_refused_and_true_is_not_one(key: str, value: object) -> None:
    answer = reply(key, value)
    assert answer is not None
    (problem,) = answer[0]
    assert "only" in problem and "possible here" in problem


def test_every_key_that_an_answer_names_exists() -> None:
    groups = {key.partition(".")[0] for key in leaves()}
    named = {
        (key, word.rstrip("."))
        for key, answer in ANSWERS.items()
        for word in re.findall(r"[\w.]+", f"{answer.advice} {answer.target or ''}")
        if "." in word.rstrip(".") and word.partition(".")[0] in groups
    }
    assert len(named) > 100
    assert not [one for one in named if not ({one[1]} & {*leaves(), *sections()} or free_mapping(one[1]))]


def test_a_mapping_of_keys_is_answered_key_by_key() -> None:
    problems = read(["reward_model={strategy: fsdp, model: {fsdp_config: 1}, micro_batch_size: null}"]).problems
    assert [problem.partition(":")[0] for problem in problems] == ["reward_model.model.fsdp_config"]


def test_a_hint_in_a_recipe_is_noted_with_the_recipes_name(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("defaults: [/recipe/arithmetic/grpo, _self_]\ntrainer: {balance_batch: false}\n")
    (note,) = compose([f"recipe={recipe}"]).notes
    assert note.startswith("trainer.balance_batch=false: has no meaning here (in recipe ")


@pytest.fixture(scope="module")
def away(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with what verl's examples expect to be there: a reward of its own and an adapter."""
    folder = tmp_path_factory.mktemp("verl")
    (folder / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return {'score': 1.0, 'accuracy_reward': 1.0, 'format_reward': 0.0}\n"
    )
    (folder / "adapter_model.safetensors").touch()
    settings = {"peft_type": "LORA", "r": 32, "lora_alpha": 64, "target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def planned(name: str, away: Path, *more: str) -> str:
    """Return the plan of one of verl's commands on eight H100, in one line."""
    places = {"REWARD_FILE": f"{away}/reward.py", "ADAPTER": str(away)}
    words = [f"{key}={places.get(value, value)}" for key, value in COMMANDS[name].items()]
    return " ".join(make_plan(compose([*words, *more, "machine=8xH100-80GB", "trainer.dry_run=true"])).render().split())


NOT_HERE = {
    "codapo_trainer/run_qwen2_5_math_1_5b": "codapo_top_k: unknown key",
    "otb_trainer/run_qwen3_8b": "unknown advantage estimator 'optimal_token_baseline'",
    # verl's mean over a micro-batch would depend on the cut.
    "rollout_correction/run_qwen2_5_7b": "rollout_is_batch_normalize",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_verls_own_commands_are_planned_as_they_are(name: str, away: Path) -> None:
    if reason := NOT_HERE.get(name):
        with pytest.raises(ConfigError, match=reason):
            planned(name, away)
    else:
        assert "fit on 8xH100-80GB" in planned(name, away)


PPO = "data.train_files=x.parquet actor_rollout_ref.model.path=Qwen/Qwen3-8B critic.optim.lr=1e-5 algorithm.adv_estimator=gae"


def test_a_command_like_verls_is_told_which_defaults_are_not_verls() -> None:
    (note,) = [note for note in compose(PPO.split()).notes if "other defaults than verl's" in note]
    assert note.endswith(": actor.use_kl_loss=true (false), rollout.n=8 (1), rollout.seed=0 (42)")
    for other in (
        ["recipe=arithmetic/grpo"],
        [*PPO.split(), "data.responses=rows"],
        [*PPO.split(), "data.train_files=task:arithmetic"],
        [*PPO.split(), "recipe=arithmetic/grpo"],
    ):
        assert not [note for note in compose(other).notes if "verl's" in note]


def test_the_kl_in_the_reward_alone_takes_it_out_of_the_loss() -> None:
    composed = compose([*PPO.split(), "algorithm.use_kl_in_reward=True"])
    assert composed.config.actor_rollout_ref.actor.use_kl_loss is False
    assert any(note.startswith(f"{A}.use_kl_loss=false: the KL is in the reward") for note in composed.notes)
    given = compose([*PPO.split(), "algorithm.use_kl_in_reward=True", f"{A}.use_kl_loss=True"])
    assert given.config.actor_rollout_ref.actor.use_kl_loss is True


OLDER = {
    "custom_reward_function": {"path": "mine.py"},
    "reward_model": {"reward_manager": "dapo", "overlong_buffer": {"enable": True, "len": 64}},
}
"""Rewards as verl's files named them until 0.8."""


def test_verls_older_places_of_rewards_are_taken_from_words_and_from_files(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(json.dumps({"defaults": ["ppo_trainer", "_self_"], **OLDER}))
    words = ["custom_reward_function.path=mine.py", "reward_model.reward_manager=dapo"]
    words += ["reward_model.overlong_buffer.enable=True", "reward_model.overlong_buffer.len=64"]
    for given in ([f"recipe={tmp_path}/mine.yaml"], words):
        composed = compose(given)
        reward = composed.config.reward
        assert Path(reward.custom_reward_function.path or "").name == "mine.py" and reward.overlong_buffer.tokens == 64
        assert any(
            note.startswith("reward_model.overlong_buffer.len=64: is reward.overlong_buffer.len here")
            for note in composed.notes
        )
    assert compose([*words, "reward_model.overlong_buffer.enable=False"]).config.reward.overlong_buffer.tokens is None


# ---- agents: GSM8K with a tool, GSM8K with an interaction, and ReTool, composed as whole command lines ---------------

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
