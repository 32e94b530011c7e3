"""The package takes seconds to import, so all that needs it is here."""

import ast
import json
import sys

import pytest
from machine_lacks import needs_reasoning_gym

from grpo_rl.data.tasks.made_rows import split_of_text
from grpo_rl.data.tasks.reasoning_gym import HASH_DEPENDENT, INSTRUCTION
from grpo_rl.data.tasks.registry import task_rows
from grpo_rl.errors import ConfigError, RewardError
from grpo_rl.rewards.registry import auto
from grpo_rl.rewards.rules import reasoning_gym as gym

pytestmark = needs_reasoning_gym
CHEAP = [
    "ab",
    "base_conversion",
    "binary_matrix",
    "calendar_arithmetic",
    "chain_sum",
    "coin_flip",
    "countdown",
    "dice",
    "game_of_life_halting",
    "knights_knaves",
    "n_queens",
    "number_sorting",
    "simple_integration",
    "spiral_matrix",
    "string_insertion",
    "word_sorting",
]


def score(row, response):
    """Return the score of a response, with the row as a file would give it back."""
    row = json.loads(json.dumps(row))
    return auto(row["data_source"], response, row["reward_model"]["ground_truth"], row["extra_info"])


def answered(row, answer):
    return score(row, f"<think>hm</think> so <answer>{answer}</answer>")


@pytest.mark.parametrize("name", CHEAP)
def test_a_data_sets_own_answer_has_full_marks_and_garbage_has_not(name):
    for row in task_rows(f"reasoning_gym:{name}?num_rows=2"):
        own = answered(row, row["reward_model"]["ground_truth"])
        assert own == {"score": 1.0, "acc": 1.0, "tagged": 1.0, "refused": 0.0}
        assert max(answered(row, text)["score"] for text in ("banana", "", "[1, 2", "0 0")) < 1
        assert answered(row, "9" * 5000) == {"score": 0.0, "acc": 0.0, "tagged": 1.0, "refused": 1.0}


def test_row_i_is_the_same_whatever_the_number_of_rows_and_another_seed_is_no_shift():
    short, long = task_rows("reasoning_gym:gcd?num_rows=3"), task_rows("reasoning_gym:gcd?num_rows=40")
    assert list(short) == long[:3]
    other = {row["prompt"][0]["content"] for row in task_rows("reasoning_gym:gcd?num_rows=40&seed=1")}
    assert len(other & {row["prompt"][0]["content"] for row in long}) < 5


def test_rows_that_depend_on_the_hash_of_strings_want_a_fixed_one(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    for name in HASH_DEPENDENT:
        with pytest.raises(ConfigError, match="start the command with PYTHONHASHSEED=0"):
            task_rows(f"reasoning_gym:{name}")
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    row = task_rows("reasoning_gym:isomorphic_strings?num_rows=1")[0]
    assert answered(row, row["reward_model"]["ground_truth"])["score"] == 1


def test_the_splits_share_no_question():
    train, val = (
        {row["prompt"][0]["content"] for row in task_rows(f"reasoning_gym:gcd?num_rows=30&split={split}")}
        for split in ("train", "val")
    )
    assert not train & val
    assert {split_of_text(text.removesuffix(INSTRUCTION)) for text in val} == {"val"}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("chain_sums", "Did you mean chain_sum"),
        ("chain_sum?min_term=2", "Did you mean min_terms"),
        ("chain_sum?min_terms=two", "min_terms=two must be of type int"),
        ("chain_sum?min_terms=9&max_terms=2", "refuses max_terms=2, min_terms=9: max_terms must be >= min_terms"),
        ("chain_sum?size=5", "size is called num_rows here"),
        ("chain_sum?num_rows=0", "num_rows=0 is out of range"),
        ("chain_sum?seed=-1", "seed=-1 is out of range"),
        ("chain_sum?split=test", "split=test must be one of all, train, val"),
        ("basic_arithmetic?allow_negation=1", "allow_negation=1 must be of type bool"),
        ("basic_arithmetic?whitespace=double", "whitespace=double must be of type Literal['no_space', 'single', 'random']"),
        ("word_sorting?transformation=upper", "transformation=upper must be of type TextTransformation"),
        ("time_intervals?min_date=2024", "min_date=2024 must be of type date"),
        ("rearc?board_format_opts=x", "must be of type BoardFormattingOptions"),
        ("composite", "list these in data.train_files"),
    ],
)
def test_a_wrong_spec_is_refused_with_the_rule(spec, message):
    with pytest.raises(ConfigError) as error:
        task_rows("reasoning_gym:" + spec)
    assert message in str(error.value)


def test_without_the_package_the_message_says_what_to_install(monkeypatch):
    gym._registered.cache_clear()
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"pip install 'grpo_rl\[data\]'"):
        task_rows("reasoning_gym:lcm")
    gym._registered.cache_clear()


HOSTILE = {
    "binary_matrix": ["__import__('os').mkdir('{canary}')", "[" * 3000, "[open('{canary}','w')]"],
    "countdown": ["__import__('os').mkdir('{canary}')", "9**9**9**9", "9" * 4000],
    "puzzle24": ["__import__('os').mkdir('{canary}')", "24.5", "factorial(factorial(99))"],
    "simple_integration": ["__import__('os').mkdir('{canary}')", "9**9**9**9", "x**9999999", "C.__class__"],
    "n_queens": ["[__import__('os').mkdir('{canary}')]", "((((((((1))))))))"],
    "spiral_matrix": ["[__import__('os').mkdir('{canary}')]"],
    "string_insertion": ["[__import__('os').mkdir('{canary}')]"],
    "coin_flip": ["1e999999999", "1e-999999999"],
    "rubiks_cube": ["R999999999"],
    "rush_hour": ["A+999999999"],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_answers_score_near_nothing_at_once_and_run_no_code(name, tmp_path):
    row = task_rows(f"reasoning_gym:{name}?num_rows=1")[0]
    canary = tmp_path / "canary"
    for text in HOSTILE[name]:
        assert answered(row, text.replace("{canary}", str(canary)))["score"] <= 0.05
    assert not canary.exists()


@pytest.mark.parametrize("answer", ["1e10000", "1e1_0_0_0", "1e\uff11\uff10\uff10\uff10", "1_0" * 60])
def test_a_number_too_large_to_make_is_not_shown_to_a_scorer(answer):
    assert answered(task_rows("reasoning_gym:coin_flip?num_rows=1")[0], answer)["refused"] == 1


def test_puzzle24_wants_the_numbers_of_the_puzzle():
    row = next(
        r
        for r in task_rows("reasoning_gym:puzzle24?num_rows=9")
        if sorted(ast.literal_eval(r["extra_info"]["gym"]["metadata"])["numbers"]) != [1, 1, 4, 6]
    )
    assert answered(row, "6*4*1*1")["score"] < 1


def test_an_integral_is_judged_by_its_derivative():
    row = task_rows("reasoning_gym:simple_integration?num_rows=1")[0]
    own = row["reward_model"]["ground_truth"].removesuffix(" + C")
    assert answered(row, f"({own})*2/2 + 17")["score"] == 1
    assert answered(row, f"2*({own})")["score"] == 0


def test_a_row_of_another_source_is_refused():
    with pytest.raises(RewardError, match=r"which have extra_info\.gym"):
        auto("reasoning_gym/gcd", "5", "5", {})


def test_metadata_that_cannot_be_written_down_are_made_again_to_be_scored():
    assert ast.literal_eval(gym.written({1: ("a", {3}), "b": None})) == {1: ("a", {3}), "b": None}
    row = task_rows("reasoning_gym:knights_knaves?num_rows=1")[0]
    assert row["extra_info"]["gym"]["metadata"] is None
    assert answered(row, row["reward_model"]["ground_truth"])["score"] == 1
