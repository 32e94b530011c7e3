"""The reward of mathematics, by hand and on the MATH set."""

import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_rl.rewards.math import math_rule
from grpo_rl.rewards.math.compare import compare, operations
from grpo_rl.rewards.math.math_rule import equivalent, math, may_reach_algebra
from grpo_rl.rewards.rules.answers import after_phrase, final_answer

SECTIONS = Path(__file__).with_name("math_pairs.tsv").read_text("utf-8").split("\n[different]\n")
SAME, DIFFERENT = ([line.split("\t") for line in text.splitlines() if "\t" in line] for text in SECTIONS)


@pytest.fixture(scope="module", autouse=True)
def warm():
    """math-verify and sympy take a second to import."""
    equivalent("x<1", "1>x")


def score(answer, gold, **options):
    return math("math", answer, gold, **options)["score"]


@pytest.mark.parametrize(("gold", "answer"), SAME)
def test_an_answer_is_right_however_it_is_written(gold, answer):
    assert score(rf"so \boxed{{{answer}}}.", gold) == 1


@pytest.mark.parametrize(("gold", "answer"), DIFFERENT)
def test_an_answer_of_another_value_or_kind_is_wrong(gold, answer):
    assert score(rf"so \boxed{{{answer}}}.", gold) == 0


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (r"\boxed{17} no, \boxed{18}", 1),
        (r"\boxed{18} no, \boxed{17}", 0),
        (r"\boxed{18} no, \boxed{17", 0),
        (r"\boxed {{18}}", 1),
        (r"18 \boxed{}", 0),
        (r"18 \boxed", 0),
        (r"\boxed 18", 1),
        (r"\fbox{18}", 1),
        (r"$\boxed{\text{18}}$", 1),
        ("<answer> 18 </answer>", 1),
        ("<think>\\boxed{17}</think><answer>18</answer>", 1),
        ("<think>\\boxed{18}</think>", 0),
        ("<think>\\boxed{18}", 0),
        ("</think>The final answer is $18$.", 1),
        ("Answer: 18\nthat is it", 1),
        ("**Answer:** \\(18\\)", 1),
        ("The answer is 18. I am sure.", 1),
        ("Answer:\n18", 1),
        ("**Answer:**\r\n\r\n$18$\n", 1),
        ("Answer:\n$$\n18\n$$", 1),
        ("Answer:\n\\[\n18\n\\]", 1),
        ("Answer: $\\$18$", 1),
        ("The answer is $18.", 1),
        ("The answer is $18. That is $5 more.", 1),
        ("Answer:\n17\n18", 0),
        ("Answer: $$18", 0),
        ("Answer:", 0),
        ("18", 0),
        ("", 0),
    ],
)
def test_the_answer_is_the_last_box_then_the_tags_then_the_phrase_and_never_a_thought(response, expected):
    assert score(response, "18") == expected


def test_options_narrow_where_the_answer_may_stand_and_what_decides():
    assert score("The answer is 18.", "18", boxed_only=True) == 0
    assert score(r"<think>\boxed{18}</think>", "18", skip_thought=False) == 1
    assert score(r"\boxed{7/2 > x}", r"x < \frac{7}{2}", algebra=False) == 0
    assert score(r"\boxed{(x-1)(x-5) = 0}", "x^2 - 6x + 5 = 0", algebra=False) == 1
    assert score(r"\boxed{0 = x - 5}", "x = 5", algebra=False) == score(r"\boxed{x = 5}", "x - 5 = 0", algebra=False) == 1
    assert score(r"\boxed{x - 5}", "x - 5 = 0", algebra=False) == score(r"\boxed{x = x}", "y = y", algebra=False) == 0


@pytest.mark.parametrize("question", ["What is 17*23?", "$17 \\times 23 =$"])
def test_an_unevaluated_expression_is_no_answer_to_a_question_for_its_value(question):
    def asked(answer, gold="391", question=question, **options):
        return math("math", rf"\boxed{{{answer}}}", gold, {"question": question}, **options)["score"]

    assert asked("391") == asked("17*23 = 391") == asked("x=391.0") == 1
    assert asked("17*23") == asked("17 \\cdot 23") == asked("(17)(23)") == asked("390+1") == 0
    assert asked("17*23", evaluated=False) == asked("17*23", question="The 17th of 23?") == 1
    assert asked("17*23", question="", evaluated=True) == 0
    assert asked("\\frac{-1}{2}", "-\\frac12", "What is 1/2-1?") == asked("-0.5", "-\\frac12", "What is 1/2-1?") == 1
    assert asked("1/2-1", "-\\frac12", "What is 1/2-1?") == 0


def test_several_ground_truths_are_each_right_and_may_be_boxed():
    assert score(r"\boxed{4}", ["3", "4"]) == 1
    assert score(r"\boxed{4}", r"Thus $\boxed{4}$.") == 1


def test_answers_of_one_value_have_one_vote_and_words_have_votes_of_their_own():
    def vote(text):
        return math("math", rf"\boxed{{{text}}}", "1")["answer"]

    assert vote("0.5") == vote(r"\frac{1}{2}") == 0.5
    assert vote("x+1") == vote("x + 1") != vote("x+2")
    assert vote("x+1") > 1e15


@pytest.mark.parametrize(
    "bomb",
    [
        "10^{10^{10}}",
        "9^{9^{9^9}}<x",
        "2^3^4<x",
        "x^{2}^{3}<1",
        "1000000000!<x",
        "\\binom{9}{3}<x",
        "\\sum_{n=1}^{9} n<x",
        "(x+y)^{500}<1",
        "7^{123}<x",
        "(" * 9 + "x" + ")" * 9 + "<1",
        "x<" + "7" * 13,
        "\\begin{pmatrix}" + "1&" * 10 + "1\\end{pmatrix}<x",
        "__import__('os')",
        "x.__class__<1",
        "lambda<x",
        "x<\u0661",
        "x" * 201,
        "\\sin(\\sin(\\sin(\\sin(\\sin(x)))))<1",
    ],
)
def test_the_gate_refuses_what_algebra_would_write_out(bomb):
    assert not may_reach_algebra(bomb)
    assert score(rf"\boxed{{{bomb}}}", "x < 18") == 0


def test_a_refused_answer_says_so():
    assert math("math", r"\boxed{9^{9^{9^9}}}", "x < 18")["refused"] == 1
    assert math("math", r"\boxed{17}", "x < 18")["refused"] == 0


@pytest.mark.parametrize(
    "formula", ["x^2+y^2 \\le 8 r^2", "\\frac{1}{2}<x", "x \\in (-\\infty, 3]", "2^{99} < x", "-80\\leq g(x)\\leq 82"]
)
def test_the_gate_lets_plain_formulas_pass(formula):
    assert may_reach_algebra(formula)


def test_a_phrase_counts_in_the_last_thousand_characters_only():
    assert after_phrase("answer: 5" + " " * 900) == "5"
    assert after_phrase("answer: 5" + " " * 1000) is None
    assert final_answer("\u0130 ANSWER: 5") == "5"


NUMBERS = st.integers(1000, 10**12 - 1)
SPACED_COMMAS = st.sampled_from([", ", " , ", ",\\,", ",\\;", ",\\ ", ",~", ",\\quad ", " and ", "\\text{ or }", "; "])


@given(NUMBERS, st.sampled_from([",", "{,}", ",\\!", "\\,", " "]), st.sampled_from(["", "-", "$", "\\$"]))
def test_thousands_may_be_separated_in_any_usual_way(whole, separator, before):
    written = f"{before}{whole:,}".replace(",", separator)
    assert compare(f"{before}{whole}", written) is True
    assert compare(f"{before}{whole + 1}", written) is False


@given(st.lists(st.integers(100, 999), min_size=2, max_size=5), SPACED_COMMAS)
def test_a_comma_with_space_separates_elements_and_never_thousands(elements, separator):
    written = separator.join(map(str, elements))
    assert compare("".join(map(str, elements)), written) is False
    assert compare(", ".join(map(str, reversed(elements))), written) is True


@given(st.lists(st.integers(-99, 99), min_size=2, max_size=4, unique=True), st.randoms(use_true_random=False))
def test_spelled_variables_on_one_side_are_the_tuple_in_their_order_and_on_both_sides_in_any_order(values, draw):
    names = "abcd"[: len(values)]
    bare = f"({', '.join(map(str, values))})"
    named = f"({', '.join(names)}) = {bare}"
    pairs = [f"{name} = {value}" for name, value in zip(names, values, strict=True)]
    shuffled = draw.sample(pairs, len(pairs))
    other = f"({', '.join(map(str, values[::-1]))})"
    assert compare(bare, named) is compare(named, bare) is compare(bare, ", ".join(pairs)) is True
    assert compare(named, ", ".join(shuffled)) is compare(", ".join(shuffled), named) is True
    assert compare(other, named) is compare(other, ", ".join(pairs)) is False
    assert compare(bare, ", ".join(shuffled)) is (shuffled == pairs)


@given(st.fractions(-100, 100, max_denominator=99), st.integers(1, 6), st.sampled_from(["\\approx", "\u2248", "\\simeq"]))
def test_an_exact_value_may_carry_its_own_decimal_and_no_other(value, places, sign):
    exact = rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
    assert compare(exact, f"{exact} {sign} {float(value):.{places}f}") is True
    assert compare(exact, f"x = {exact} {sign} {float(value):.{places}f}") is True
    wrong = f"{float(value) + 2 * 10**-places:.{places}f}"
    assert compare(exact, f"{exact} {sign} {wrong}") is not True
    assert compare(wrong, f"{exact} {sign} {wrong}") is not True


@pytest.mark.parametrize(
    "piece",
    [
        "1,000",
        "1,",
        "x=1,",
        "x=1;",
        "1\\approx ",
        "\\binom52",
        "\\binom{x}{99}",
        "1e99 ",
        "1{,}",
        "1,\\!000",
        "(a,b)=(",
        "p=5,q=2;",
        "!=",
    ],
)
def test_time_is_linear_in_hostile_answers(piece):
    answer = (piece * 2000)[:1990]
    start = time.process_time()
    compare(answer, "7" + answer)
    assert time.process_time() - start < 0.5


# ---- bounds of the value and of the time ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gold", "right", "wrong"),
    [
        ("1.6e-19", [r"1.6 \times 10^{-19}", r"\frac{16}{10^{20}}"], ["0", r"1.7 \times 10^{-19}", r"10^{-30}", r"\frac{1}{10^{19}}"]),
        ("1.602176e-19", [r"1.602176 \cdot 10^{-19}"], ["0", r"\frac{1}{10^{15}}", r"\frac{17}{10^{20}}"]),
        (r"10^{-20}\sqrt{2}", [r"\sqrt{2} \cdot 10^{-20}"], ["0", r"10^{-20}\sqrt{3}", r"10^{-13}"]),
        ("0", [r"\sin \pi", r"\sqrt{2}-\sqrt{2}", r"\cos(\frac{\pi}{2})", "0.0"], [r"10^{-15}", r"10^{-20}\sqrt{2}"]),
        ("1", [r"\sin^2 x + \cos^2 x", r"-e^{i \pi}", r"\sqrt{2}-\sqrt{2}+1"], [r"1+10^{-8}"]),
    ],
)  # fmt: skip
def test_small_values_are_told_apart_and_from_nothing(gold, right, wrong):
    assert [score(rf"\boxed{{{answer}}}", gold) for answer in right] == [1] * len(right)
    assert [score(rf"\boxed{{{answer}}}", gold) for answer in wrong] == [0] * len(wrong)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        *[("17*23", 1), ("{17}{23}", 1), ("17[23]", 1), ("17{23}", 1), ("(17)(23)", 1), ("391", 0), ("(391)", 0), ("{391}", 0)],
        *[("-8", 0), (r"\frac12", 1), (r"\sqrt{4}", 1), ("x=5+3", 1), ("2^3", 1), ("5!", 1), (r"1\frac{2}{3}", 1), ("0.5", 0), ("50%", 0)],
        *[(r"\sin 2x", 2), (r"\frac{17 \cdot 2}{3}", 2)],
    ],
)  # fmt: skip
def test_every_operation_counts_also_a_product_without_a_sign(answer, expected):
    assert operations(answer) == expected


@pytest.mark.parametrize("answer", ["{17}{23}", "17[23]", r"\boxed{17{23}}", "17{23}"])
def test_a_product_without_a_sign_is_no_value_either(answer):
    asked = {"question": "What is 17*23?"}
    assert math("math", rf"\boxed{{{answer}}}", "391", asked)["score"] == 0


@pytest.mark.parametrize("gold", [r"\frac14", r"\frac52", "5", "-3"])
@pytest.mark.parametrize("form", [r"= 2 + {}", r"\neq {}", r"\geq {}", r"\le {}", "> {}", r"x \neq {}", r"5 < {}", r"= {} + 1"])
def test_a_relation_to_a_number_is_not_the_number(gold, form):
    assert score(rf"\boxed{{{form.format(gold)}}}", gold) == 0
    assert score(rf"\boxed{{= {gold}}}", gold) == 1
    assert score(rf"\boxed{{{form.format(gold)}}}", rf"{form.format(gold)}") == 1


HARD = [
    r"x+\sqrt{x+\sqrt{x+\sqrt{x}}}<18",
    r"\sin(x)+\cos(2x)+\tan(3x)<1",
    r"(x+1)^4(x+2)^4(x+3)^4(y+1)^4 < 1",
    r"\frac{x^9+1}{x^8+3}<\frac{x^7-1}{x^6+2}",
    r"\sin(x)+\cos(2x)=y^3",
    r"\tan(x)\cdot\sqrt{y}+\ln(z) \le 1",
    r"|x|+|y|+|z|+|x-y| \le 1",
    r"\frac{x}{2}^2\pi-x^2*y = x*|x|*\sin x \cdot \ln y*\left(x\right)*e^x*y \cdot 2/y*e^x/\left(x\right)/\frac{x}{2} \cdot \frac{x}{2} \cdot e^x-2-e^x-x^2x",
    r"x^2/x^2/x, e^x-y+\ln y \cdot y \cdot \ln y*\left(x\right) \cdot \ln y*\pi \cdot |x| \cdot (x+1)-x-\pi*y-\sin x\pm (x+1)/x",
]


@pytest.mark.parametrize(("gold", "times"), [("x < 18", 2), (r"x^2+\sin y = 0", 1), (r"[2, \infty)", 1)])
@pytest.mark.parametrize("answer", HARD)
def test_an_answer_that_is_hard_for_algebra_is_worth_0_in_half_a_second_every_time(gold, times, answer):
    verdicts = []
    for _ in range(times):
        equivalent.cache_clear()
        before = os.times()
        verdicts.append(math("math", rf"\boxed{{{answer}}}", gold))
        after = os.times()
        # Without the kernel's seconds: it copies the pages of a fork, and this process has many more than one that computes rewards.
        assert after.user - before.user + after.children_user - before.children_user < 0.5
    assert verdicts == verdicts[:1] * times and verdicts[0]["score"] == 0


def test_work_that_does_not_end_is_killed(monkeypatch):
    def endless(gold, answer):
        while True:
            pass

    math_rule._load()
    monkeypatch.setattr(math_rule, "_equal", endless)
    equivalent.cache_clear()
    assert equivalent("x", "y") is False
    equivalent.cache_clear()


def test_the_verdict_does_not_depend_on_what_was_asked_before():
    pairs = [(gold, answer) for gold, answer in [*SAME, *DIFFERENT] if compare(gold, answer) is None]
    one = [score(rf"\boxed{{{answer}}}", gold) for gold, answer in pairs]
    assert one == [score(rf"\boxed{{{answer}}}", gold) for gold, answer in reversed(pairs)][::-1]
