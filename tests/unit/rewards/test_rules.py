"""Rules: numbers, choices, texts, the form of a response, and real data sets."""

import json
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest

from grpo_rl.config.schema.tree import DataConfig
from grpo_rl.data.rows import BadRow, example
from grpo_rl.errors import ConfigError
from grpo_rl.rewards.check import gold_response
from grpo_rl.rewards.compose import sample_of
from grpo_rl.rewards.math.math_rule import math
from grpo_rl.rewards.math.math_values import NoExpression, typed_value
from grpo_rl.rewards.registry import REWARDS, auto, check_data_sources
from grpo_rl.rewards.rules.number_rules import arithmetic, countdown, gsm8k, gsm8k_flexible
from grpo_rl.rewards.rules.text_rules import exact_match, multiple_choice, think_answer
from grpo_rl.types import Prompt, Rollout


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
    assert multiple_choice("chemistry", "K", "A", {"choices": ["K", "Na", "Ca"]})["score"] == 1
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
    # Two rows of MATH have no ground truth. The six neighbours of MATH have the same value: `8` and `K=8`, `25\\%` and `25`, `120` and `120^\\circ`, and so on.
    expected = """
    GSM8K test,1319,1319,1304,0
    GSM8K train,7473,7473,7398,0
    MATH train,7498,7498,7443,6
    countdown test,2001,2001,2001,0
    """
    assert (done.returncode, counts) == (0, [line.strip().split(",") for line in expected.strip().splitlines()]), done.stderr


# ---- the ground truth -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [math, exact_match, arithmetic, gsm8k, gsm8k_flexible, multiple_choice])
@pytest.mark.parametrize("missing", [None, "", " \n", float("nan"), [], [None], {"answer": "4"}])
def test_no_response_is_paid_where_the_ground_truth_is_missing(rule, missing):
    for response in ("\\boxed{None}", "\\boxed{}", "", "None", "#### 0", "nan"):
        with pytest.raises(ValueError, match=r"the ground truth (is|None|'|nan)"):
            rule("a", response, missing)


@pytest.mark.parametrize(
    ("gold", "right", "wrong"),
    [
        (6.02e23, [r"6.02 \times 10^{23}", "6.02e23", "602000000000000000000000"], ["6.03e23", "0"]),
        (1.6e-19, [r"1.6 \times 10^{-19}", "1.6e-19"], [r"1.7 \times 10^{-19}", "0", "1.6e-18"]),
        (1e16, ["10^{16}", "10000000000000000"], ["10^{15}"]),
        (1.0, ["1", "1.0"], ["2"]),
        (0.1, [r"\frac{1}{10}", "0.1", ".1"], ["0.2"]),
        (7, ["7"], ["8"]),
        ('["4", "four"]', ["4", "four"], ['["4", "four"]', "5"]),
        (r'["\\frac{1}{2}"]', [r"\frac12", "0.5"], ["2"]),
        ([1.0, "x"], ["1", "x"], ["y"]),
        ("so 3*4 = 12\n#### 12", ["12"], ["3"]),
        ("It is $\\boxed{12}$.", ["12"], ["3"]),
    ],
)
def test_a_ground_truth_is_read_in_every_form_in_which_data_hold_it(gold, right, wrong):
    assert [score(math("math", f"\\boxed{{{answer}}}", gold)) for answer in right] == [1] * len(right)
    assert [score(math("math", f"\\boxed{{{answer}}}", gold)) for answer in wrong] == [0] * len(wrong)
    assert score(math("math", gold_response("math", gold, {}), gold)) == 1


@pytest.mark.parametrize(("gold", "response"), [(1.0, "1"), (1.0, "1.0"), (3, "3"), ('["a", "b"]', "b"), (2.5, "2.5")])
def test_an_exact_match_compares_with_numbers_as_they_are_written(gold, response):
    assert score(exact_match("a", response, gold)) == 1
    assert score(exact_match("a", response + "1", gold)) == 0


LAYOUTS = [
    {"question": "3*4?", "answer": "3*4 = <<3*4=12>>12\n#### 12"},
    {"problem": "3*4?", "solution": "It is $\\boxed{12}$.", "level": "1"},
    {"query": "3*4?", "target": "12"},
    {"instruction": "3*4?", "output": "#### 12"},
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_hint_for_rows_with_other_columns_leads_to_a_reward_that_tells_right_from_wrong(layout):
    with pytest.raises(BadRow) as error:
        example(layout, DataConfig())
    keys = dict(re.findall(r"data\.(\w+)=(\w+)", str(error.value)))
    source = keys["data_source"] if keys["data_source"] != "NAME" else "math"
    print(keys)
    read = example(layout, DataConfig(**(keys | {"data_source": source})))
    assert score(auto(read.data_source, "#### 12\n\\boxed{12}", read.ground_truth)) == 1
    assert score(auto(read.data_source, "#### 3\n\\boxed{3}", read.ground_truth)) == 0


@pytest.mark.skipif(not DATA.is_dir(), reason="../shared/data is not there")
def test_the_hint_for_raw_gsm8k_holds_for_all_of_its_rows():
    rows = [json.loads(line) for line in (DATA / "gsm8k" / "gsm8k_test.jsonl").read_text().splitlines()]
    with pytest.raises(BadRow, match=r"data\.prompt_key=question data\.ground_truth_key=answer data\.data_source=gsm8k"):
        example(rows[0], DataConfig())
    golds = [row["answer"] for row in rows]
    paid = [score(gsm8k("gsm8k", "#### " + gold.rpartition("####")[2], gold)) for gold in golds]
    unpaid = [score(gsm8k("gsm8k", "#### " + gold.rpartition("####")[2] + "1", gold)) for gold in golds]
    assert (len(rows), sum(paid), sum(unpaid)) == (1319, 1319, 0)


def test_repetition_is_the_share_of_different_runs_of_words_and_linear_in_the_length() -> None:
    rule = REWARDS.get("repetition")
    # Six runs of four words, of which "a b c d" and "b c d a" come twice.
    assert rule("", "a b c d a b c d a", "") == pytest.approx(4 / 6)
    assert rule("", "a b c d a b c d a", "", n=1) == pytest.approx(4 / 9)
    assert rule("", "so it is", "") == 1.0 and rule("", "", "") == 1.0
    assert rule("", "again and again " * 1000, "") == pytest.approx(3 / 2997)
    with pytest.raises(ValueError, match="n=0"):
        rule("", "a", "", n=0)


# ---- a thought that the template has opened -----------------------------------------------------------------

OPENED = "<|im_start|>assistant\n<think>\n"


def told(prompt: str, response: str, messages=({"role": "user", "content": "?"},)):
    """Return what the rules are called with for this response to this rendered prompt."""
    asked = Prompt("p", (1,), prompt, "math", "4", messages=messages)
    return sample_of(Rollout(asked, 0, (5,), (0.0,), "stop", (), text=response))._asdict()


@pytest.mark.parametrize("rule", [math, exact_match, multiple_choice])
def test_a_thought_that_the_template_opened_and_that_never_ended_earns_nothing(rule):
    gold = "B" if rule is multiple_choice else "4"
    for response in (f"It is \\boxed{{{gold}}}", f"<answer>{gold}</answer>", f"the answer is {gold}"):
        calls = [told(prompt, response) | {"ground_truth": gold} for prompt in (OPENED, OPENED.replace("<think>\n", ""))]
        assert [score(rule(**call)) for call in calls] == [0, 1]
        assert score(rule(**told(OPENED, f"so</think>{response}") | {"ground_truth": gold})) == 1


def test_the_format_counts_the_tag_that_the_template_has_written():
    right = "a</think><answer>b</answer>"
    assert [think_answer(**told(prompt, right)) for prompt in (OPENED, OPENED + "\n", "<|im_start|>assistant\n")] == [1, 1, 0]
    assert think_answer(**told(OPENED, f"<think>{right}")) == 0
    assert think_answer(**told("<think>x</think>\n<|im_start|>assistant\n", f"<think>{right}")) == 1
    assert think_answer(**told("<think>\n\n</think>\n\n", right)) == 0


def test_a_message_that_the_policy_goes_on_with_is_read_with_its_end():
    messages = ({"role": "user", "content": "?"}, {"role": "assistant", "content": "<think>2+2"})
    assert score(math(**told("assistant\n<think>2+2", " = 4. So \\boxed{4}", messages))) == 0
    assert score(math(**told("assistant\n<think>2+2", " = 4</think> So \\boxed{4}", messages))) == 1
    boxed = ({"role": "user", "content": "?"}, {"role": "assistant", "content": "It is \\boxed{"})
    assert score(math(**told("assistant\nIt is \\boxed{", "4}", boxed))) == 1
