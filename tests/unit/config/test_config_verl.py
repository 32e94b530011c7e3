"""Launch commands written for verl: taken as they are where their meaning exists, answered if it does not."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
from compositions import compose
from config_tools import EIGHT_GPUS, A, R, verls_commands

from grpo_rl.config import effects
from grpo_rl.config.checks.all_rules import check
from grpo_rl.config.compose import Composed
from grpo_rl.config.overrides import read
from grpo_rl.config.schema.fields import free_mapping, leaves, sections, value_of
from grpo_rl.config.verl.verl_answers import ANSWERS, place_of, refusal
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


def test_every_answer_takes_its_right_values_and_null_and_refuses_others_with_advice() -> None:
    for key, answer in ANSWERS.items():
        assert [refusal(key, value) for value in (None, *answer.accepts)] == [None] * (1 + len(answer.accepts)), key
        problem = refusal(key, "something else") or ""
        assert (problem == "") == answer.means_nothing and answer.advice in problem, key
        assert place_of(key, "something else") == (answer.target or key)


@pytest.mark.parametrize(
    ("key", "right", "wrong"),
    [
        (f"{A}.fsdp_config.mixed_precision", ["bf16", "bfloat16"], ["fp16"]),
        (f"{R}.over_sample_rate", [0, "0", 0.0], [False, 0.5]),
        (f"{R}.do_sample", [True, "True", "true"], [1]),
        (f"{R}.pipeline_model_parallel_size", [1], [True]),
        (f"{R}.logprobs_mode", ["processed_logprobs"], ["raw_logprobs"]),
    ],
)
def test_a_right_value_is_right_in_any_spelling_and_true_is_not_1(key: str, right: list[object], wrong: list[object]) -> None:
    assert [refusal(key, value) for value in right] == [None] * len(right)
    for value in wrong:
        assert "is possible here" in (refusal(key, value) or "")


def test_every_key_that_an_answer_names_exists() -> None:
    groups = {key.partition(".")[0] for key in leaves()}
    named = {
        (key, word.rstrip("."))
        for key, answer in ANSWERS.items()
        for word in re.findall(r"[\w.]+", f"{answer.advice} {answer.target or ''}")
        if "." in word.rstrip(".") and word.partition(".")[0] in groups
    }
    assert len(named) > 60
    assert not [one for one in named if not ({one[1]} & {*leaves(), *sections()} or free_mapping(one[1]))]


def test_a_mapping_of_keys_is_answered_key_by_key() -> None:
    problems = read(["reward_model={strategy: fsdp, model: {input_tokenizer: 1}, micro_batch_size: null}"]).problems
    assert [problem.partition(":")[0] for problem in problems] == ["reward_model.model.input_tokenizer"]


def test_keys_of_speed_alone_are_named_in_one_line_from_words_and_recipes(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("defaults: [/recipe/arithmetic/grpo, _self_]\ntrainer: {balance_batch: false}\n")
    (note,) = compose([f"recipe={recipe}", f"{A}.ppo_micro_batch_size=4", "data.trust_remote_code=True"]).notes
    assert note.startswith(f"{A}.ppo_micro_batch_size, data.trust_remote_code, trainer.balance_batch: no meaning here")


LAUNCHED = {
    f"{A}.optim.warmup_style=cosine": (f"{A}.optim.lr_scheduler_type", "cosine"),
    f"{A}.grad_clip=0.5": (f"{A}.optim.clip_grad", 0.5),
    "critic.grad_clip=0.5": ("critic.optim.clip_grad", 0.5),
    f"{A}.fsdp_config.ulysses_sequence_parallel_size=2": (f"{A}.ulysses_sequence_parallel_size", 2),
    f"{R}.response_length=77": ("data.max_response_length", 77),
    "critic.model.fsdp_config.param_offload=true": ("critic.fsdp.param_offload", True),
    "rollout.nnodes=1": (f"{R}.nnodes", 1),
    "rollout.test_freq=7": ("trainer.test_freq", 7),
    "data.tokenizer=tok": ("actor_rollout_ref.model.tokenizer_path", "tok"),
    "ray_init.num_cpus=3": ("ray_kwargs.ray_init.num_cpus", 3),
    "reward.reward_kwargs.overlong_buffer_cfg.len=9": ("reward.overlong_buffer.len", 9),
    f"{A}.policy_loss.tau_pos=1.0": (f"{A}.policy_loss.options", {}),
}


def test_what_launch_scripts_name_otherwise_is_taken_with_a_note() -> None:
    composed = compose(["recipe=arithmetic/grpo", *LAUNCHED, f"{A}.optim.total_training_steps=50"])
    for word, (key, value) in LAUNCHED.items():
        assert value_of(composed.config, key) == value, word
        assert value == {} or any(note.startswith(f"{word}: is {key} here") for note in composed.notes), word


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


def test_a_critics_model_under_grpo_is_a_line_of_the_plan() -> None:
    config = compose(["recipe=arithmetic/grpo", "critic.model.path=Qwen/Qwen3-8B"]).config
    assert check(config, EIGHT_GPUS) == []
    (note,) = effects.notes(config, EIGHT_GPUS, reference="ref", old_logprobs=True)
    assert note.startswith("critic.model.path=Qwen/Qwen3-8B: has no effect in this run: algorithm.adv_estimator=grpo")


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
    (note,) = [note for note in composed.notes if "no meaning here" in note]
    assert f"{R}.trace.backend" in note


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
