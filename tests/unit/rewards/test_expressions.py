from fractions import Fraction

import pytest

from grpo_rl.rewards.rules.expressions import NotAnExpression, arithmetic_value, formula


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


def read(text):
    return formula(text, lambda digits: Fraction(digits), {"x": Fraction(3)}, {"double": lambda value: 2 * value})


@pytest.mark.parametrize(
    ("text", "value"),
    [("x**2 - 1", 8), ("double(x + 1)/4", 2), ("2**10", 1024), ("x**-1", Fraction(1, 3)), ("1.5*x", Fraction(9, 2))],
)
def test_a_formula_is_built_from_the_given_names_and_functions(text, value):
    assert read(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "y",
        "x.real",
        "triple(x)",
        "double(x, x)",
        "double(*x)",
        "double(value=x)",
        "9**9**9",
        "x**65",
        "(9**9)**9",
        "2**x",
        "x@x",
        "lambda: 0",
        "x<1",
        "1e10000",
        "1e-10000",
        "1e1_0",
        "9_9",
        "(9e99)**64",
        "9e999*9e999*9e999",
        "1/9e999/9e999/9e999",
    ],
)
def test_a_formula_cannot_reach_anything_else_nor_grow_without_bound(text):
    with pytest.raises(NotAnExpression):
        read(text)
