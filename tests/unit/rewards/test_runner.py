"""Rewards in processes of their own: real processes, and functions that misbehave in every way we know."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from machine_lacks import memory_group, needs_sandbox

from grpo_rl.config.schema.tree import RewardConfig
from grpo_rl.errors import NoRewardError, RewardError
from grpo_rl.processes.child import CHILDREN, LOG_LIMIT, OutputLog
from grpo_rl.processes.family import STOP_SIGNALS
from grpo_rl.rewards.compose import RewardFunction
from grpo_rl.rewards.contract import Sample
from grpo_rl.rewards.runtime.process import Job, RewardProcess
from grpo_rl.rewards.runtime.runner import RewardRunner
from grpo_rl.types import GREEDY, Prompt, Rollout

UNRULY = Path(__file__).with_name("unruly.py")
TIMEOUT_S = 1.0


def rollout(uid, text="", sample=0, response_ids=(1,), **extra_info):
    prompt = Prompt(uid, (1,), "", "test", None, extra_info)
    return Rollout(prompt, sample, response_ids, (0.0,) * len(response_ids), "stop", ((1, len(response_ids)),), text=text)


def make_runner(*functions, log_folder=None, decode=None, **settings):
    config = RewardConfig(functions=[f"{factor}*{UNRULY}:{name}" for factor, name in functions], **settings)
    logs = [] if log_folder is None else [log_folder / f"reward-{place}.log" for place in range(config.num_workers)]
    return RewardRunner(RewardFunction.from_config(config, decode), config, logs=logs)


@pytest.fixture(scope="module")
def log_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def runner(log_folder):
    """Two processes for all tests that do not need others; each leaves them as it found them, or replaced."""
    runner = make_runner((2, "act"), timeout_s=TIMEOUT_S, num_workers=2, log_folder=log_folder, memory_limit_gb=1)
    runner.check_started()
    yield runner
    runner.close()


def is_alive(pid):
    """Return whether the process still runs a moment after it was killed, which takes the kernel some time."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            if "zombie" in Path(f"/proc/{pid}/status").read_text():
                return False
        except (FileNotFoundError, ProcessLookupError):
            return False
        os.sched_yield()
    return True


def test_rollouts_come_back_in_order_and_scored_whether_submitted_before_or_not(runner):
    rollouts = [rollout("a", f"score {i}", i) for i in range(20)]
    for item in rollouts[::2]:
        runner.submit(item)
    scored = runner.wait(rollouts)
    assert [item is other for item, other in zip(scored, rollouts, strict=True)] == [True] * 20
    assert [item.reward for item in scored] == [2.0 * i for i in range(20)]
    assert [item.reward_parts for item in scored] == [{"act": float(i)} for i in range(20)]
    assert all(item.failure is None for item in scored)


def test_signals_that_ask_a_run_to_stop_change_no_reward(runner):
    runner.wait([rollout(uid, "score 1") for uid in "ab"])
    before = dict(runner.processes.pids)
    for pid in before.values():
        for number in STOP_SIGNALS:
            os.killpg(pid, number)
    assert [item.reward for item in runner.wait([rollout(uid, "score 3") for uid in "cdef"])] == [6.0] * 4
    assert runner.processes.pids == before


def test_scoring_starts_at_submission_in_several_processes_and_never_holds_up_the_caller(tmp_path):
    runner = make_runner((2, "act"), num_workers=2, timeout_s=60)
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    # The first two wait for the caller; then two whose texts are far larger than a pipe holds wait for each other.
    rollouts = [rollout(uid, f"meet {tmp_path}/first 3") for uid in "ab"]
    rollouts += [rollout(uid, f"meet {tmp_path}/second 2 " + " " * 2**20) for uid in "cd"]
    for item in rollouts:
        runner.submit(item)
    (tmp_path / "first" / "all are submitted").touch()
    assert [item.reward for item in runner.wait(rollouts)] == [2.0] * 4
    runner.close()


def test_a_new_response_to_the_same_prompt_is_scored_anew(runner):
    first, other = rollout("a", "score 1"), rollout("a", "score 2", response_ids=(2, 3))
    runner.submit(first)
    runner.submit(first)
    assert runner.wait([other])[0].reward == 4.0


FAILURES = [
    ("loop", "reward_timeout", r"took longer than reward\.timeout_s=1 "),
    ("lock", "reward_timeout", "took longer"),
    ("segfault", "reward_error", "died of SIGSEGV"),
    ("os-exit 3", "reward_error", "exited with code 3"),
    ("exit 5", "reward_error", "SystemExit: 5"),
    ("raise", "reward_error", "ZeroDivisionError: division by zero"),
    ("recurse", "reward_error", "RecursionError"),
    ("allocate", "reward_error", "MemoryError"),
    ("close-all", "reward_error", "closed its channel|exited with code|died of"),
    ("nan", "reward_invalid", "score is nan"),
    ("none", "reward_invalid", r"score is None \(NoneType\)"),
    ("slippery", "reward_invalid", "cannot be read: RuntimeError: no"),
    ("steps", "reward_invalid", "object is no plain data"),
    ("deep", "reward_invalid", "nested too deep"),
]


@pytest.mark.parametrize(("deed", "kind", "cause"), FAILURES)
def test_a_failure_has_its_kind_and_cause_within_the_deadline_and_its_neighbours_have_their_scores(runner, deed, kind, cause):
    rollouts = [rollout("a", "score 1"), rollout("b", deed, 3), rollout("c", "score 2"), rollout("d", "score 3")]
    runner.check_started()
    runner.wait(rollouts)
    assert [item.reward for item in rollouts] == [2.0, None, 4.0, 6.0]
    assert (rollouts[1].failure, rollouts[1].reward_parts) == (kind, {})
    assert re.search(rf"reward 'act' for prompt b, sample 3: .*({cause})", rollouts[1].failure_cause, re.DOTALL)


def pids_of(runner, word, file):
    """Score a function that notes pids in the file, again if its time was over before it did."""
    for attempt in range(20):
        runner.wait([rollout(f"a{attempt}", f"{word} {file}"), rollout(f"b{attempt}", "score 1")])
        if file.exists() and (pids := file.read_text().split()):
            return [int(pid) for pid in pids]
    raise AssertionError(f"{word} has never noted its pids")


def test_all_that_a_killed_reward_had_started_is_killed_with_it(runner, tmp_path):
    pids = pids_of(runner, "fork", tmp_path / "pids")
    assert len(pids) == 3 and not any(map(is_alive, pids))


def test_what_a_process_that_ends_by_itself_leaves_behind_is_killed(runner, tmp_path):
    [pid] = pids_of(runner, "leave", tmp_path / "pid")
    assert not is_alive(pid)


def test_a_fork_that_returns_from_the_function_answers_nothing(runner):
    rollouts = [rollout(str(i), "return-from-fork") for i in range(4)]
    assert [(item.reward, item.failure_cause) for item in runner.wait(rollouts)] == [(2.0, None)] * 4


def test_a_process_that_an_earlier_response_has_spoiled_costs_the_next_one_nothing(runner):
    runner.wait([rollout("a", "score 1"), rollout("b", "score 1")])
    before = set(runner.processes.pids.values())
    assert [item.reward for item in runner.wait([rollout(str(i), "spoil") for i in range(2)])] == [2.0, 2.0]
    later = [rollout(str(i), "rest") for i in range(10)]
    assert [item.reward for item in runner.wait(later)] == [2.0] * 10
    assert set(runner.processes.pids.values()) != before


def test_what_functions_print_is_in_the_log_as_far_as_it_has_room_and_not_on_the_screen(runner, log_folder, capfd):
    assert runner.wait([rollout("a", "print"), rollout("b", "score 1")])[0].reward == 2.0
    sizes = sorted(path.stat().st_size for path in log_folder.iterdir())
    assert LOG_LIMIT < sizes[-1] < LOG_LIMIT + 1000
    assert capfd.readouterr() == ("", "")


def test_data_that_cannot_be_sent_is_a_failure_of_its_rollout(runner):
    rollouts = [rollout("a", "score 1"), rollout("b", "score 1", image=object())]
    runner.wait(rollouts)
    assert rollouts[0].reward == 2.0
    assert rollouts[1].failure == "reward_error" and "object is no plain data" in rollouts[1].failure_cause


def test_when_all_rewards_fail_the_run_stops_with_counts_and_causes(runner):
    greedy = rollout("b", "score 1", GREEDY)
    with pytest.raises(
        RewardError, match=r"no response has a reward: 3 of 4 .*\(2 reward_error, 1 reward_invalid\), first: .*Zero"
    ):
        runner.wait([rollout("a", "raise"), rollout("a", "raise", 1), rollout("b", "nan"), greedy])


def test_the_processes_load_no_torch_and_stay_small(runner):
    for pid in runner.processes.pids.values():
        mapped, status = Path(f"/proc/{pid}/maps").read_text(), Path(f"/proc/{pid}/status").read_text()
        assert "torch" not in mapped
        assert int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) < 512 * 1024
    program = "import grpo_rl.rewards.runtime.process, sys; print({'torch', 'numpy', 'transformers', 'ray'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_async_and_batched_functions_and_fixed_values_for_failures_and_nobody_left_at_the_end():
    functions = [(1, "act_later"), (10, "act_on_all")]
    settings = {"batched": ["act_on_all"], "function_kwargs": {"act_on_all": {"plus": 5.0}}}
    runner = make_runner(*functions, num_workers=1, on_failure="value", failure_value=-3.0, **settings)
    rollouts = [rollout("a", "score 1"), rollout("b", "raise"), rollout("c", "none"), rollout("d", "score 2")]
    # Submitted in another order than they are waited for: lists are in the order of the latter.
    for item in reversed(rollouts):
        runner.submit(item)
    runner.wait(rollouts)
    assert [item.reward for item in rollouts] == [1.0 + 10 * 5.0, -3.0, -3.0, 2.0 + 10 * 8.0]
    assert [item.failure for item in rollouts] == [None, "reward_error", "reward_invalid", None]
    assert rollouts[3].reward_parts == {"act_later": 2.0, "act_on_all": 8.0}
    with pytest.raises(RewardError, match="1 results for 2 responses; with each response alone it does not fail"):
        runner.wait([rollout("a", "score 1"), rollout("b", "short")])
    pids = dict(runner.processes.pids)
    runner.close()
    assert len(pids) == 1 and not any(map(is_alive, pids.values()))
    with pytest.raises(RuntimeError, match="closed"):
        runner.submit(rollout("a"))


def test_steps_come_back_on_tokens_and_a_response_without_any_is_invalid_where_they_are_read():
    def decode(token_ids):
        return "".join(["two-", "ste", "ps"][token] for token in token_ids)

    runner = make_runner((0.5, "act"), num_workers=1, decode=decode)
    rollouts = [rollout("a", "two-steps", response_ids=(0, 1, 2)), rollout("b", "score 1", response_ids=(0,))]
    runner.wait(rollouts)
    runner.close()
    assert (rollouts[0].reward, rollouts[0].steps) == (0.5, ((0, 0.5), (2, 0.25)))
    assert rollouts[1].failure == "reward_invalid" and "returned no 'steps'" in rollouts[1].failure_cause


def test_a_failure_stops_the_run_where_it_shall_even_while_others_hang():
    runner = make_runner((1, "act"), num_workers=1, on_failure="stop", timeout_s=60)
    with pytest.raises(RewardError, match=r"1 of 2 rewards failed \(1 reward_invalid\).*prompt b.*reward\.on_failure=stop"):
        runner.wait([rollout("a", "score 1"), rollout("b", "none")])
    runner.submit(rollout("c", "loop"))
    started = time.perf_counter()
    runner.close()
    assert time.perf_counter() - started < 20, "it did not wait for the one that hangs"
    assert not any(map(is_alive, runner.processes.pids.values()))


def test_a_process_that_cannot_start_ends_the_run_with_the_cause(tmp_path, monkeypatch):
    path = tmp_path / "once.py"
    path.write_text("import os\nif os.environ.get('BROKEN'): raise KeyError('a setting')\ndef score(**_):\n    return 1.0\n")
    config = RewardConfig(functions=[f"{path}:score"], num_workers=1)
    function = RewardFunction.from_config(config)
    monkeypatch.setenv("BROKEN", "1")
    runner = RewardRunner(function, config)
    try:
        with pytest.raises(RewardError, match=r"cannot start: .*once\.py failed: KeyError: 'a setting'"):
            runner.wait([rollout("a")])
    finally:
        runner.close()


@needs_sandbox
def test_a_process_that_the_kernel_ends_for_want_of_memory_has_that_as_its_cause(tmp_path: Path) -> None:
    (tmp_path / "large.py").write_text("def score(**_):\n    return float(len(bytearray(400_000_000)))\n")
    config = RewardConfig(functions=[f"{tmp_path}/large.py:score"], num_workers=1, memory_limit_gb=None)
    runner = RewardRunner(RewardFunction.from_config(config), config)
    runner.check_started()
    given = rollout("a")
    with memory_group(100 * 2**20) as put:
        put(*runner.processes.pids.values())  # type: ignore[attr-defined]
        with pytest.raises(NoRewardError, match=r"1 reward_error.*the kernel ended the process, as memory ran out"):
            runner.wait([given])
    runner.close()


def test_programs_are_judged_in_their_sandbox_from_a_reward_process():
    config = RewardConfig(functions=["code"], timeout_s=60, num_workers=1)
    runner = RewardRunner(RewardFunction.from_config(config), config, data_sources=["code"])
    truth = {"inputs": ["1 2", "5 5"], "outputs": ["3", "10"]}
    right, half = "```python\nprint(sum(map(int, input().split())))\n```", "```python\nprint(3)\n```"
    rollouts = [
        Rollout(Prompt(uid, (1,), "", "code", truth), 0, (1,), (0.0,), "stop", ((1, 1),), text=text)
        for uid, text in (("a", right), ("b", half))
    ]
    try:
        assert [scored.reward for scored in runner.wait(rollouts)] == [1.0, 0.5]
    finally:
        runner.close()


def test_no_process_outlives_a_run_that_is_killed(tmp_path):
    program = f"""
import os, signal
from grpo_rl.config.schema.tree import RewardConfig
from grpo_rl.processes.child import OutputLog
from grpo_rl.rewards.runtime.process import RewardProcess
worker = RewardProcess(RewardConfig(functions=['{UNRULY}:act']), [], OutputLog())
assert worker.child.wait_until_ready() is None
print(worker.child.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert not is_alive(int(done.stdout))


def test_a_process_says_where_in_a_users_function_it_is_whatever_it_does_there():
    runner = make_runner((1, "act"), timeout_s=30, num_workers=1)
    try:
        runner.check_started()
        runner.submit(rollout("a", "slow 3"))
        (child,) = [one for one in CHILDREN if one.pid in runner.processes.pids.values()]
        deadline = time.monotonic() + 120
        while "in slow" not in (stack := " ".join(child.stack())) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert re.search(r"unruly\.py\", line \d+ in slow", stack), stack
        assert child.name == "reward process" and child.quiet_s < 10
        assert runner.wait([rollout("a", "slow 3")])[0].reward == 3, "it goes on as if it had not been asked"
    finally:
        runner.close()


# ---- many responses in one message, and functions that take lists: nobody pays for a neighbour -------------


def ask(*texts):
    """Return what a new process gives for these responses in one message, which of them are left, and whether it still lives."""
    config = RewardConfig(functions=[f"{UNRULY}:act"], timeout_s=1.0)
    worker = RewardProcess(config, [], OutputLog())
    assert worker.child.wait_until_ready() is None
    jobs = [Job([partial(Sample, "test", text, None, {})], ["act"]) for text in texts]
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
    runner = make_runner((1, "act"), num_workers=2, timeout_s=1.0)
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
    runner = make_runner((10, "act_on_all"), (1, "act"), num_workers=2, timeout_s=1.0, **settings)
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
