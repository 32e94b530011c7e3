"""Settings of model rewards that are refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from config_tools import CPU, EIGHT_GPUS, config_of

from grpo_rl.config import derived
from grpo_rl.config.checks.all_rules import check
from grpo_rl.config.derived import Machine

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
    ("off", {f"{M}.weight": 0.5}, CPU, f"{M}.weight=0.5", f"{M}.enable=true"),
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
    ("off", {f"{J}.model": "m"}, CPU, f"{J}.model=m", f"{J}.base_url"),
    ("off", {f"{J}.base_url": "http://h/v1"}, CPU, f"{J}.model is not set", "name of the model"),
    ("judge", {f"{J}.base_url": "h:1/v1"}, CPU, f"{J}.base_url: must be", "http(s)://host"),
    ("judge", {f"{J}.parser": "regex"}, CPU, f"{J}.parser=regex", "json:KEY"),
    ("judge", {f"{J}.template": "rate it"}, CPU, f"{J}.template", "{response}"),
    ("judge", {f"{J}.template": "none.txt"}, CPU, f"{J}.template=none.txt", "there is no file"),
    ("judge", {f"{J}.api_key_env": "NOT_IN_THE_ENVIRONMENT"}, CPU, f"{J}.api_key_env=NOT_IN", "no such variable"),
]


@pytest.mark.parametrize(("base", "keys", "machine", "named", "said"), CASES, ids=[f"{case[3]}: {case[4]}" for case in CASES])
def test_a_setting_that_cannot_be_is_refused_with_its_key_and_what_to_do(scored, base, keys, machine, named, said):
    settings = {"off": {}, "model": scored, "judge": JUDGED}[base] | keys
    about_it = [problem for problem in check(config_of(settings), machine) if problem.startswith(named)]
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
    problems = check(config_of(JUDGED | {f"{J}.base_url": secret}), CPU)
    problems += check(config_of(JUDGED | {f"{J}.api_key_env": "sk-canary"}), CPU)
    assert len(problems) == 2 and "canary" not in "".join(problems)


def test_the_reward_models_ranks_are_the_actors_or_those_of_its_own_pool(scored):
    shared = config_of(scored | {"trainer.n_gpus_per_node": 4})
    own = config_of(scored | {f"{M}.enable_resource_pool": True, f"{M}.nnodes": 2, f"{M}.n_gpus_per_node": 3})
    assert derived.num_reward_model_ranks(shared, EIGHT_GPUS) == 4
    assert derived.num_reward_model_ranks(own, EIGHT_GPUS) == 6
