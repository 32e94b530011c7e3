from fractions import Fraction

import pytest

from grpo_rl.rewards.rules.expressions import NotAnExpression, arithmetic_value, value_of


@pytest.mark.parametrize(
    ("text", "value", "numbers"),
    [
        ("(1 + 2) / 3", 1, [1, 2, 3]),
        (" 8/(3-8/3) ", 24, [8, 3, 8, 3]),
        ("-5 + 2", -3, [5, 2]),
        ("1/3", Fraction(1, 3), [1, 3]),
        ("2*(3+4)*5", 70, [2, 3, 4, 5]),
        ("2-3-4\n", -5, [2, 3, 4]),
        ("12/4/3", 1, [12, 4, 3]),
        ("-(2-5)*\n+1", 3, [2, 5, 1]),
    ],
)
def test_arithmetic_is_worked_out_exactly(text, value, numbers):
    assert arithmetic_value(text) == (value, numbers)


HOSTILE = [
    "",
    "1 +",
    "1/0",
    "2**3",
    "7//2",
    "1e9",
    "1.5",
    "x + 1",
    "__import__('os').system('true')",
    "().__class__",
    "9" * 31,
    "(" * 41 + "1" + ")" * 41,
    "-" * 900 + "1",
    "1+" * 600 + "1",
    "1\x00",
    "\uff11+\uff11",
    "1 if 1 else 2",
    "[1]",
    "1 = 1",
    "0x10",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_but_whole_numbers_and_four_operations_is_read(text):
    with pytest.raises(NotAnExpression):
        arithmetic_value(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [("3**2 - 1", 8), ("2**10", 1024), ("3**-1", Fraction(1, 3)), ("1.5*3", Fraction(9, 2)), ("4**(1/2)", 2)],
)
def test_numbers_may_have_a_point_and_powers(text, value):
    assert value_of(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "y",
        "1.real",
        "abs(1)",
        "9**9**9",
        "3**65",
        "(9**9)**9",
        "2@2",
        "1<2",
        "1_0",
        "1e10000",
        "1e-10000",
        "1e1_0",
        "9_9",
        "(9e99)**64",
        "9e999*9e999*9e999",
        "1/9e999/9e999/9e999",
    ],
)
def test_an_expression_cannot_reach_anything_else_nor_grow_without_bound(text):
    with pytest.raises(NotAnExpression):
        value_of(text)
