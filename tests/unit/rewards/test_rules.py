"""Rules: numbers, choices, texts, the form of a response, and real data sets."""

import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest

from grpo_rl.errors import ConfigError
from grpo_rl.rewards.math.math_values import NoExpression, typed_value
from grpo_rl.rewards.registry import auto, check_data_sources
from grpo_rl.rewards.rules.number_rules import arithmetic, countdown, gsm8k, gsm8k_flexible
from grpo_rl.rewards.rules.text_rules import exact_match, multiple_choice, think_answer


def score(result):
    return result["score"] if isinstance(result, dict) else result


# ---- arithmetic -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("55", 1),
        (" 55\n", 1),
        ("055", 0),
        ("55.", 0),
        ("5 5", 0),
        ("=55", 0),
        ("55 or 56", 0),
        ("", 0),
        ("\u0665\u0665", 0),
        ("54", 0),
    ],
)
def test_an_arithmetic_response_must_be_the_answer_and_nothing_else(response, expected):
    assert arithmetic("arithmetic", response, "55")["score"] == expected


def test_the_arithmetic_reward_says_which_number_was_given_where_there_is_one():
    assert arithmetic("arithmetic", "54", "55") == {"score": 0.0, "acc": 0.0, "answer": 54.0}
    assert arithmetic("arithmetic", "-3", "-3") == {"score": 1.0, "acc": 1.0, "answer": -3.0}
    for response in ("", "five", "9" * 400, "²"):
        assert "answer" not in arithmetic("arithmetic", response, "55")


# ---- GSM8K ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "gold", "strict", "flexible"),
    [
        ("so the total is\n#### 18", "18", 1, 1),
        ("####18", "18", 1, 1),
        ("#### $1,000.", "1000", 1, 1),
        ("#### 1000", "1,000", 1, 1),
        ("#### -5", "-5", 1, 1),
        ("#### 18.0", "18", 1, 1),
        ("#### 18.5", "18", 0, 0),
        ("#### 17\nno:\n#### 18", "18", 1, 1),
        ("#### 18\nno:\n#### 17", "18", 0, 0),
        ("the answer is 18", "18", 0, 1),
        ("the answer is $18.", "18", 0, 1),
        ("18 apples of 20", "18", 0, 0),
        ("#### 18 apples and 20 pears", "18", 1, 0),
        ("#### eighteen", "18", 0, 0),
        ("### 18", "18", 0, 1),
        ("", "18", 0, 0),
        ("#### \uff14\uff12", "42", 0, 0),
        ("#### " + "9" * 100, "18", 0, 0),
    ],
)
def test_the_strict_rule_wants_the_mark_and_the_flexible_one_the_last_number(response, gold, strict, flexible):
    assert score(gsm8k("gsm8k", response, gold)) == strict
    assert score(gsm8k_flexible("gsm8k", response, gold)) == flexible


def test_only_the_last_300_characters_count():
    assert score(gsm8k("gsm8k", "#### 18" + " " * 293, "18")) == 1
    assert score(gsm8k("gsm8k", "#### 18" + " " * 294, "18")) == 0
    assert score(gsm8k_flexible("gsm8k", "18" + " " * 300, "18")) == 0


def test_the_flexible_rule_does_not_begin_inside_a_number():
    assert score(gsm8k_flexible("gsm8k", "1234" + "x" * 298, "34")) == 0
    assert score(gsm8k_flexible("gsm8k", "1234" + "x" * 298, "1234")) == 1


# ---- format ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("<think>a</think><answer>b</answer>", 1),
        ("  <think>\na\n</think>\n\n<answer>b</answer>\n", 1),
        ("<think>a</think><answer>\u2205</answer>", 1),
        ("<think></think><answer>b</answer>", 0),
        ("<think>a</think><answer> </answer>", 0),
        ("<think>a</think><answer>.</answer>", 0),
        ("<think>a</think>x<answer>b</answer>", 0),
        ("x<think>a</think><answer>b</answer>", 0),
        ("<think>a</think><answer>b</answer>x", 0),
        ("<answer>b</answer><think>a</think>", 0),
        ("<think>a<answer>b</think></answer>", 0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0),
        ("<think><think>a</think></think><answer>b</answer>", 0),
        ("<think>a</think><answer>b", 0),
        ("</think><think><answer>b</answer>", 0),
        ("", 0),
    ],
)
def test_the_format_is_one_thought_and_then_one_answer(response, expected):
    assert think_answer("any", response, None) == expected


# ---- auto -----------------------------------------------------------------------------------------------


def test_an_unknown_data_source_is_refused_with_the_known_ones_and_the_way_out():
    with pytest.raises(
        ConfigError, match=r"data_source 'maths'; there is one for arithmetic, .*gsm8k, openai/gsm8k.*custom_reward"
    ):
        auto("maths", "1", "1")
    with pytest.raises(ConfigError, match="'a', 'b'"):
        check_data_sources(["b", "arithmetic", "a"])
    check_data_sources(["arithmetic", "gsm8k"])


ROOT = Path(__file__).resolve().parents[3]
DATA = ROOT / ".." / "shared" / "data"
TASK = {"numbers": [44, 19, 35], "target": 98}


# ---- countdown ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("a</think>\n<answer>44+19+35</answer>", 1),
        ("<answer> (35 + 44) + 19 </answer>", 1),
        ("<answer>44--19+35</answer>", 1),
        ("<answer>1</answer><answer>44+19+35</answer>", 1),
        ("<answer>44+19+35</answer><answer>1</answer>", 0.1),
        ("<answer>44+19+35</answer>\nthat is it", 0),
        ("44+19+35", 0),
        ("<answer>44+19+35", 0),
        ("<answer>44+19</answer>", 0.1),
        ("<answer>98</answer>", 0.1),
        ("<answer>44+19+35+0</answer>", 0.1),
        ("<answer>44*19/35</answer>", 0.1),
        ("<answer>44+19+35=98</answer>", 0.1),
        ("<answer></answer>", 0.1),
    ],
)
def test_countdown_pays_1_for_the_target_and_a_tenth_for_any_other_answer(response, expected):
    assert countdown("countdown", response, TASK)["score"] == expected


def test_countdown_wants_each_number_as_often_as_it_is_given():
    task = {"numbers": [2, 2, 3], "target": 7}
    assert countdown("countdown", "<answer>2+2+3</answer>", task)["acc"] == 1
    assert countdown("countdown", "<answer>2*2+3</answer>", task)["acc"] == 1
    assert countdown("countdown", "<answer>3+2*2+3-3</answer>", task)["acc"] == 0
    assert countdown("countdown", "<answer>2+2+3</answer>", {"numbers": [2, 3], "target": 7})["acc"] == 0


@pytest.mark.parametrize(
    ("text", "value", "numbers"),
    [
        (" 8/(3-8/3)\n", 24, ["8", "3", "8", "3"]),
        ("-(2-5)*\n+1", 3, ["2", "5", "1"]),
        ("12/4/3 - 1/3", Fraction(2, 3), ["12", "4", "3", "1", "3"]),
        ("2**10 - 3**-1*.5", 1024 - Fraction(1, 6), ["2", "10", "3", "1", ".5"]),
        ("-2**2 + 4**(1/2)", -2, ["2", "2", "4", "1", "2"]),
        ("1.5e2*2", 300, ["1.5e2", "2"]),
    ],
)
def test_a_typed_expression_is_worked_out_exactly(text, value, numbers):
    assert typed_value(text) == (value, numbers)


NO_EXPRESSIONS = (
    """
1 +|1/0|7//2|y|1 2|2(3)|(1)(2)|(1)2|2 * * 3|1.real|abs(1)|__import__('os').system('true')|().__class__|[1]|1 = 1|1<2|0x10|2@2|1_0|9**9**9
3**9999|(9**99)**99|(9e99)**64|1e10000|1e-10000|1e1_0|2e|1\x00|\uff11+\uff11|1 if 1 else 2
""".strip()
    .replace("\n", "|")
    .split("|")
)


@pytest.mark.parametrize(
    "text", ["", "9" * 1001, "(" * 41 + "1" + ")" * 41, "-" * 900 + "1", "1+" * 600 + "1", *NO_EXPRESSIONS]
)
def test_an_expression_cannot_reach_anything_else_nor_grow_without_bound(text):
    with pytest.raises(NoExpression):
        typed_value(text)


@pytest.mark.parametrize("answer", ["1**4+3", "4.0", "3e0+1", "1+3.0", "1(3)+0*4"])
def test_countdown_reads_whole_numbers_and_four_operations_only(answer):
    assert countdown("countdown", f"<answer>{answer}</answer>", {"numbers": [1, 3], "target": 4})["acc"] == 0


def test_countdown_has_options_for_what_it_pays_and_where_it_looks():
    wrong, right = "<answer>1</answer>", "<answer>44+19+35</answer>\nthat is it"
    assert countdown("countdown", wrong, TASK, format_score=0.0)["score"] == 0
    assert countdown("countdown", right, TASK, score=2.0, last_line=False) == {"score": 2.0, "acc": 1.0, "answered": 1.0}


def test_countdown_reads_its_task_as_text_too_and_names_one_that_is_none():
    assert countdown("countdown", "<answer>1+2</answer>", '{"nums": [1, 2], "target": 3}')["score"] == 1
    with pytest.raises(ValueError, match="has 'numbers' and 'target'; this one is '98'"):
        countdown("countdown", "<answer>1</answer>", "98")


# ---- multiple choice, exact match -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("B", 1),
        (" (B).", 1),
        (r"so \boxed{B}", 1),
        (r"so \boxed{\text{(B)}}", 1),
        ("<answer>B) four</answer>", 1),
        ("The answer is B.", 1),
        ("Answer: **B**", 1),
        ("the answer is four", 1),
        ("<answer>A</answer> <answer>B</answer>", 1),
        ("A or B", 0),
        ("The answer is A, not B.", 0),
        ("<answer>A dog</answer>", 0),
        ("<answer>A, B</answer>", 0),
        ("<think>\\boxed{B}</think>", 0),
        ("b", 0),
        ("", 0),
    ],
)
def test_a_choice_is_a_letter_or_the_text_of_one(response, expected):
    assert multiple_choice("arc", response, "B", {"choices": ["three", "four", "five"]})["score"] == expected


def test_a_choice_votes_by_its_place():
    assert multiple_choice("arc", "The answer is (C).", "C") == {"score": 1.0, "acc": 1.0, "answer": 2.0}
    assert multiple_choice("arc", "I take (C)", "C")["score"] == 0
    assert multiple_choice("arc", "B", "four", {"choices": ["three", "four"]})["score"] == 1
    with pytest.raises(ValueError, match="'Z' is none of the letters"):
        multiple_choice("arc", "B", "Z")


@pytest.mark.parametrize(
    ("response", "gold", "options", "expected"),
    [
        ("  new\n york ", "New York", {}, 1),
        ("<think>x</think>so <answer>New York</answer> it is", "new york", {}, 1),
        ("The answer is New York.", "new york", {}, 1),
        ("new york", "New York", {"ignore_case": False}, 0),
        ("The New-York!", "newyork", {"ignore_punctuation": True, "ignore_articles": True}, 1),
        ("\uff14\uff12", "42", {}, 0),
        ("b", ["a", "b"], {}, 1),
        ("c", ["a", "b"], {}, 0),
    ],
)
def test_an_exact_match_is_one_after_the_chosen_normalisation(response, gold, options, expected):
    assert exact_match("nq", response, gold, **options)["score"] == expected


# ---- real data ------------------------------------------------------------------------------------------


@pytest.mark.skipif(not DATA.is_dir(), reason="../shared/data is not there")
def test_every_real_ground_truth_earns_1_and_only_equal_ones_earn_1_for_their_neighbours():
    done = subprocess.run([sys.executable, "scripts/check_rewards.py", str(DATA)], cwd=ROOT, capture_output=True, text=True)
    counts = [re.split(r"\s*│\s*", line)[1:6] for line in done.stdout.splitlines() if line.startswith("│")]
    # The six neighbours of MATH have the same value: `8` and `K=8`, `25\\%` and `25`, `120` and `120^\\circ`, and so on.
    expected = """
    GSM8K test,1319,1319,1304,0
    GSM8K train,7473,7473,7398,0
    MATH train,7500,7500,7445,6
    countdown test,2001,2001,2001,0
    """
    assert (done.returncode, counts) == (0, [line.strip().split(",") for line in expected.strip().splitlines()]), done.stderr
