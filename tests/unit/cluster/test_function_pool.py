"""The two ends of functions on nodes without Ray between them: real hosts with real processes, asked as the controller asks."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_rl.cluster.roles.function_host import BROKEN, LOST, FunctionHost, FunctionSpec, ScorerSpec
from grpo_rl.cluster.roles.function_pool import AHEAD, ScorerClient
from grpo_rl.config.derived import processes_on
from grpo_rl.config.schema.tree import RewardConfig
from grpo_rl.rewards.compose import RewardFunction
from grpo_rl.rewards.runtime.runner import RewardRunner
from grpo_rl.types import Prompt, Rollout

OWN = """
import time
def score(data_source, solution_str, ground_truth, extra_info):
    time.sleep(extra_info["seconds"])
    return float(solution_str)
"""


class Node:
    """A host, and the thread that hands on what it says."""

    def __init__(self, spec: FunctionSpec, number: int) -> None:
        self.host = FunctionHost(spec, 2, number, 2)
        self.calls: list[int] = []
        self.is_gone = False
        self.client: Any = None
        threading.Thread(target=self._hand_on, daemon=True).start()

    def _hand_on(self) -> None:
        while not self.is_gone:
            for service, said in self.host.take(0.2):
                assert service not in (BROKEN, LOST), said
                if not self.is_gone:
                    self.client.heard(self, said)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Node]]:
    (tmp_path / "own.py").write_text(OWN)
    spec = FunctionSpec({"reward": ScorerSpec(config(tmp_path), ())}, None, False, tmp_path)
    made = [Node(spec, number) for number in range(2)]
    yield made
    for node in made:
        node.is_gone = True
        node.host.close()


def config(folder: Path) -> RewardConfig:
    return RewardConfig(functions=[f"{folder}/own.py:score"], num_workers=1)


def runner_of(folder: Path, nodes: list[Node]) -> RewardRunner:
    def put(node: Any, batch: list[Any]) -> None:
        node.calls.append(len(batch))
        node.host.put("reward", batch)

    def start(done: Any, broken: Any) -> ScorerClient:
        client = ScorerClient(put, done, broken)
        for node in nodes:
            node.client = client
            client.joined(node, 1)  # type: ignore[arg-type]
        return client

    return RewardRunner(RewardFunction.from_config(config(folder)), config(folder), start)


def rollouts(number: int, seconds: float) -> list[Rollout]:
    prompts = [Prompt(f"p{k}", (1,), "", "test", None, {"seconds": seconds}) for k in range(number)]
    return [Rollout(prompt, 0, [1], [0.0], "stop", ((1, 1),), text=str(k)) for k, prompt in enumerate(prompts)]


def test_many_responses_go_in_few_calls_and_no_host_has_more_than_its_room(tmp_path: Path, nodes: list[Node]) -> None:
    runner = runner_of(tmp_path, nodes)
    assert [one.reward for one in runner.wait(rollouts(400, 0.0))] == list(range(400))
    calls = nodes[0].calls + nodes[1].calls
    assert sum(calls) == 400 and max(calls) <= AHEAD and len(calls) < 40, calls
    assert all(nodes[number].calls for number in (0, 1))
    runner.close()


def test_what_a_lost_host_had_is_done_by_another_and_done_once(tmp_path: Path, nodes: list[Node]) -> None:
    runner = runner_of(tmp_path, nodes)
    counted: Counter[str] = Counter()
    given = rollouts(60, 0.02)
    for rollout in given:
        runner.submit(rollout)
    while sum(nodes[0].calls) < 10:
        pass
    nodes[0].is_gone = True
    nodes[0].client.lost(nodes[0], "gone")
    scored = runner.wait(given)
    counted.update(one.prompt.uid for one in scored)
    assert [one.reward for one in scored] == list(range(60)) and set(counted.values()) == {1}
    runner.close()


def test_the_number_of_processes_follows_the_cores_of_a_node() -> None:
    assert [processes_on(cores, None) for cores in (0, 1, 2, 4, 16, 200)] == [1, 1, 1, 2, 8, 32]
    assert processes_on(2, 7) == 7
