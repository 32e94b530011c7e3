"""The rules of recovery without a process: who answers for what, how often, and when a worker is beyond hope."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_rl.cluster.recovery.supervisor import Recoveries, verdict
from grpo_rl.cluster.roles.rollout_pool import Ledger
from grpo_rl.cluster.session.launcher import is_tracker
from grpo_rl.config.schema.tree import TrainerConfig
from grpo_rl.errors import ClusterError
from grpo_rl.processes.family import descendants, kill_tree, state, waits_for_cpu
from grpo_rl.types import Request, Sampling


def requests(count: int) -> list[Request]:
    return [Request(f"r{i}", (1,), Sampling(max_tokens=1)) for i in range(count)]


# ---- the ledger ---------------------------------------------------------------------------------------


@given(st.data())
def test_every_request_is_answered_once_whatever_comes_late_twice_or_never(data):
    """Any order of answers, repeated and late answers, losses and arrivals."""
    ledger: Ledger[int] = Ledger(requests(8))
    ledger.join(0)
    asked: list[tuple[int, str]] = []
    counted: list[str] = []
    newest = 0
    while ledger.waiting or ledger.begun:
        asked += [(worker, r.request_id) for worker, share in ledger.dispatch(3).items() for r in share]
        event = data.draw(st.sampled_from(["answer", "answer", "lose", "join"])) if newest < 6 else "answer"
        if event == "join" or not ledger.in_flight:
            newest += 1
            ledger.join(newest)
        elif event == "lose":
            ledger.leave(data.draw(st.sampled_from(sorted(ledger.in_flight))))
        else:
            # Of all that was ever asked of anybody: also what was answered, and what was taken away again.
            worker, name = data.draw(st.sampled_from(asked)) if data.draw(st.booleans()) else _waited_for(ledger, asked)
            if ledger.answered(worker, name):
                counted.append(name)
    assert sorted(counted) == [f"r{i}" for i in range(8)]


def _waited_for(ledger: Ledger[int], asked: list[tuple[int, str]]) -> tuple[int, str]:
    return next((w, name) for w, name in asked if name in ledger.in_flight.get(w, {}))


def test_what_a_lost_one_was_at_is_asked_first_and_in_its_order():
    ledger: Ledger[str] = Ledger(requests(5))
    ledger.join("a")
    ledger.join("b")
    assert {w: [r.request_id for r in share] for w, share in ledger.dispatch(2).items()} == {
        "a": ["r0", "r2"],
        "b": ["r1", "r3"],
    }
    assert ledger.leave("a") == 2
    assert [r.request_id for r in ledger.waiting] == ["r0", "r2", "r4"]
    assert not ledger.answered("a", "r0"), "a late answer of one that was given up"
    assert ledger.leave("a") == 0


def test_requests_are_added_and_forgotten_while_others_are_under_way():
    ledger: Ledger[str] = Ledger(requests(2))
    ledger.join("a")
    assert not ledger.begun and [r.request_id for r in ledger.dispatch(2)["a"]] == ["r0", "r1"]
    ledger.add([Request(f"late{i}", (1,), Sampling(max_tokens=1)) for i in range(3)])
    assert ledger.begun and ledger.dispatch(2) == {}
    ledger.forget(["r1", "late0"])
    assert not ledger.answered("a", "r1"), "its answer counts no more"
    assert [r.request_id for r in ledger.dispatch(9)["a"]] == ["late1", "late2"]
    assert all(ledger.answered("a", name) for name in ("r0", "late1", "late2")) and not (ledger.waiting or ledger.begun)


def test_the_turns_of_a_conversation_go_where_it_was_as_long_as_there_is_room():
    def turn(number: int, conversation: str) -> Request:
        return Request(f"{conversation}/{number}", [1], Sampling(1), conversation)

    ledger: Ledger[str] = Ledger([turn(0, "a"), turn(0, "b"), turn(0, "c")])
    for worker in ("x", "y"):
        ledger.join(worker)
    first = {one.conversation: worker for worker, some in ledger.dispatch(4).items() for one in some}
    assert sorted(first.values()) in (["x", "x", "y"], ["x", "y", "y"])
    for conversation, worker in first.items():
        assert ledger.answered(worker, f"{conversation}/0")
    # The other replica has less to do, and the conversation stays; if there is no room it goes on elsewhere.
    home = first["b"]
    other = "y" if home == "x" else "x"
    ledger.add([turn(1, "b"), turn(2, "b"), turn(3, "b")])
    shares = ledger.dispatch(2)
    assert [one.request_id for one in shares[home]] == ["b/1", "b/2"] and [one.request_id for one in shares[other]] == ["b/3"]
    # Conversations of a replica that is gone go on elsewhere.
    ledger.leave(home)
    ledger.leave(other)
    ledger.join("z")
    assert {one.request_id for one in ledger.dispatch(9)["z"]} == {"b/1", "b/2", "b/3"}


# ---- the budget ---------------------------------------------------------------------------------------


def test_the_budget_counts_each_worker_in_its_window_and_its_error_lists_every_cause():
    now = [0.0]
    trainer = TrainerConfig(max_restarts=2, restart_window_s=100.0)
    budget = Recoveries(trainer, lambda line: None, clock=lambda: now[0])
    failures = [(0.0, "first"), (50.0, "second"), (101.0, "third: the first is forgotten")]
    for now[0], cause in failures:
        budget.failed("rollout0", cause, "")
    budget.failed("rollout1", "of another", "")
    now[0] = 110.0
    with pytest.raises(ClusterError) as caught:
        budget.failed("rollout0", "fourth", "")
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("rollout0 failed and is not started again: restarts so far: 2 (trainer.max_restarts=2 within")
    assert [line.strip() for line in lines[1:]] == [
        "60 s ago, rollout0: second",
        "9 s ago, rollout0: third: the first is forgotten",
        "9 s ago, rollout1: of another",
        "0 s ago, rollout0: fourth",
    ]
    with pytest.raises(ClusterError, match="max_restarts=0"):
        Recoveries(TrainerConfig(max_restarts=0), print).failed("actor", "gone", "")


def test_what_happened_is_told_in_lines_and_counted_until_it_is_asked_for():
    lines: list[str] = []
    log = Recoveries(TrainerConfig(), lines.append)
    assert log.metrics() == {}
    log.failed("rollout0", "the process died\n  log: x", "another is started in its place")
    log.recovered("rollout0", "rollout", 2.5, "it serves weights of version 3")
    log.count("resampled", 4.0)
    assert lines == [
        "recovery: rollout0 failed: the process died; another is started in its place",
        "recovery: rollout0 is back after 2.5 s: it serves weights of version 3",
    ]
    expected = {"rollout_restarts": 1.0, "seconds": 2.5, "resampled": 4.0, "restarts_total": 1.0}
    assert log.metrics() == {f"recovery/{name}": number for name, number in expected.items()}
    assert log.metrics() == {}


# ---- health -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("silent_s", "activity", "expected"),
    [
        (2.9, None, None),
        (3.1, None, "the process froze: no heartbeat for 3.1 s"),
        (0.1, ("an engine step", 7.9, 0.5), None),  # 3 heartbeats and ten times the longest: 8 s
        (0.1, ("an engine step", 8.1, 0.5), "the worker hangs: an engine step for 8.1 s"),
        (0.1, ("an engine step", 59.0, None), None),  # what was never done may take as long as a start
        (0.1, ("an engine step", 61.0, None), "the worker hangs: an engine step for 61.0 s"),
    ],
)
def test_a_worker_is_given_up_after_three_missed_beats_or_when_it_is_far_slower_than_ever(silent_s, activity, expected):
    assert verdict(silent_s, activity, heartbeat_s=1.0, first_s=60.0) == expected


def test_a_process_without_a_core_is_told_from_one_that_is_stopped():
    """Three processes that compute on one core wait for it in turns; a fourth one is stopped, and waits for nothing."""
    core = min(os.sched_getaffinity(0))
    program = f"import os; os.sched_setaffinity(0, {{{core}}}); print(flush=True)\nwhile True: pass"
    processes = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) for _ in range(4)]
    try:
        for process in processes:
            assert process.stdout is not None and process.stdout.read(1)
        *busy, stopped = [process.pid for process in processes]
        os.kill(stopped, signal.SIGSTOP)
        while state(stopped) != "stopped by a signal":
            time.sleep(0.01)
        first = {pid: sum(waits_for_cpu(pid).values()) for pid in (*busy, stopped)}
        time.sleep(1.0)
        waited_s = {pid: sum(waits_for_cpu(pid).values()) - first[pid] for pid in first}
        assert sum(waited_s[pid] for pid in busy) > 0.3 and waited_s[stopped] == 0.0
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert waits_for_cpu(stopped) == {}


def test_a_stopped_process_and_a_child_in_a_session_of_its_own_are_ended():
    child = "import subprocess, sys; p = subprocess.Popen(['sleep', '1000'], start_new_session=True); print(p.pid, flush=True); p.wait()"
    parent = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert parent.stdout is not None
    grandchild = int(parent.stdout.readline())
    parent.send_signal(signal.SIGSTOP)
    kill_tree(parent.pid, title=b"ray::")
    assert parent.poll() is None, "a process of another name is left alone: the number was given to somebody else"
    kill_tree(parent.pid, title=sys.executable.encode())
    assert parent.wait(120) == -9
    deadline = time.monotonic() + 120
    while state(grandchild) != "has ended" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert state(grandchild) == "has ended"


@pytest.mark.parametrize("how", ["its family, when it has died", "its family", "its group, as Ray does"])
def test_shared_memory_of_a_killed_worker_is_removed_by_its_tracker(how: str) -> None:
    program = (
        "import time; from multiprocessing.shared_memory import SharedMemory\n"
        "from grpo_rl.workers.rollout import track_apart; track_apart()\n"
        "memory = SharedMemory(create=True, size=8); print(memory.name, flush=True); time.sleep(100)"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert parent.stdout is not None
        segment = Path("/dev/shm") / parent.stdout.readline().decode().strip()
        assert segment.exists()
        [tracker] = descendants(parent.pid)
        assert is_tracker(tracker), "as long as there is shared memory"
        if how == "its group, as Ray does":
            os.killpg(parent.pid, signal.SIGKILL)
        elif how == "its family, when it has died":
            parent.kill()
            parent.wait(120)
        kill_tree(parent.pid, title=sys.executable.encode(), spares=is_tracker)
        parent.wait(120)
        deadline = time.monotonic() + 120
        while segment.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not segment.exists()
    finally:
        parent.kill()
        parent.wait(120)
        assert parent.stdout is not None
        parent.stdout.close()
