import math

import numpy as np
import pytest
import torch

from grpo_rl.config.schema.tree import CustomRewardConfig, RewardConfig
from grpo_rl.errors import ConfigError, RewardError
from grpo_rl.rewards.compose import RewardFunction, sample_of
from grpo_rl.rewards.contract import Component, RewardFailure, call
from grpo_rl.types import Prompt, Rollout


def rollout(text="55", ground_truth="55", data_source="arithmetic", **extra_info):
    prompt = Prompt("e0-r3", (1,), "47+8=", data_source, ground_truth, extra_info)
    return Rollout(prompt, 2, (5, 5), (-0.1, -0.1), "stop", ((1, 2),), text=text)


def score(function, item):
    """What a reward process and its parent make of one rollout."""
    outcomes = []
    for component in function.components:
        try:
            outcomes.append(call(component, sample_of(item)))
        except RewardFailure as failure:
            return function.assemble(item, [*outcomes, failure])
    return function.assemble(item, outcomes)


def from_functions(*functions):
    return RewardFunction.from_config(RewardConfig(functions=list(functions)))


def returning(value):
    return RewardFunction([Component("mine", 1.0, lambda **_: value)])


@pytest.fixture
def my_file(tmp_path):
    path = tmp_path / "my_reward.py"
    path.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):\n"
        "    return {'score': len(solution_str) + bonus, 'level': extra_info['level'], 'note': 'text'}\n"
        "def half(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return 0.5\n"
    )
    return path


def test_the_default_takes_the_rule_of_the_data_source():
    reward, parts, _ = score(RewardFunction.from_config(RewardConfig()), rollout())
    assert reward == 1.0
    assert parts == {"auto": 1.0, "auto/acc": 1.0, "auto/answer": 55.0, "acc": 1.0, "answer": 55.0}


def test_the_reward_is_the_weighted_sum_and_the_parts_are_unweighted(my_file):
    function = from_functions("arithmetic", "0.2*format", f"-0.5*{my_file}:half")
    reward, parts, _ = score(function, rollout("<think>a</think><answer>55</answer>"))
    assert reward == pytest.approx(0.0 + 0.2 * 1.0 - 0.5 * 0.5)
    assert (parts["arithmetic"], parts["format"], parts["half"]) == (0.0, 1.0, 0.5)


def test_acc_and_answer_stand_by_themselves_and_come_from_the_first_that_gives_them():
    _, parts, _ = score(from_functions("format", "gsm8k_flexible", "arithmetic"), rollout("is 55", "55"))
    assert (parts["gsm8k_flexible/acc"], parts["arithmetic/acc"]) == (1.0, 0.0)
    assert (parts["acc"], parts["answer"]) == (1.0, 55.0)


def test_a_custom_function_gets_verls_arguments_and_its_options(my_file):
    custom = CustomRewardConfig(path=str(my_file), reward_kwargs={"bonus": 0.25})
    reward, parts, _ = score(RewardFunction.from_config(RewardConfig(custom_reward_function=custom)), rollout("abc", level=4))
    assert reward == 3.25
    assert parts == {"compute_score": 3.25, "compute_score/level": 4.0}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (math.nan, "score is nan, not a finite number"),
        (math.inf, "score is inf"),
        (10**400, "score is inf"),
        (1e300, r"score is 1e\+300, beyond float32"),
        ({"score": 1.0, "level": -1e39}, r"level is -1e\+39, beyond float32"),
        (None, r"score is None \(NoneType\), not a number"),
        ("1.0", r"score is '1\.0' \(str\)"),
        ([1.0], "not a number"),
        (1j, "not a number"),
        ({"acc": 1.0}, "the dict has no 'score', it has acc"),
        ({}, "it has nothing"),
        ({"score": None}, "score is None"),
        ({"score": 1.0, "level": math.nan}, "level is nan"),
    ],
)
def test_what_is_no_finite_number_is_refused_with_function_rollout_and_value(value, message):
    with pytest.raises(RewardError, match=message) as error:
        score(returning(value), rollout())
    assert "reward 'mine' for prompt e0-r3, sample 2" in str(error.value)


def test_two_finite_scores_whose_sum_no_float32_holds_are_refused():
    function = RewardFunction([Component(name, 2.0, lambda **_: 3e38) for name in ("a", "b")])
    with pytest.raises(RewardError, match=r"the sum is 1\.2e\+39, beyond float32"):
        score(function, rollout())


@pytest.mark.parametrize(
    "value", [np.bool_(True), np.array(1.0), np.float32(1), np.int64(1), torch.tensor(1.0), torch.tensor(True), np.array(1)]
)
def test_scalars_of_numpy_and_torch_are_numbers(value):
    assert score(returning(value), rollout())[0] == 1.0
    assert score(returning({"score": value, "acc": value}), rollout())[1]["acc"] == 1.0


def test_names_and_causes_with_half_a_character_can_be_written():
    _, parts, _ = score(returning({"score": 1.0, "\ud83d": 2.0}), rollout())
    assert parts["mine/\ufffd"] == 2.0
    assert RewardFailure("reward_error", "a \ud83d\0").cause == "a \ufffd\ufffd"


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ([], "reward.functions is empty"),
        (["gsm9k"], r"unknown reward function 'gsm9k'\. Did you mean gsm8k"),
        (["two*format"], "'two' is not a number"),
        (["nan*format"], "the factor must be finite"),
        (["format", "0.5*format"], "'format' is there twice"),
        (["nowhere.py:reward"], "there is no file"),
    ],
)
def test_a_wrong_list_of_functions_is_refused(functions, message):
    with pytest.raises(ConfigError, match=message):
        from_functions(*functions)


def test_all_problems_of_the_list_are_reported_at_once():
    with pytest.raises(ConfigError) as error:
        from_functions("gsm9k", "x*format")
    assert len(error.value.problems) == 2


def test_a_custom_function_is_refused_when_its_options_or_its_name_do_not_fit(my_file):
    def load(**custom):
        return RewardFunction.from_config(RewardConfig(custom_reward_function=CustomRewardConfig(**custom)))

    with pytest.raises(ConfigError, match="has no option bonsu"):
        load(path=str(my_file), reward_kwargs={"bonsu": 1})
    with pytest.raises(ConfigError, match="has no function 'score'"):
        load(path=str(my_file), name="score")


def test_options_reach_the_function_that_they_are_named_for(my_file):
    functions = [f"{my_file}:compute_score", f"{my_file}:half"]
    for name in ("compute_score", f"{my_file}:compute_score"):
        config = RewardConfig(functions=functions, function_kwargs={name: {"bonus": 10}})
        assert score(RewardFunction.from_config(config), rollout("abc", level=1)).reward == 13.5


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"function_kwargs": {"lengths": {"scale": 1}}},
            r"reward\.function_kwargs: 'lengths' is not in the reward's sum; it has half",
        ),
        ({"batched": ["halve"]}, r"reward\.batched: 'halve' is not in the reward's sum; it has half"),
        ({"batched": ["half"]}, "half' takes .* is called as .*data_sources=.*with lists, as it is in reward.batched"),
        ({"function_kwargs": {"half": {"bonus": 1}}}, "has no option bonus"),
        ({"function_kwargs": {"half": {"solution_str": "1"}}}, "solution_str is given with every call"),
        ({"function_kwargs": {"half": 3}}, "write its options by name"),
    ],
)
def test_what_is_said_of_single_functions_is_checked_before_the_start(my_file, config, message):
    config = RewardConfig(functions=[f"{my_file}:half"], **config)
    with pytest.raises(ConfigError, match=message):
        RewardFunction.from_config(config)
