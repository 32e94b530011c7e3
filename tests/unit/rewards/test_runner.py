import threading

import pytest

from grpo_rl.errors import RewardError
from grpo_rl.rewards.compose import Component, RewardFunction
from grpo_rl.rewards.runner import RewardRunner
from grpo_rl.types import Prompt, Rollout


def rollout(uid, sample=0, text="", response_ids=(1,)):
    return Rollout(Prompt(uid, (1,), "", "test"), sample, response_ids, (0.0,) * len(response_ids), "stop", 1, text=text)


@pytest.fixture
def make_runner():
    runners = []

    def make(function, num_workers=2, timeout_s=30.0):
        runner = RewardRunner(RewardFunction([Component("mine", 2.0, function)]), num_workers, timeout_s)
        runners.append(runner)
        return runner

    yield make
    for runner in runners:
        runner.close()


def test_rollouts_come_back_in_order_and_scored_whether_submitted_before_or_not(make_runner):
    runner = make_runner(lambda solution_str, **_: {"score": len(solution_str), "length": len(solution_str)})
    rollouts = [rollout("a", i, "x" * i) for i in range(20)]
    for item in rollouts[::2]:
        runner.submit(item)
    scored = runner.wait(rollouts)
    assert [item is other for item, other in zip(scored, rollouts, strict=True)] == [True] * 20
    assert [item.reward for item in scored] == [2.0 * i for i in range(20)]
    assert [item.reward_parts for item in scored] == [{"mine": float(i), "mine/length": float(i)} for i in range(20)]


def test_scoring_starts_at_submission_and_not_at_wait(make_runner):
    scored = threading.Event()
    runner = make_runner(lambda **_: scored.set() or 1.0)
    runner.submit(rollout("a"))
    assert scored.wait(30)


def test_a_rollout_submitted_twice_is_scored_once_and_a_new_response_of_it_anew(make_runner):
    calls = []
    release = threading.Event()

    def function(solution_str, **_):
        release.wait(30)
        calls.append(solution_str)
        return 1.0

    runner = make_runner(function)
    first, other = rollout("a", text="first"), rollout("a", text="other", response_ids=(2, 3))
    runner.submit(first)
    runner.submit(first)
    release.set()
    runner.wait([first])
    assert calls == ["first"]
    runner.submit(first)
    runner.wait([other])
    assert "other" in calls


def test_two_rewards_run_at_the_same_time(make_runner):
    together = threading.Barrier(2)
    runner = make_runner(lambda **_: float(together.wait(30) >= 0))
    assert [item.reward for item in runner.wait([rollout("a"), rollout("b")])] == [2.0, 2.0]


def test_a_failing_reward_ends_the_wait_with_function_prompt_and_sample(make_runner):
    def function(solution_str, **_):
        return 1 / len(solution_str)

    runner = make_runner(function)
    with pytest.raises(RewardError, match=r"'mine' for prompt b, sample 3: ZeroDivisionError"):
        runner.wait([rollout("a", 0, "x"), rollout("b", 3, "")])


def test_a_reward_that_overruns_ends_the_wait_even_when_another_rollout_is_waited_for(make_runner):
    stuck = threading.Event()

    def function(solution_str, **_):
        if solution_str == "stuck":
            stuck.wait(60)
        return 1.0

    runner = make_runner(function, num_workers=1, timeout_s=0.2)
    try:
        runner.submit(rollout("b", 5, "stuck"))
        with pytest.raises(RewardError, match=r"'mine' for prompt b, sample 5 took longer than reward\.timeout_s=0\.2"):
            runner.wait([rollout("a", 0, "fine")])
    finally:
        stuck.set()


def test_a_closed_runner_takes_no_more_rollouts(make_runner):
    runner = make_runner(lambda **_: 1.0)
    runner.close()
    with pytest.raises(RuntimeError, match="closed"):
        runner.submit(rollout("a"))
