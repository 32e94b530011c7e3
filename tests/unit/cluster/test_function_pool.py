"""The two ends of functions on nodes without Ray between them: real hosts with real processes, asked as the controller asks."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from compositions import compose
from machine_lacks import needs_sandbox, take_namespaces_away

from grpo_rl.cluster.roles.function_host import BROKEN, LOST, FunctionHost, FunctionSpec, ScorerSpec
from grpo_rl.cluster.roles.function_pool import AHEAD, JudgeClient, ScorerClient
from grpo_rl.config.derived import Machine, processes_on
from grpo_rl.config.schema.tree import JudgeConfig, RewardConfig
from grpo_rl.errors import RewardError
from grpo_rl.plan.make import make_plan
from grpo_rl.rewards.compose import JUDGE, RewardFunction
from grpo_rl.rewards.models.judge_question import JudgeSpec
from grpo_rl.rewards.runtime.runner import JudgeRunner, RewardRunner
from grpo_rl.types import Prompt, Rollout

OWN = """
import time
def score(data_source, solution_str, ground_truth, extra_info):
    time.sleep(extra_info["seconds"])
    return float(solution_str)
"""


class Node:
    """A host, and the thread that hands on what it says."""

    def __init__(self, spec: FunctionSpec, number: int, service: str = "reward") -> None:
        self.host = FunctionHost(spec, 2, number, 2)
        self.service = service
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


def client_of(nodes: list[Node], kind: Callable[..., ScorerClient] = ScorerClient) -> Callable[..., ScorerClient]:
    def put(node: Any, batch: list[Any]) -> None:
        node.calls.append(len(batch))
        node.host.put(node.service, batch)

    def start(done: Any, broken: Any) -> ScorerClient:
        client = kind(put, done, broken)
        for node in nodes:
            node.client = client
        for node in nodes:
            client.joined(node, 1)  # type: ignore[arg-type]
        return client

    return start


def runner_of(folder: Path, nodes: list[Node]) -> RewardRunner:
    return RewardRunner(RewardFunction.from_config(config(folder)), config(folder), client_of(nodes))


def rollouts(number: int, seconds: float) -> list[Rollout]:
    prompts = [Prompt(f"p{k}", (1,), "", "test", None, {"seconds": seconds}) for k in range(number)]
    return [Rollout(prompt, 0, [1], [0.0], "stop", ((1, 1),), text=str(k)) for k, prompt in enumerate(prompts)]


def test_many_responses_go_in_few_calls_and_no_host_has_more_than_its_room(tmp_path: Path, nodes: list[Node]) -> None:
    runner, scored = runner_of(tmp_path, nodes), rollouts(2000, 0.0)
    with nodes[0].client._lock:  # nothing is sent before all are there
        for rollout in scored:
            runner.submit(rollout)
    assert [rollout.reward for rollout in runner.wait(scored)] == list(range(2000))
    calls = nodes[0].calls + nodes[1].calls
    assert sum(calls) == 2000 and max(calls) <= AHEAD and len(calls) < 40, calls
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


class Endpoint(ThreadingHTTPServer):
    """A judge that takes a moment, and answers nobody before so many have asked it at once."""

    daemon_threads = True

    def __init__(self, awaited: int) -> None:
        self.lock, self.awaited, self.at_once, self.most_at_once = threading.Condition(), awaited, 0, 0
        super().__init__(("127.0.0.1", 0), Asked)
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()


class Asked(BaseHTTPRequestHandler):
    server: Endpoint

    def do_GET(self) -> None:
        self.answer(b"{}")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.at_once += 1
            self.server.most_at_once = max(self.server.most_at_once, self.server.at_once)
            self.server.lock.notify_all()
            self.server.lock.wait_for(lambda: self.server.most_at_once >= self.server.awaited, 60.0)
        time.sleep(0.05)
        with self.server.lock:
            self.server.at_once -= 1
        self.answer(json.dumps({"choices": [{"message": {"content": body["messages"][-1]["content"]}}]}).encode())

    def answer(self, body: bytes) -> None:
        self.send_response(200 if self.headers.get("Authorization") == "Bearer key of the command" else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(OSError):  # whoever asked is gone
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize("most", [1, 5])
def test_all_nodes_together_ask_a_judge_as_much_as_is_allowed_also_once_one_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setenv("MY_JUDGE", "key of the command")
    endpoint = Endpoint(awaited=most)
    url = f"http://127.0.0.1:{endpoint.server_address[1]}/v1"
    judge = JudgeConfig(
        base_url=url, model="m", template="score: {response}", max_concurrency=most, api_key_env="MY_JUDGE", retries=0
    )
    spec = JudgeSpec.of(RewardConfig(judge=judge))
    functions = FunctionSpec({JUDGE: spec}, None, False, tmp_path, variables={"MY_JUDGE": "key of the command"})
    monkeypatch.setenv("MY_JUDGE", "of the node")
    hosts = [Node(functions, number, JUDGE) for number in range(2)]
    runner = JudgeRunner(judge, client_of(hosts, partial(JudgeClient, judge)))
    given = rollouts(40, 0.0)
    for rollout in given:
        runner.submit(rollout)
    while endpoint.most_at_once < most:
        time.sleep(0.01)
    hosts[0].is_gone = True
    hosts[0].host.close()
    time.sleep(0.5)  # the endpoint is done with what this host had asked
    hosts[0].client.lost(hosts[0], "gone")
    assert [outcome.score for outcome in runner.wait(given)] == list(range(40))  # type: ignore[union-attr]
    assert endpoint.most_at_once == most
    runner.close()
    hosts[1].is_gone = True
    hosts[1].host.close()
    endpoint.shutdown()
    endpoint.server_close()


def test_the_number_of_processes_follows_the_cores_of_a_node() -> None:
    assert [processes_on(cores, None) for cores in (0, 1, 2, 4, 16, 200)] == [1, 1, 1, 2, 8, 32]
    assert processes_on(2, 7) == 7


def code_spec(folder: Path) -> FunctionSpec:
    return FunctionSpec({"reward": ScorerSpec(RewardConfig(functions=["code"], timeout_s=60.0), ("code",))}, None, True, folder)


@needs_sandbox
def test_a_host_says_what_it_runs_and_which_walls_it_has(tmp_path: Path) -> None:
    host = FunctionHost(code_spec(tmp_path), 8, 0, 1)
    node, sizes, walls = host.describe()
    host.close()
    assert (node, sizes) == (socket.gethostname(), {"reward": 4})
    assert walls == "programs in a sandbox of user namespaces and a filter of system calls"
    assert [file.name for file in sorted(tmp_path.glob("*.log"))] == [f"reward-{place}.log" for place in range(4)]


def test_a_node_without_a_sandbox_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take_namespaces_away(monkeypatch)
    with pytest.raises(RewardError, match=f"node {socket.gethostname()}: no sandbox for code on this machine"):
        FunctionHost(code_spec(tmp_path), 8, 0, 1)


def test_variables_of_the_command_reach_functions_and_secrets_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THE_NODE", "node")
    monkeypatch.setenv("HF_TOKEN", "of-the-node")
    (tmp_path / "own.py").write_text(
        "import os\ndef score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return float([os.environ[n] for n in ('OF_THE_NODE', 'HF_TOKEN', 'MORE')] == ['node', 'of-the-command', 'more'])\n"
    )
    variables = {"OF_THE_NODE": "command", "HF_TOKEN": "of-the-command", "MORE": "more", "RAY_ADDRESS": "elsewhere"}
    spec = FunctionSpec({"reward": ScorerSpec(config(tmp_path), ())}, None, False, tmp_path, variables=variables)
    assert "of-the-command" not in repr(spec)
    monkeypatch.delenv("MORE", raising=False)
    node = Node(spec, 0)
    runner = runner_of(tmp_path, [node])
    assert runner.wait(rollouts(1, 0.0))[0].reward == 1.0
    runner.close()
    node.is_gone = True
    node.host.close()
    monkeypatch.delenv("MORE")


@pytest.mark.parametrize(
    ("words", "cluster", "line"),
    [
        ([], False, "reward auto, 1 process, at most 10 s each"),
        (["reward.num_workers=3"], False, "reward auto, 3 processes, at most"),
        (["trainer.nnodes=3"], True, "reward auto, 1 process on each of 3 nodes (by the cores of each), at most"),
        (["trainer.nnodes=3", "reward.num_workers=4"], True, "reward auto, 4 processes on each of 3 nodes, at most"),
    ],
)
def test_the_plan_says_how_many_processes_of_functions_run_where(words: list[str], cluster: bool, line: str) -> None:
    machine = Machine(num_gpus=0, num_cpus=2, device="cpu", cluster=cluster)
    plan = make_plan(compose(["recipe=arithmetic/grpo", "trainer.n_gpus_per_node=1", "trainer.device=cpu", *words]), machine)
    assert line in " ".join(plan.render().split())
