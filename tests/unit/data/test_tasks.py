import pytest

from grpo_rl.config.recipes import examples
from grpo_rl.data.sources.locate import open_source
from grpo_rl.data.tasks.arithmetic import Problem, arithmetic, split_of, without_carries
from grpo_rl.data.tasks.registry import TASKS, task_rows
from grpo_rl.errors import ConfigError, DataError
from grpo_rl.registry import load_function
from grpo_rl.rewards.math.math_values import typed_value

countdown = TASKS.get("countdown")
countdown_split = load_function(f"{examples()}/countdown.py:split_of")


def contents(rows):
    return [row["prompt"][0]["content"] for row in rows]


def test_train_and_validation_share_no_problem_not_even_with_its_operands_swapped():
    def unordered(rows):
        return {frozenset(text.removesuffix("=").split("+")) for text in contents(rows)}

    train = arithmetic(num_rows=4000, forms="2+2")
    val = arithmetic(num_rows=500, forms="2+2", split="val", seed=9)
    assert not unordered(train) & unordered(val)
    assert split_of(Problem(8, "+", 47)) == split_of(Problem(47, "+", 8))


def test_demonstrations_may_forget_carries_but_the_ground_truth_never_does():
    rows, careful = arithmetic(num_rows=2000, forgotten_carries=0.7), arithmetic(num_rows=2000)
    forgot = with_carry = 0
    for row, other in zip(rows, careful, strict=True):
        left, right = (int(part) for part in row["prompt"][0]["content"].removesuffix("=").split("+"))
        right_answer, wrong_answer = str(left + right), str(without_carries(Problem(left, "+", right)))
        assert row["reward_model"] == other["reward_model"] == {"style": "rule", "ground_truth": right_answer}
        assert row["extra_info"]["demonstration"] in (right_answer, wrong_answer) and "demonstration" not in other["extra_info"]
        with_carry += right_answer != wrong_answer
        forgot += row["extra_info"]["demonstration"] != right_answer
    assert 0.65 < forgot / with_carry < 0.75
    assert not any("demonstration" in row["extra_info"] for row in careful)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("arithmetics", ["Did you mean arithmetic"]),
        ("arithmetic?digit=2", ["no option digit"]),
        ("arithmetic?num_rows=many", ["num_rows=many must be a whole number"]),
        ("arithmetic?split=test", ["split=test must be one of train, val"]),
        ("arithmetic?num_rows", ["option=value"]),
        ("arithmetic?seed=1&seed=2", ["each option once"]),
        ("arithmetic?num_rows=0", ["num_rows=0 is out of range, it must be >= 1"]),
        ("arithmetic?forms=2/1", ["'2/1' in forms must be two numbers of digits"]),
        ("arithmetic?forgotten_carries=2", ["forgotten_carries=2.0 is out of range, it must be >= 0 and <= 1"]),
        ("arithmetic?forgotten_carries=some", ["must be of type float"]),
        ("countdown?num_numbers=7", ["num_numbers=7 must be from 2 to 6"]),
        ("countdown?operations=%2B", ["must be some of"]),
        (
            "countdown?min_number=9&max_number=3&min_target=9&max_target=3",
            ["min_number=9 and max_number=3", "min_target=9 must not"],
        ),
        ("countdown?operations=-&min_number=5&max_number=9&min_target=50", ["none has a target from 50 to 100"]),
        ("word_game?num_rows=0&turns=0", ["num_rows=0", "turns=0"]),
        ("word_game?answers=all", ["must be one of marks, known"]),
        ("word_game?letters=aab", ["letters='aab'"]),
        ("word_game?letters=AB&length=99", ["letters='AB'", "length=99"]),
        ("grid_world?size=2&walls=0.9", ["size=2", "walls=0.9"]),
        ("grid_world?size=3&fewest_steps=30", ["none has a way of 30 steps"]),
        ("episodes?prompt=", ["prompt"]),
    ],
)
def test_a_wrong_spec_is_refused_with_all_its_rules_before_anything_starts(spec, said):
    with pytest.raises(ConfigError) as refused:
        task_rows(f"task:{spec}")
    assert all(text in str(refused.value) for text in said), str(refused.value)


OWN_TASK = """
def rows(n: int = 2, fail: bool = False):
    if fail:
        return [][n]
    return Rows(n)

def none():
    return None

class Rows:
    def __init__(self, n):
        self.n = n
    def __len__(self):
        return self.n
    def __getitem__(self, index):
        if index == 1:
            raise KeyError("no such problem")
        return {"data_source": "a", "prompt": "1", "reward_model": {"ground_truth": "1"}}
"""


def test_failures_in_a_users_own_task_name_its_file_and_line(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(OWN_TASK)
    with pytest.raises(
        DataError,
        match=rf"IndexError: list index .*\n  in {file}, line 4, in rows: .*\n  it is called as .*n=5, fail=True\) and returns",
    ):
        task_rows(f"task:{file}:rows?n=5&fail=true")
    with pytest.raises(DataError, match=r"TypeError: .* has no len\(\)\n.* returns a sequence of rows"):
        task_rows(f"task:{file}:none")
    source = open_source(f"task:{file}:rows")
    assert source.row(0)["prompt"] == "1"
    with pytest.raises(DataError, match=rf"row 1: KeyError: 'no such problem' \({file}, line 17, in __getitem__\)"):
        source.row(1)


def solution(row):
    return row["extra_info"]["demonstration"].partition("<answer>")[2].removesuffix("</answer>")


def problem(row):
    truth = row["reward_model"]["ground_truth"]
    return tuple(truth["numbers"]), truth["target"]


def test_every_problem_comes_with_a_solution_that_uses_each_number_once():
    for row in countdown(num_rows=300, num_numbers="2,3,4,5", seed=3):
        value, used = typed_value(solution(row))
        numbers, target = problem(row)
        assert value == target and 10 <= target <= 100
        assert sorted(map(int, used)) == sorted(numbers) and all(1 <= number <= 99 for number in numbers)


def test_the_splits_share_no_set_of_numbers_in_whatever_order():
    options = {"num_numbers": "2", "max_number": 12}
    train = {tuple(sorted(problem(row)[0])) for row in countdown(num_rows=400, **options)}
    val = {tuple(sorted(problem(row)[0])) for row in countdown(num_rows=100, split="val", seed=5, **options)}
    assert train and val and not train & val
    assert countdown_split((3, 25, 7)) == countdown_split((25, 7, 3))
