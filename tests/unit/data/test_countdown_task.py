from grpo_rl.data.tasks.countdown import countdown, split_of
from grpo_rl.rewards.math.math_values import typed_value


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
    assert split_of((3, 25, 7)) == split_of((25, 7, 3))
