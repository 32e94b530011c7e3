import pytest

from grpo_rl.errors import ConfigError
from grpo_rl.rewards.registry import auto, check_data_sources
from grpo_rl.rewards.rules.number_rules import arithmetic, gsm8k, gsm8k_flexible
from grpo_rl.rewards.rules.text_rules import think_answer


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
