"""Many responses in one message, and functions that take lists: nobody pays for a neighbour."""

from __future__ import annotations

import time

import pytest

from grpo_rl.config.schema.tree import RewardConfig
from grpo_rl.errors import RewardError
from grpo_rl.processes.child import OutputLog
from grpo_rl.rewards.compose import RewardFunction
from grpo_rl.rewards.runtime.runner import RewardRunner
from grpo_rl.rewards.runtime.worker import Job, Reply, RewardProcess, request_for
from tests.unit.rewards.test_runner import UNRULY, make_runner, rollout

TIMEOUT_S = 0.3


def ask(*texts):
    """Return the answers of a new process to these responses in one message."""
    config = RewardConfig(functions=[f"{UNRULY}:act"])
    worker = RewardProcess(config, [], OutputLog())
    assert worker.child.wait_until_ready() is None
    request, jobs = request_for([Job([rollout(str(place), text)], [component]) for place, text in enumerate(texts)])
    replies = [Reply() for _ in jobs]
    told = []
    worker.ask(request, replies, 1, TIMEOUT_S, lambda: told.append([reply.complete for reply in replies].count(True)))
    was_alive = worker.child.alive
    worker.child.kill()
    assert told == sorted(told)
    return [(reply.answers, reply.ended, reply.timed_out) for reply in replies], was_alive


component = type("Named", (), {"name": "act"})()
NEVER_BEGUN = ([], None, False)


def scored(value):
    return [{"result": {"score": value}}], None, False


def test_a_call_that_hangs_is_killed_at_its_own_deadline_and_those_behind_it_were_never_begun():
    started = time.perf_counter()
    replies, was_alive = ask("score 1", "loop", "score 2", "score 3")
    assert time.perf_counter() - started < 3.0
    assert replies == [scored(1.0), ([], "killed after 0.3 s", True), NEVER_BEGUN, NEVER_BEGUN]
    assert not was_alive


def test_a_process_that_dies_has_answered_for_those_before_and_for_nobody_behind():
    replies, _ = ask("score 1", "os-exit 3", "score 2")
    assert replies == [scored(1.0), ([], "the process exited with code 3", False), NEVER_BEGUN]


def test_a_process_without_memory_answers_and_then_calls_nothing_more():
    replies, was_alive = ask("no-memory", "score 2")
    assert replies[0][0][0]["failure"] == "reward_error" and replies[0][1] is None
    assert (replies[1], was_alive) == (NEVER_BEGUN, False)


def test_hostile_responses_among_many_cost_no_other_its_score_nor_its_place():
    deeds = {30: "loop", 31: "os-exit 1", 150: "raise", 151: "nan"}
    runner = make_runner((1, "act"), num_workers=2, timeout_s=TIMEOUT_S)
    runner.check_started()
    rollouts = [rollout(str(place), deeds.get(place, f"score {place}")) for place in range(200)]
    try:
        for item in rollouts[:100]:
            runner.submit(item)
        runner.wait(rollouts)
    finally:
        runner.close()
    assert [item.reward for item in rollouts] == [None if place in deeds else float(place) for place in range(200)]
    failures = {place: rollouts[place].failure for place in deeds}
    kinds = dict.fromkeys(deeds, "reward_error") | {30: "reward_timeout", 151: "reward_invalid"}
    assert failures == kinds


@pytest.fixture(scope="module")
def lists():
    settings = {"batched": ["act_on_all"], "function_kwargs": {"act_on_all": {"plus": 5.0}}}
    runner = make_runner((10, "act_on_all"), (1, "act"), num_workers=2, timeout_s=TIMEOUT_S, **settings)
    runner.check_started()
    yield runner
    runner.close()


@pytest.mark.parametrize(
    ("deed", "kind", "cause"),
    [("exit-list", "reward_error", "exited with code 4"), ("hang-list", "reward_timeout", "took longer"),
     ("raise-list", "reward_error", "ValueError: no"), ("short-list", "reward_invalid", "returned 0 results for 1")],
)  # fmt: skip
def test_a_response_that_a_list_function_fails_for_takes_the_score_of_no_other(lists, deed, kind, cause):
    texts = ["score 1", f"score 2 {deed}", "score 3"]
    rollouts = [rollout(str(place), text) for place, text in enumerate(texts)]
    lists.wait(rollouts)
    # The function gives 5 + the place in its list: as if the failing one had never been written.
    assert [item.reward_parts.get("act_on_all") for item in rollouts] == [5.0, None, 6.0]
    assert [item.reward for item in rollouts] == [51.0, None, 63.0]
    assert [item.failure for item in rollouts] == [None, kind, None]
    assert cause in rollouts[1].failure_cause


def test_where_a_list_function_fails_only_for_all_together_nobody_has_a_score(lists):
    with pytest.raises(RewardError, match=r"3 of 3.*results for 3 responses; with each response alone it does not fail"):
        lists.wait([rollout(str(place), f"score {place} short") for place in range(3)])


def test_a_step_of_many_short_responses_costs_the_run_little_of_its_own_time():
    config = RewardConfig(functions=["arithmetic"], num_workers=2)
    runner = RewardRunner(RewardFunction.from_config(config), config)
    runner.check_started()
    steps = [[rollout(f"{step}-{place}", str(place)) for place in range(512)] for step in range(3)]
    spent = []
    try:
        for rollouts in steps:
            started = time.process_time()
            for item in rollouts:
                runner.submit(item)
            runner.wait(rollouts)
            spent.append(time.process_time() - started)
    finally:
        runner.close()
    # About 0.015 s; a message for each response by itself took 0.07.
    assert min(spent) < 0.04
    assert {item.failure for rollouts in steps for item in rollouts} == {None}
