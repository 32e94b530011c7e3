"""Many responses in one message, and functions that take lists: nobody pays for a neighbour."""

from __future__ import annotations

from functools import partial

import pytest

from grpo_rl.config.schema.tree import RewardConfig
from grpo_rl.errors import RewardError
from grpo_rl.processes.child import OutputLog
from grpo_rl.rewards.compose import RewardFunction
from grpo_rl.rewards.contract import Sample
from grpo_rl.rewards.runtime.process import Job, RewardProcess
from tests.unit.rewards.test_runner import UNRULY, make_runner, rollout

TIMEOUT_S = 1.0


def ask(*texts):
    """Return what a new process gives for these responses in one message, which of them are left, and whether it still lives."""
    config = RewardConfig(functions=[f"{UNRULY}:act"], timeout_s=TIMEOUT_S)
    components = RewardFunction.from_config(config).components
    worker = RewardProcess(config, [], OutputLog())
    assert worker.child.wait_until_ready() is None
    jobs = [Job([partial(Sample, "test", text, None, {})], components) for text in texts]
    told = []
    left = worker.ask(jobs, told.extend)
    was_alive = worker.child.alive
    worker.child.kill()
    assert [*told, *left] == jobs
    outcomes = [job.outcomes[0] for job in told]
    left_texts = [job.samples[0]().solution_str for job in left]
    return [getattr(one, "score", None) or one.cause for one in outcomes], left_texts, was_alive


def test_a_call_that_hangs_is_killed_at_its_own_deadline_and_those_behind_it_are_left():
    found = ask("score 1", "loop", "score 2", "score 3")
    cause = "took longer than reward.timeout_s=1 (response of 4 characters)"
    assert found == ([1.0, cause], ["score 2", "score 3"], False)


def test_a_process_that_dies_is_the_fault_of_its_first_call_only():
    assert ask("score 1", "os-exit 3", "score 2") == ([1.0], ["os-exit 3", "score 2"], False)
    cause = "the process exited with code 3"
    assert ask("os-exit 3", "score 2") == ([cause], ["score 2"], False)


def test_a_process_without_memory_answers_and_then_calls_nothing_more():
    [cause], left, was_alive = ask("no-memory", "score 2")
    assert "MemoryError" in cause and (left, was_alive) == (["score 2"], False)


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
     ("raise-list", "reward_error", "ValueError: no"), ("short-list", "reward_invalid", "returned 0 results for 1"),
     ("no-list", "reward_invalid", "returns a list of 1, and this is a float")],
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
