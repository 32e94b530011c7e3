"""The way from the command line to a Config: overrides, recipes, interpolations, and what is refused on the way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import compositions
import pytest
import yaml
from config_tools import A, R, any_settings, nested
from hypothesis import HealthCheck, given, settings

from grpo_rl.config.compose import Composed, compose, to_yaml
from grpo_rl.errors import ConfigError

OWN = ["data.train_files=a.parquet", "actor_rollout_ref.model.path=some/model"]


def problems_of(*words: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        compose(words)
    return caught.value.problems


# ---- what is taken -------------------------------------------------------------------------------------


def test_the_plain_command_is_the_embedded_recipe() -> None:
    composed = compose([])
    assert (composed.recipe, composed.recipe_is_default) == ("arithmetic/grpo", True)
    assert composed.config.actor_rollout_ref.model.path == "builtin:arithmetic"


@pytest.mark.parametrize("word", OWN)
def test_naming_a_model_or_data_leaves_the_embedded_recipe_out(word: str) -> None:
    composed = compose([word])
    assert composed.recipe is None and composed.config.data.train_batch_size == 1024


def test_a_verl_command_with_its_signs_and_spellings_is_taken() -> None:
    words = ["+trainer.save_freq=5", "++trainer.test_freq=6", "data.truncation='left'", "trainer.val_before_train=False"]
    trainer = compose([*OWN, *words, """trainer.logger=["console","wandb"]"""]).config.trainer
    assert (trainer.save_freq, trainer.test_freq, trainer.val_before_train) == (5, 6, False)
    assert trainer.logger == ["console", "wandb"]


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("data.train_files=task:arithmetic?split=train&num_rows=5", ["task:arithmetic?split=train&num_rows=5"]),
        ("data.train_files=[a.parquet,b.parquet]", ["a.parquet", "b.parquet"]),
        ("data.train_files='my data.parquet'", ["my data.parquet"]),
        ("data.train_files=/a (1).parquet", ["/a (1).parquet"]),
    ],
)
def test_files_need_no_quotes(word: str, value: list[str]) -> None:
    assert compose([word]).config.data.train_files == value


@pytest.mark.parametrize("name", ["001", "true", "a=b", "it's"])
def test_a_name_is_text_as_it_was_typed(name: str) -> None:
    assert compose([f"trainer.experiment_name={name}"]).config.trainer.experiment_name == name


def test_free_mappings_take_any_key_without_a_plus() -> None:
    composed = compose([f"{R}.engine_kwargs.vllm.seed=3", "+actor_rollout_ref.model.override_config.attention_dropout=0.1"])
    assert composed.config.actor_rollout_ref.rollout.engine_kwargs == {"vllm": {"seed": 3}}
    assert composed.config.actor_rollout_ref.model.override_config == {"attention_dropout": 0.1}


def test_a_key_may_refer_to_another() -> None:
    composed = compose(["trainer.project_name=mine", f"{A}.ppo_mini_batch_size=${{data.train_batch_size}}"])
    assert composed.config.trainer.default_local_dir == "runs/mine"
    assert composed.config.actor_rollout_ref.actor.ppo_mini_batch_size == composed.config.data.train_batch_size


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["recipe=gsm8k/qwen2.5-7b", "machine=2x8xH100-80GB", "seed=3", f"~{A}.ppo_max_token_len_per_gpu"],
        [
            "algorithm=dapo",
            "+algorithm.adv_options={std: batch}",
            "trainer.logger=[console]",
            "custom_reward_function.path=x.py",
        ],
        ["-cn", "ppo_trainer", "algorithm.adv_options={}", "trainer.project_name=${oc.env:HOME}", f"{A}.grad_clip=0.5"],
        ["recipe=arithmetic/lora", "trainer.save_frq=1", f"{R}.n=eight", "trainer.project_name=${no.such}"],
    ],
)
def test_what_other_tests_compose_of_files_that_were_composed_before_is_what_hydra_composes(words: list[str]) -> None:
    def result(compose_words: Callable[[list[str]], Composed]) -> Composed | list[str]:
        try:
            return compose_words(words)
        except ConfigError as error:
            return error.problems

    result(compositions.compose)
    assert result(compositions.compose) == result(compose)


# ---- recipes -------------------------------------------------------------------------------------------


def recipe(folder: Path, name: str, content: Any) -> str:
    path = folder / name
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return f"recipe={path}"


def test_the_command_line_wins_over_the_recipe_and_the_recipe_over_the_defaults(tmp_path: Path) -> None:
    word = recipe(tmp_path, "my.yaml", {"trainer": {"save_freq": 5, "test_freq": 6}})
    trainer = compose([word, "trainer.save_freq=7"]).config.trainer
    assert (trainer.save_freq, trainer.test_freq, trainer.total_epochs) == (7, 6, 30)


def test_a_tilde_goes_back_to_the_default_whatever_the_recipe_says(tmp_path: Path) -> None:
    content = nested({"trainer.save_freq": 5, "trainer.project_name": "x"})
    config = compose([recipe(tmp_path, "my.yaml", content), "~trainer"]).config
    assert (config.trainer.save_freq, config.trainer.default_local_dir) == (-1, "runs/grpo_rl")


@pytest.mark.parametrize("word", [f"{R}.engine_kwargs={{}}", f"~{R}.engine_kwargs", f"~{R}.engine_kwargs.vllm"])
def test_a_mapping_of_the_recipe_is_cleared(tmp_path: Path, word: str) -> None:
    content = nested({f"{R}.engine_kwargs": {"vllm": {"a": 1}}})
    composed = compose([recipe(tmp_path, "my.yaml", content), word])
    assert composed.config.actor_rollout_ref.rollout.engine_kwargs == {}


def test_a_recipe_builds_on_another(tmp_path: Path) -> None:
    content = {"defaults": ["/recipe/arithmetic/grpo"], "trainer": {"seed": 9}}
    config = compose([recipe(tmp_path, "my.yaml", content), f"{R}.n=3"]).config
    assert config.actor_rollout_ref.model.path == "builtin:arithmetic"
    assert (config.trainer.seed, config.actor_rollout_ref.rollout.n) == (9, 3)


def test_a_group_with_all_its_lines_commented_out_changes_nothing_and_dots_nest(tmp_path: Path) -> None:
    word = recipe(tmp_path, "my.yaml", "trainer:\n  # save_freq: 5\nactor_rollout_ref:\n  actor:\ndata.seed: 3\n")
    config = compose([word]).config
    assert (config.trainer.save_freq, config.data.seed) == (-1, 3)


def test_keys_of_verl_in_a_recipe_are_answered_as_on_the_command_line(tmp_path: Path) -> None:
    good = recipe(tmp_path, "good.yaml", nested({"actor_rollout_ref.hybrid_engine": True, "trainer.balance_batch": True}))
    assert compose([good]).config == compose(["data.train_files=[]"]).config
    (problem,) = problems_of(recipe(tmp_path, "bad.yaml", nested({"algorithm.use_pf_ppo": True})))
    assert problem.startswith("algorithm.use_pf_ppo=true") and "bad.yaml" in problem


# ---- what is saved -------------------------------------------------------------------------------------


def test_what_comes_from_the_environment_is_used_but_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_PROJECT", "hush-hush")
    monkeypatch.setenv("MY_SEED", "31")
    word = recipe(tmp_path, "my.yaml", {"trainer": {"seed": "${oc.env:MY_SEED}"}})
    composed = compose([word, "trainer.project_name=${oc.env:MY_PROJECT}"])
    assert (composed.config.trainer.seed, composed.config.trainer.default_local_dir) == (31, "runs/hush-hush")
    assert "hush" not in composed.yaml() and "31" not in composed.yaml()
    assert composed.resolved["trainer"]["default_local_dir"] == "runs/${oc.env:MY_PROJECT}"


def test_secrets_in_free_mappings_are_hidden_where_they_are_saved() -> None:
    composed = compose(
        ["reward.custom_reward_function.reward_kwargs.api_key=sk-123", f"+{R}.engine_kwargs.vllm.hf_token=sk-456"]
    )
    assert composed.config.reward.custom_reward_function.reward_kwargs == {"api_key": "sk-123"}
    assert "sk-" not in composed.yaml() and not any("sk-" in word for word in composed.overrides)


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(any_settings())
def test_a_saved_configuration_composes_to_the_same_again(tmp_path: Path, keys: dict[str, Any]) -> None:
    # The right to run a model folder's own code is not taken from a file.
    keys = {key: value for key, value in keys.items() if not key.endswith("trust_remote_code")}
    tree = nested(keys | {"data.seed": 1})
    (tmp_path / "first.yaml").write_text(to_yaml(tree))
    first = compose([f"recipe={tmp_path / 'first.yaml'}"])
    (tmp_path / "second.yaml").write_text(first.yaml())
    assert compose([f"recipe={tmp_path / 'second.yaml'}"]).config == first.config


# ---- what is not a recipe ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        "API=CANARY\nOTHER=CANARY",
        "user: 'CANARY\nmore",
        "password: CANARY\npassword: CANARY",
        "a: b\n\tCANARY: c",
        "-----BEGIN KEY-----\nCANARY\n-----END KEY-----",
    ],
)
def test_the_content_of_a_file_that_is_no_recipe_is_not_in_the_message(tmp_path: Path, content: str) -> None:
    (tmp_path / "secrets").write_text(content)
    (tmp_path / "link.yaml").symlink_to(tmp_path / "secrets")
    (problem,) = problems_of(f"recipe={tmp_path / 'link.yaml'}")
    assert "CANARY" not in problem and "link.yaml" in problem


# ---- relative paths ------------------------------------------------------------------------------------


def test_relative_paths_of_a_recipe_file_start_at_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "project" / "model").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    content = {
        "data.train_files": ["train.parquet", "../rows.jsonl", "task:arithmetic", "hf:a/b?split=train", "/abs.parquet"],
        "actor_rollout_ref.model.path": "model",
        "actor_rollout_ref.model.tokenizer_path": "organisation/name",
        f"{A}.policy_loss.loss_mode": "losses.py:mine",
        "reward.functions": ["auto", "0.2*rewards.py:mine", "my_package.module:other"],
        "reward.function_kwargs": {"rewards.py:mine": {"path": "left.alone"}},
        f"{R}.multi_turn.environment.name": "game.py:Game",
        f"{R}.multi_turn.tool_config_path": "tools.yaml",
        f"{R}.multi_turn.tools": {"calculator": {}, "tools.py:Mine": {"path": "left.alone"}},
        "trainer.default_local_dir": "runs",
    }
    word = recipe(tmp_path / "project", "my.yaml", nested(content))
    here, folder = tmp_path / "elsewhere", tmp_path / "project"
    config = compose([word]).config
    assert config.data.train_files == [
        f"{folder}/train.parquet", f"{folder}/../rows.jsonl", "task:arithmetic", "hf:a/b?split=train", "/abs.parquet"
    ]  # fmt: skip
    model = config.actor_rollout_ref.model
    assert (model.path, model.tokenizer_path) == (f"{folder}/model", "organisation/name")
    assert config.actor_rollout_ref.actor.policy_loss.loss_mode == f"{folder}/losses.py:mine"
    assert config.reward.functions == ["auto", f"0.2*{folder}/rewards.py:mine", "my_package.module:other"]
    assert config.reward.function_kwargs == {f"{folder}/rewards.py:mine": {"path": "left.alone"}}
    turns = config.actor_rollout_ref.rollout.multi_turn
    assert (turns.environment.name, turns.tool_config_path) == (f"{folder}/game.py:Game", f"{folder}/tools.yaml")
    assert turns.tools == {"calculator": {}, f"{folder}/tools.py:Mine": {"path": "left.alone"}}
    assert config.trainer.default_local_dir == "runs"
    typed = compose([word, "data.train_files=train.parquet", "reward.functions=[rewards.py:mine]"])
    assert typed.config.data.train_files == ["train.parquet"] and typed.config.reward.functions == ["rewards.py:mine"]
    assert typed.resolved["data"]["train_files"] == [f"{here}/train.parquet"]
    assert typed.resolved["reward"]["functions"] == [f"{here}/rewards.py:mine"]


def test_relative_paths_of_the_packages_recipes_are_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert compose(["recipe=gsm8k/qwen2.5-0.5b"]).config.data.train_files == ["data/gsm8k/train.parquet"]
    own = recipe(tmp_path, "my.yaml", "defaults: [/recipe/gsm8k/qwen2.5-0.5b, _self_]\ntrainer: {seed: 2}\n")
    assert compose([own]).config.data.train_files == ["data/gsm8k/train.parquet"]


def test_paths_in_options_of_a_recipe_file_start_at_its_folder(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("a")
    options = {"words": "words.txt", "more": ["./other.txt", "easy"], "size": 3}
    content = nested(
        {f"{R}.multi_turn.environment.options": options, "reward.function_kwargs": {"f.py:f": {"table": "words.txt"}}}
    )
    config = compose([recipe(tmp_path, "mine.yaml", content)]).config
    assert config.actor_rollout_ref.rollout.multi_turn.environment.options == {
        "words": f"{tmp_path}/words.txt", "more": [f"{tmp_path}/other.txt", "easy"], "size": 3
    }  # fmt: skip
    assert config.reward.function_kwargs == {f"{tmp_path}/f.py:f": {"table": f"{tmp_path}/words.txt"}}
