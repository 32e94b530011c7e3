"""The package takes seconds to import, so all that needs it is here."""

import json
import sys
from pathlib import Path

import pytest
from machine_lacks import needs_reasoning_gym

from grpo_rl import gym
from grpo_rl.data.tasks.gym_process import EntryProcess
from grpo_rl.data.tasks.made_rows import split_of_text
from grpo_rl.data.tasks.reasoning_gym import INSTRUCTION
from grpo_rl.data.tasks.registry import task_rows
from grpo_rl.errors import ConfigError, DataError, RewardError
from grpo_rl.rewards.rules.auto import auto
from grpo_rl.rewards.rules.reasoning_gym_rule import extract_answer

pytestmark = needs_reasoning_gym
ROOT = Path(__file__).resolve().parents[3]
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


PACKAGE = """\
import dataclasses, types

@dataclasses.dataclass
class Config:
    seed: int
    size: int

class Words:
    def __init__(self, config):
        self.seed = config.seed
    def __getitem__(self, index):
        print("noise on stdout")
        if index == 2:
            raise ValueError("no third")
        words = "one two three four five six seven eight nine ten".split()
        return {"question": " ".join(set(words)) + str(index), "answer": "1", "metadata": {"pair": (1, index)}}

Words.__module__ = "reasoning_gym.words.x"
DATASETS = {"word_ladder_like": (Words, Config)}
"""


def test_rows_that_depend_on_the_hash_of_strings_are_made_by_a_process_with_a_fixed_one(monkeypatch, tmp_path):
    (tmp_path / "reasoning_gym").mkdir()
    (tmp_path / "reasoning_gym" / "__init__.py").write_text("")
    (tmp_path / "reasoning_gym" / "factory.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(tmp_path)
    made = []
    for hash_seed in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", hash_seed)
        process = EntryProcess("word_ladder_like", (), 0)
        made.append([process.entry(1), process.entry(0)])
    assert made[0] == made[1] and made[0][0]["metadata"] == {"pair": (1, 1)}
    with pytest.raises(DataError, match="entry 2: ValueError: no third"):
        process.entry(2)


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
        ("chain_sum?min_terms=two", "min_terms=two must be a whole number"),
        ("chain_sum?min_terms=9&max_terms=2", "refuses max_terms=2, min_terms=9: max_terms must be >= min_terms"),
        ("chain_sum?size=5", "size is called num_rows here"),
        ("chain_sum?num_rows=0", "num_rows=0 is out of range"),
        ("chain_sum?seed=-1", "seed=-1 is out of range"),
        ("chain_sum?split=test", "split=test must be one of all, train, val"),
        ("basic_arithmetic?allow_negation=1", "allow_negation=1 must be true or false"),
        ("basic_arithmetic?whitespace=double", "must be one of no_space, single, random"),
        ("word_sorting?transformation=upper", "must be one of lowercase, uppercase"),
        ("time_intervals?min_date=2024", "must be a date like"),
        ("rearc?board_format_opts=x", "cannot be set"),
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


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("a <answer> 4 </answer> b <answer>\n5</answer> c", ("5", True)),
        ("  4\n", ("4", False)),
        ("<answer>4", ("<answer>4", False)),
        ("4</answer>", ("4</answer>", False)),
        ("<answer>1</answer><answer>2", ("1", True)),
        ("<answer><answer>3</answer></answer>", ("3</answer>", True)),
        ("", ("", False)),
    ],
)
def test_the_last_tags_hold_the_answer_or_else_the_whole_response_is_it(response, expected):
    assert extract_answer(response) == expected


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
        if sorted(gym.decode(r["extra_info"]["gym"]["metadata"])["numbers"]) != [1, 1, 4, 6]
    )
    assert answered(row, "6*4*1*1")["score"] < 1


def test_an_integral_is_judged_by_its_derivative_and_a_list_keeps_the_packages_partial_marks():
    row = task_rows("reasoning_gym:simple_integration?num_rows=1")[0]
    own = row["reward_model"]["ground_truth"].removesuffix(" + C")
    assert answered(row, f"({own})*2/2 + 17")["score"] == 1
    assert answered(row, f"2*({own})")["score"] == 0
    row = task_rows("reasoning_gym:spiral_matrix?num_rows=1")[0]
    assert answered(row, str([int(part) for part in row["reward_model"]["ground_truth"].split()]))["score"] == 0.1


def test_a_row_of_another_source_is_refused():
    with pytest.raises(RewardError, match=r"which have extra_info\.gym"):
        auto("reasoning_gym/gcd", "5", "5", {})


@pytest.mark.parametrize("value", [{1: "a", "b": (1, 2)}, {"$": 1}, [(1, [2]), {3, 4}, None, True, 1.5], frozenset({"a"})])
def test_metadata_comes_back_from_json_as_it_was(value):
    back = gym.decode(json.loads(json.dumps(gym.encode(value))))
    assert back == value and type(back) is type(value)
