"""Functions on every node, on a real Ray: two hosts score and play, one of them is lost, and no response and no episode is."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import ray
from machine_lacks import memory_group

from grpo_rl.cluster.processes.placement import NodeSlot
from grpo_rl.cluster.processes.worker_group import StoredBlock, WorkerGroup, wait_all
from grpo_rl.cluster.recovery.supervisor import Recoveries, Supervisor
from grpo_rl.cluster.roles.function_host import EnvironmentSpec, FunctionSpec, ScorerSpec
from grpo_rl.cluster.roles.function_pool import AHEAD, FunctionPool
from grpo_rl.cluster.session.ray_session import ray_session
from grpo_rl.config.schema.model import EnvironmentConfig
from grpo_rl.config.schema.tree import RayInitConfig, RewardConfig, TrainerConfig
from grpo_rl.envs.environments import Named
from grpo_rl.envs.runtime.episode_host import HostSetup
from grpo_rl.errors import ClusterError, RewardError
from grpo_rl.rewards.compose import RewardFunction
from grpo_rl.rewards.runtime.runner import RewardRunner
from grpo_rl.rollout.reports import pack, unpack
from grpo_rl.types import Completion, Prompt, Rollout

START_S, NEVER_S = 120.0, 600.0
pytestmark = pytest.mark.timeout(NEVER_S)
FUNCTIONS = """
import os, time
from helper import length

def score(data_source, solution_str, ground_truth, extra_info):
    time.sleep(float(extra_info.get("seconds", 0)))
    return length(solution_str) + 1000 * (os.environ.get("MY_TOKEN") == "kept from Ray")

def together(data_sources, solution_strs, ground_truths, extra_infos):
    return [len(solution_strs)] * len(solution_strs)
"""


@dataclass
class Hosts:
    pool: FunctionPool
    said: list[str]
    runner: RewardRunner
    described: str


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    with ray_session(RayInitConfig(allow_insecure=True), 2):
        yield ray.nodes()[0]["NodeID"]


@pytest.fixture
def start(cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Hosts]]:
    made: list[tuple[Supervisor, FunctionPool]] = []
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    (tmp_path / "helper.py").write_text("length = len\n")
    monkeypatch.syspath_prepend(tmp_path)

    def build(*, text: str | None = None, **trainer: object) -> Hosts:
        if text is not None:
            (tmp_path / "mine.py").write_text(text)
        names = [f"{tmp_path}/mine.py:{name}" for name in ("score", "together")]
        config = RewardConfig(functions=names, batched=names[1:], num_workers=1)
        environments = EnvironmentSpec(HostSetup(Named("arithmetic")), EnvironmentConfig(num_workers=1))
        variables = os.environ | {"MY_TOKEN": "kept from Ray"}
        scorers = {"reward": ScorerSpec(config, ("test",))}
        spec = FunctionSpec(scorers, environments, False, tmp_path, variables=variables)
        said: list[str] = []
        settings = TrainerConfig(heartbeat_s=1.0, **trainer)  # type: ignore[arg-type]
        supervisor = Supervisor(settings, Recoveries(settings, said.append))
        worker_group = WorkerGroup(
            "functions", [NodeSlot(cluster, 0.5)] * 2, log_dir=tmp_path, environment={}, call_timeout_s=NEVER_S
        )
        pool = FunctionPool(worker_group, spec, [2, 2], supervisor)
        made.append((supervisor, pool))
        refs = pool.start_build()
        worker_group.where(START_S)
        wait_all(worker_group.workers, refs, START_S, "start functions")
        for worker in worker_group.workers:
            supervisor.watch(worker)
        described = pool.listen()
        function = RewardFunction.from_config(config) if text is None else RewardFunction.from_config(RewardConfig())
        return Hosts(pool, said, RewardRunner(function, config, partial(pool.scorer, "reward")), described)

    yield build
    for supervisor, pool in made:
        supervisor.close()
        pool.close()


def rollouts(number: int, seconds: float = 0.0) -> list[Rollout]:
    """Responses whose texts lie in the object store, as an engine leaves them."""
    completions = [Completion(str(k), [1], [0.0], "stop", ((1, 1),), text="ä" * k) for k in range(number)]
    reports, block = pack(completions)
    made = []
    for k, completion in enumerate(unpack(reports, StoredBlock(ray.put(block)))):
        prompt = Prompt(f"p{k}", (1,), "", "test", None, {"seconds": seconds})
        made.append(Rollout(prompt, 0, [1], [0.0], "stop", ((1, 1),), text=completion.text))
    return made


def test_texts_are_read_on_the_hosts_and_lists_are_scored_by_one(start: Callable[..., Hosts]) -> None:
    hosts = start()
    assert hosts.described.endswith(": 1 reward process, 1 environment process")
    scored = hosts.runner.wait(rollouts(200))
    assert [one.reward for one in scored] == [k + 1000 + 200 for k in range(200)]


def test_a_node_that_joins_later_scores_as_well(
    start: Callable[..., Hosts], cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = start()
    given = rollouts(120, seconds=0.05)
    for rollout in given:
        hosts.runner.submit(rollout)
    threading.Thread(target=hosts.pool.join, args=(NodeSlot(cluster, 0.5), 2), daemon=True).start()
    client = hosts.pool._clients["reward"]
    until = time.monotonic() + START_S
    while len(client._sizes) < 3 and time.monotonic() < until:  # type: ignore[attr-defined]
        time.sleep(0.1)
    asked = []
    put = client._put  # type: ignore[attr-defined]
    monkeypatch.setattr(client, "_put", lambda worker, batch: (asked.append(worker.name), put(worker, batch)))
    assert [one.reward for one in hosts.runner.wait(given)] == [k + 1000 + 120 for k in range(120)]
    assert [one.reward for one in hosts.runner.wait(rollouts(60))] == [k + 1000 + 60 for k in range(60)]
    assert set(asked) == {"functions0", "functions1", "functions2"}


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_host_that_is_lost_costs_no_response_and_is_started_again(start: Callable[..., Hosts], how: signal.Signals) -> None:
    hosts = start()
    given = rollouts(120, seconds=0.05)
    for rollout in given:
        hosts.runner.submit(rollout)
    first, client = hosts.pool.worker_group.workers[0], hosts.pool._clients["reward"]
    assert first.pid is not None
    while not client._sent[first]:  # type: ignore[attr-defined]
        time.sleep(0.01)
    os.kill(first.pid, how)
    assert [one.reward for one in hosts.runner.wait(given)] == [k + 1000 + 120 for k in range(120)]
    until = time.monotonic() + START_S
    while not any("functions0 is back" in line for line in hosts.said) and time.monotonic() < until:
        time.sleep(0.1)
    assert len(hosts.pool.worker_group) == 2
    cause = "the process died" if how is signal.SIGKILL else "the process froze: no heartbeat"
    assert f"functions0 failed: functions.take failed on functions0: {cause}" in hosts.said[0], hosts.said
    assert hosts.runner.wait(rollouts(3))[2].reward == 2 + 1000 + 3


def test_a_lost_host_ends_the_run_with_its_cause_if_nothing_is_started_again(start: Callable[..., Hosts]) -> None:
    hosts = start(recover="off")
    for worker in hosts.pool.worker_group.workers:
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(ClusterError, match=r"functions\.take failed on functions\d: the process died"):
        hosts.runner.wait(rollouts(3))


def test_a_host_that_the_kernel_ends_for_want_of_memory_has_that_as_its_cause(start: Callable[..., Hosts]) -> None:
    hosts = start(recover="off")
    with memory_group(64 * 2**20) as put:
        for worker in hosts.pool.worker_group.workers:
            put(worker.pid)
        prompt = Prompt("p", (1,), "", "test", None, {})
        large = [Rollout(prompt, k, [1], [0.0], "stop", ((1, 1),), text="x" * 50 * 2**20) for k in range(8)]
        with pytest.raises(
            ClusterError, match=r"functions\.take failed on functions\d: the kernel ended the process, as memory"
        ):
            hosts.runner.wait(large)


def test_a_host_gets_no_more_than_it_has_room_for(start: Callable[..., Hosts], monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = start()
    client = hosts.pool._clients["reward"]
    most = []
    put = client._put  # type: ignore[attr-defined]

    def counted(worker: object, batch: list[object]) -> None:
        most.append(len(client._sent[worker]))  # type: ignore[attr-defined]
        put(worker, batch)

    monkeypatch.setattr(client, "_put", counted)
    scored = rollouts(2000)
    with client._lock:  # type: ignore[attr-defined]  # nothing is sent before all are there
        for rollout in scored:
            hosts.runner.submit(rollout)
    hosts.runner.wait(scored)
    assert max(most) == AHEAD and len(most) < 60, most


def test_functions_that_cannot_start_are_named_with_their_node(start: Callable[..., Hosts]) -> None:
    with pytest.raises(RewardError, match=rf"node {os.uname().nodename}: .*no such thing"):
        start(text="raise ValueError('no such thing')")


def test_the_episodes_of_a_lost_host_are_lost_and_go_on_elsewhere(start: Callable[..., Hosts]) -> None:
    hosts = start()
    environments = hosts.pool.environments()
    names = [f"e{k}" for k in range(6)]
    begin = {"uid": "1", "data_source": "", "messages": [], "ground_truth": 7, "extra_info": {}, "seed": 3}
    for name in names:
        environments.begin(name, begin)
    events = {}
    while len(events) < 6:
        events |= {event.episode: event for event in environments.events(1.0)}
    assert {event.what for event in events.values()} == {"answered"}, events
    first = hosts.pool.worker_group.workers[0]
    assert first.pid is not None
    os.kill(first.pid, signal.SIGKILL)
    lost = environments.events(30.0)
    assert len(lost) == 3 and {event.what for event in lost} == {"lost"}
    for event in lost:
        environments.begin(f"{event.episode}#1", begin)
    again = environments.events(30.0)
    while len(again) < 3:
        again += environments.events(30.0)
    assert {event.what for event in again} == {"answered"} and environments.num_waiting == 0
