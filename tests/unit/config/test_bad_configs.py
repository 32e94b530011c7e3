"""Whatever is mistyped is refused with its key and the rule; nothing that is right is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bad_configs import BAD, BAD_RECIPES
from compositions import compose
from config_tools import CPU, EIGHT_GPUS, config_of

from grpo_rl.config import command_line
from grpo_rl.config.checks.all_rules import check
from grpo_rl.config.convert import show
from grpo_rl.config.derived import Machine
from grpo_rl.errors import ConfigError
from grpo_rl.plan.make import refusals


def refusal(words: list[str]) -> list[str]:
    # What is wrong with a word by itself is part of what composing refuses, and costs a tenth of it.
    if problems := command_line.read(words).line.problems:
        return problems
    try:
        config = compose(words).config
    except ConfigError as error:
        return error.problems
    return list(check(config, CPU))


def refusal_with_functions(words: list[str]) -> list[str]:
    """The refusal of the plan, which looks up the functions that are named too; it takes ten times as long."""
    return refusals(compose(words).config, CPU)


@pytest.mark.parametrize(("words", "key", "said"), BAD, ids=[show(words)[:60] for words, _, _ in BAD])
def test_a_bad_configuration_is_refused_with_its_key_and_the_rule(words: list[str], key: str, said: str) -> None:
    problems = refusal(words)
    if not any(key in problem and said in problem for problem in problems):
        problems = refusal_with_functions(words)
    assert any(key in problem and said in problem for problem in problems), problems


@pytest.mark.parametrize(("text", "said"), BAD_RECIPES, ids=[show(text)[:40] for text, _ in BAD_RECIPES])
def test_a_bad_or_hostile_recipe_is_refused_and_runs_nothing(
    text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        compose(["recipe=mine.yaml"])
    assert said in str(caught.value) and all("\n" not in problem for problem in caught.value.problems)
    assert not Path("CANARY").exists()


def test_problems_of_words_values_and_between_keys_are_told_together() -> None:
    words = [
        "trainer.save_frq=1",
        "actor_rollout_ref.rollout.n=eight",
        "data.train_batch_size=33",
    ]
    words += ["actor_rollout_ref.actor.ppo_mini_batch_size=32"]
    words += ["trainer.project_name=${oc.env:NO_SUCH_VARIABLE}", "trainer.experiment_name=../x"]
    with pytest.raises(ConfigError) as caught:
        compose(words)
    text = str(caught.value)
    for said in ("save_frq", "n=eight", "must divide", "not found", "folder below"):
        assert said in text


def test_a_line_that_may_follow_from_another_problem_is_not_told() -> None:
    with pytest.raises(ConfigError) as caught:
        compose(["actor_rollout_ref.actor.ppo_mini_batch_size=x", "data.train_batch_size=33"])
    assert len(caught.value.problems) == 1


def test_a_value_of_the_environment_is_not_shown_in_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CANARY_TOKEN", "canary-93b1f0")
    with pytest.raises(ConfigError) as caught:
        compose(["actor_rollout_ref.rollout.n=${oc.env:CANARY_TOKEN}"])
    assert "canary-93b1f0" not in str(caught.value)


# ---- settings of model rewards that are refused before anything starts -----------------------------------

M, J = "reward.reward_model", "reward.judge"
JUDGED = {f"{J}.base_url": "http://127.0.0.1:8000/v1", f"{J}.model": "m"}
FIVE_GPUS = Machine(num_gpus=5, num_cpus=8, device="cuda")


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("rm")
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_text("")
    return {f"{M}.enable": True, f"{M}.model_path": str(folder)}


CASES: list[tuple[str, dict[str, Any], Machine, str, str]] = [
    ("off", {f"{M}.enable": True}, CPU, f"{M}.model_path is not set", "a head of one label"),
    ("off", {f"{M}.enable": True, f"{M}.model_path": "/no/where"}, CPU, f"{M}.model_path=/no/where", "no such folder"),
    ("model", {f"{M}.tokenizer_path": "/no/where"}, CPU, f"{M}.tokenizer_path=/no/where", "no such folder"),
    ("model", {f"{M}.max_token_len_per_gpu": 1000}, CPU, f"{M}.max_token_len_per_gpu=1000", "at least 1024"),
    ("model", {f"{M}.step_separator": "\n\n"}, CPU, f"{M}.step_separator", "adv_estimator=grpo_process"),
    ("model", {f"{M}.step_separator": ""}, CPU, f"{M}.step_separator=''", "cut nowhere"),
    (
        "model",
        {f"{M}.step_separator": ".", "algorithm.adv_estimator": "grpo_process"} | JUDGED,
        CPU,
        f"{J}.base_url",
        "score alone",
    ),
    ("model", {f"{M}.nnodes": 1}, CPU, f"{M}.nnodes=1", "enable_resource_pool=true"),
    ("model", {f"{M}.enable_resource_pool": True}, CPU, f"{M}.nnodes=0", "1, or more"),
    (
        "model",
        {"trainer.n_gpus_per_node": 4, f"{M}.enable_resource_pool": True, f"{M}.nnodes": 1, f"{M}.n_gpus_per_node": 2},
        FIVE_GPUS,
        "trainer.n_gpus_per_node=4",
        "reward_model.nnodes x n_gpus_per_node = 1 x 2",
    ),
    ("off", {f"{J}.base_url": "http://h/v1"}, CPU, f"{J}.model is not set", "name of the model"),
    ("judge", {f"{J}.base_url": "h:1/v1"}, CPU, f"{J}.base_url: must be", "http(s)://host"),
    ("judge", {f"{J}.parser": "regex"}, CPU, f"{J}.parser=regex", "json:KEY"),
    ("judge", {f"{J}.template": "rate it"}, CPU, f"{J}.template", "{response}"),
    ("judge", {f"{J}.template": "none.txt"}, CPU, f"{J}.template=none.txt", "cannot be read"),
    ("judge", {f"{J}.api_key_env": "NOT_IN_THE_ENVIRONMENT"}, CPU, f"{J}.api_key_env=NOT_IN", "no such variable"),
]


@pytest.mark.parametrize(("base", "keys", "machine", "named", "said"), CASES, ids=[f"{case[3]}: {case[4]}" for case in CASES])
def test_a_setting_that_cannot_be_is_refused_with_its_key_and_what_to_do(scored, base, keys, machine, named, said):
    settings = {"off": {}, "model": scored, "judge": JUDGED}[base] | keys
    problems = check(config_of(settings), machine) or refusals(config_of(settings), machine)
    about_it = [problem for problem in problems if problem.startswith(named)]
    assert len(about_it) == 1 and said in about_it[0]


def test_models_may_be_the_whole_reward_and_nothing_is_said_of_a_good_configuration(scored, tmp_path: Path):
    (tmp_path / "ask.txt").write_text("{response}")
    good = [
        scored,
        scored | {"reward.functions": []},
        scored | {f"{M}.step_separator": "\n\n", "algorithm.adv_estimator": "grpo_process"},
        JUDGED | {"reward.functions": [], f"{J}.template": str(tmp_path / "ask.txt"), f"{J}.parser": "json:score"},
    ]
    assert [check(config_of(keys), CPU) for keys in good] == [[]] * 4


@pytest.mark.parametrize("secret", ["http://me:sk-canary@h/v1", "http://h/v1?key=sk-canary"])
def test_what_may_be_a_secret_is_refused_and_not_repeated(secret):
    problems = refusals(config_of(JUDGED | {f"{J}.base_url": secret}), CPU)
    problems += refusals(config_of(JUDGED | {f"{J}.api_key_env": "sk-canary"}), CPU)
    assert len(problems) == 2 and "canary" not in "".join(problems)


def test_the_reward_models_ranks_are_the_actors_or_those_of_its_own_pool(scored):
    shared = config_of(scored | {"trainer.n_gpus_per_node": 4})
    own = config_of(scored | {f"{M}.enable_resource_pool": True, f"{M}.nnodes": 2, f"{M}.n_gpus_per_node": 3})
    assert EIGHT_GPUS.world_size(shared, "reward_model") == 4
    assert EIGHT_GPUS.world_size(own, "reward_model") == 6
