"""Environments that wait, block, hang, fail and die, in real processes: what each costs, and what it does not."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_rl.envs.environments import Named
from grpo_rl.envs.runtime.environment_pool import EnvironmentPool, Event
from grpo_rl.envs.runtime.episode_host import HostSetup
from grpo_rl.errors import ClusterError

HERE = Path(__file__).parent / "played_environments.py"


@pytest.fixture
def make() -> Iterator[Callable[..., EnvironmentPool]]:
    pools: list[EnvironmentPool] = []

    def build(name: str | None, *, tools: tuple[Named, ...] = (), workers: int = 1, step_timeout_s: float = 20.0, tool_timeout_s: float = 5.0, **options: Any) -> EnvironmentPool:  # fmt: skip
        named = None if name is None else Named(name if ":" in name else f"{HERE}:{name}", options)
        host = HostSetup(named, tools, max_parallel_calls=4, tool_timeout_s=tool_timeout_s, max_tool_response_length=60)
        pools.append(EnvironmentPool(host, workers, step_timeout_s=step_timeout_s))
        return pools[-1]

    yield build
    for pool in pools:
        pool.close()


def start(uid: str) -> dict[str, Any]:
    return {"uid": uid, "data_source": "test", "messages": [], "ground_truth": None, "extra_info": {}, "seed": 1}


def turn(text: str = "1", index: int = 0, *, is_last: bool = False, finish_reason: str = "stop") -> dict[str, Any]:
    return {
        "index": index,
        "text": text,
        "raw_text": text,
        "context_tokens": 1,
        "finish_reason": finish_reason,
        "token_ids": [1],
        "is_last": is_last,
    }


def events(pool: EnvironmentPool, number: int, wait_s: float = 120.0) -> dict[str, Event]:
    found: list[Event] = []
    until = time.monotonic() + wait_s
    while len(found) < number and time.monotonic() < until:
        found += pool.events(0.5)
    assert len(found) == number, found
    return {event.episode: event for event in found}


def begun(pool: EnvironmentPool, *names: str) -> None:
    for name in names:
        pool.begin(name, start(name))
    assert {event.what for event in events(pool, len(names)).values()} == {"answered"}


def test_answers_come_side_by_side_and_each_to_its_own_episode(make) -> None:
    pool = make("Waiting", wait_s=0.5)
    names = [f"e{i}" for i in range(40)]
    begun(pool, *names)
    began = time.monotonic()
    for name in names:
        pool.step(name, turn("12", index=0))
    found = events(pool, 40)
    assert time.monotonic() - began < 20.0, "one after the other they take longer"
    assert set(found) == set(names) and all(0.5 <= event.seconds < 20.0 for event in found.values())
    assert found["e3"].answer["info"] == {"turns": 1.0, "digits": 2.0}
    for name in names:
        pool.end(name)
    assert pool.num_waiting == 0


@pytest.mark.parametrize("kind", ["Waiting", "Blocking"])
def test_an_environment_that_hangs_costs_its_own_deadline_and_nothing_else(make, kind: str) -> None:
    pool = make(kind, step_timeout_s=3.0, wait_s=0.0, slow="bad", slow_s=300.0, turns=9)
    begun(pool, "bad", "good")
    before = pool.pids
    pool.step("bad", turn())
    for index in range(3):
        pool.step("good", turn(index=index))
        assert events(pool, 1)["good"].what == "answered"
    late = events(pool, 1)["bad"]
    assert late.what == "timeout" and late.seconds > 2.9
    pool.end("bad")
    # One that only waited could be cancelled; if a thread is blocked, the process gets no further episodes.
    until = time.monotonic() + 120
    while kind == "Blocking" and pool.pids == before and time.monotonic() < until:
        pool.events(0.2)
    assert (pool.pids != before) == (kind == "Blocking")
    pool.step("good", turn(index=3))
    assert events(pool, 1)["good"].what == "answered"
    pool.end("good")
    begun(pool, "next")
    if kind == "Blocking":
        until = time.monotonic() + 120
        while Path(f"/proc/{before[0]}").exists() and time.monotonic() < until:
            pool.events(0.2)
        assert not Path(f"/proc/{before[0]}").exists()


def test_a_name_that_begins_again_before_its_closing_has_ended_spares_no_process(make) -> None:
    pool = make("Blocking", step_timeout_s=3.0, wait_s=0.0, slow="0", slow_s=300.0, turns=9)
    begun(pool, "0")
    before = pool.pids
    pool.step("0", turn())
    assert events(pool, 1)["0"].what == "timeout"
    pool.end("0")
    pool.begin("0", start("other"))
    until = time.monotonic() + 120
    while pool.pids == before and time.monotonic() < until:
        pool.events(0.2)
    assert pool.pids != before


def test_a_process_whose_interpreter_is_held_is_killed_and_its_other_episodes_are_lost(make) -> None:
    pool = make("Holding", step_timeout_s=1.0, slow="bad")
    begun(pool, "bad", "good")
    pool.step("bad", turn())
    assert events(pool, 1)["bad"].what == "timeout"
    pool.end("bad")
    lost = events(pool, 1)["good"]
    assert lost.what == "lost" and "SIGKILL" in lost.cause
    begun(pool, "good again")


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raises", "ValueError: the puzzle is broken (" + str(HERE)),
        ("nothing", "not an Observation"),
        ("nan", "finite number"),
        ("speaks", "those of the assistant are the policy's"),
    ],
)
def test_an_environment_that_does_what_none_should_fails_with_the_reason(make, how: str, said: str) -> None:
    pool = make("Wrong", how=how)
    begun(pool, "e")
    pool.step("e", turn())
    found = events(pool, 1)["e"]
    assert found.what == "failed" and said in found.cause


def test_a_class_that_cannot_be_made_is_reported_at_the_start(make) -> None:
    pool = make("Echo", no_such_option=3)
    with pytest.raises(ClusterError, match=r"no_such_option.*its options are turns, reward, opening"):
        events(pool, 1)


@pytest.mark.parametrize("deaths", [1, 2])
def test_a_process_that_dies_at_its_start_is_started_once_more_and_its_last_words_are_told(
    make, tmp_path: Path, deaths: int
) -> None:
    (tmp_path / "mortal.py").write_text(
        "import os, pathlib\n"
        "from grpo_rl.envs.contract import Observation\n"
        "log = pathlib.Path(__file__).with_name('starts')\n"
        "log.open('a').write('x')\n"
        f"if log.stat().st_size <= {deaths}:\n"
        "    print('no room left')\n"
        "    os._exit(9)\n"
        "class Mortal:\n"
        "    async def reset(self, start): return Observation(())\n"
        "    async def close(self): pass\n"
    )
    pool = make(f"{tmp_path / 'mortal.py'}:Mortal")
    if deaths == 1:
        begun(pool, "e")
    else:
        with pytest.raises(ClusterError, match=r"cannot start: .* exited with code 9; its last output: no room left"):
            events(pool, 1)


ADD = Named(f"{HERE}:Adding", {"slow_above": 100})


@pytest.mark.parametrize(
    ("returns", "said"),
    [("3", "3"), ("raises", "Error: ValueError: no database"), ("number", "Error: TypeError: tool 'add' r")],
)
def test_tools_and_environments_may_be_plain_methods_and_a_tool_that_only_fails_is_counted(make, returns, said) -> None:
    pool = make("Plain", tools=(Named(f"{HERE}:Plain", {"returns": returns}),))
    pool.begin("e", start("e"))
    assert events(pool, 1)["e"].answer["messages"][0]["content"] == "go"
    pool.step("e", turn('<tool_call>{"name": "add", "arguments": {}}</tool_call>'))
    answer = events(pool, 1)["e"].answer
    assert answer["messages"][0]["content"].startswith(said)
    errors = 0 if returns == "3" else 1
    assert (answer["counts"]["tool_calls/add"], answer["counts"].get("tool_errors/add", 0)) == (1, errors)
    pool.step("e", turn("done"))
    assert events(pool, 1)["e"].answer["reward"] == 1.0


def test_tools_answer_calls_and_what_is_wrong_with_one_goes_back_to_the_policy(make) -> None:
    pool = make(None, tools=(ADD,), tool_timeout_s=2.0)
    begun(pool, "e")

    def called(*calls: str) -> dict[str, Any]:
        pool.step("e", turn("".join(f"<tool_call>{call}</tool_call>" for call in calls)))
        event = events(pool, 1)["e"]
        assert event.answer is not None, event
        return dict(event.answer)

    good = called('{"name": "add", "arguments": {"a": 1, "b": 2}}', '{"name": "add", "arguments": {"a": 5, "b": 2}}')
    assert [message["content"] for message in good["messages"]] == ["3 (1)", "7 (2)"]
    assert (good["reward"], good["counts"]["tool_calls"], good["counts"]["failed_calls"]) == (1.0, 2, 0)
    bad = called(
        '{"name": "add", "arguments": {"a": 1}}', '{"name": "mul"}', '{"name": "add", "arguments": {"a": 1, "b": 0}}', "oops"
    )
    texts = [message["content"] for message in bad["messages"]]
    assert [message["role"] for message in bad["messages"]] == ["tool"] * 4
    assert (
        texts[0] == "Error: add: 'b' is a required property"
        and "no tool 'mul'" in texts[1]
        and "nothing to add" in texts[2]
        and "the tool call is no" in texts[3]
    )
    assert bad["counts"] | {"tool_calls": 3, "failed_calls": 3, "malformed_calls": 1, "tool_errors": 1} == bad["counts"]
    slow = called('{"name": "add", "arguments": {"a": 1000, "b": 1}}')
    assert slow["messages"][0]["content"] == "Error: add took longer than 2 s" and slow["counts"]["tool_timeouts"] == 1
    done = called()
    assert done["done"] and not done["messages"]
