"""Puts the red inputs of other tests to a function host on another node, and prints as JSON what became of each.

`python red_inputs.py HEAD NODE FOLDER OUTSIDE`: the cluster's address, the address of a machine that is not the controller's, a
shared folder, and what an escape could reach there, as JSON. PYTHONPATH has the folders of the tests.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
from hostile_responses import hostile_responses
from test_environment_processes import HERE as PLAYED
from test_environment_processes import events, start, turn
from test_hostile_rules import GOLD
from test_judge import OWN_PARSER
from test_runner import FAILURES, UNRULY
from test_sandbox_escapes import CHEATS, ESCAPES, SECRET, escape, response

from grpo_rl.cluster.session.ray_session import ray_session
from grpo_rl.config.schema.model import EnvironmentConfig
from grpo_rl.config.schema.reward import JudgeConfig
from grpo_rl.config.schema.tree import RayInitConfig, RewardConfig, TrainerConfig
from grpo_rl.envs.environments import Named
from grpo_rl.envs.runtime.episode_host import HostSetup
from grpo_rl.rewards.compose import RewardFunction
from grpo_rl.rewards.models.judge_question import JudgeSpec
from grpo_rl.rewards.runtime.runner import JudgeRunner, RewardRunner
from grpo_rl.types import Prompt, Rollout

START_S, STEP_S = 120.0, 3.0
ONE = np.ones(1, np.int32)
DECLARED_DEAD_S = 120.0
HTTP = {
    "refuses": (401, b"no"),
    "breaks off": (200, b"{broken"),
    "answers at great length": (200, b"x" * 5_000_000),
    "gives no score": (200, json.dumps({"choices": [{"message": {"content": "no idea"}}]}).encode()),
    "makes the parser exit": (200, json.dumps({"choices": [{"message": {"content": "exit"}}]}).encode()),
    "makes the parser hang": (200, json.dumps({"choices": [{"message": {"content": "hang"}}]}).encode()),
    "is fine": (200, json.dumps({"choices": [{"message": {"content": "score: 2"}}]}).encode()),
}
"""Answers of a hostile judge, by what it does: the prompt holds the name."""
PRINTS = """
import os
from played_environments import Echo

class Printing(Echo):
    async def step(self, turn):
        for _ in range(20):
            print("x" * 2**20)
        os.write(1, b"\\x80" * 1000)
        return await super().step(turn)
"""
PLAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "raises": ("Wrong", {"how": "raises"}),
    "answers nothing": ("Wrong", {"how": "nothing"}),
    "rewards nan": ("Wrong", {"how": "nan"}),
    "holds the interpreter": ("Holding", {"slow": "e"}),
    "blocks": ("Blocking", {"slow": "e", "slow_s": 300.0, "wait_s": 0.0}),
    "prints": ("Printing", {}),
}
"""Environments that do what none should: class and options."""


@contextmanager
def judge_at(address: str) -> Iterator[str]:
    """Serve `HTTP`; yield the address for other machines."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            code, content = HTTP[body["messages"][-1]["content"]]
            self.send_response(code)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer((address, 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://{address}:{server.server_address[1]}/v1"
        server.shutdown()


def answer(uid: str, text: str, truth: Any) -> Rollout:
    return Rollout(Prompt(uid, ONE, "", "math", truth, {}), 0, ONE, ONE, "stop", ((1, 1),), text=text)


def scores(runner: RewardRunner, rollouts: Mapping[str, Rollout]) -> dict[str, Any]:
    """Return reward, kind of failure and cause of each."""
    scored = runner.wait(list(rollouts.values()))
    return {name: [item.reward, item.failure, item.failure_cause] for name, item in zip(rollouts, scored, strict=True)}


def living_nodes(ray: Any) -> dict[str, str]:
    """Ray's ids of nodes by address. A machine that died and came again is two nodes until Ray has declared the first one dead."""
    until = time.monotonic() + DECLARED_DEAD_S
    while True:
        living = [entry for entry in ray.nodes() if entry["Alive"]]
        by_address = {entry["NodeManagerAddress"]: entry["NodeID"] for entry in living}
        if len(by_address) == len(living):
            return by_address
        assert time.monotonic() < until, living
        time.sleep(1.0)


def main(head: str, node_address: str, folder: Path, outside: dict[str, object]) -> None:
    with ray_session(RayInitConfig(address=head), 1):
        import ray

        from grpo_rl.cluster.processes.placement import NodeSlot
        from grpo_rl.cluster.processes.worker_group import WorkerGroup, wait_all
        from grpo_rl.cluster.recovery.supervisor import Recoveries, Supervisor
        from grpo_rl.cluster.roles.function_host import EnvironmentSpec, FunctionSpec, ScorerSpec
        from grpo_rl.cluster.roles.function_pool import FunctionPool

        node = living_nodes(ray)[node_address]
        settings = TrainerConfig()
        supervisor = Supervisor(settings, Recoveries(settings, print))

        @contextmanager
        def hosts(environment: Named | None = None, **scorers: ScorerSpec | JudgeSpec) -> Iterator[FunctionPool]:
            config = EnvironmentConfig(num_workers=1, step_timeout_s=STEP_S)
            environments = None if environment is None else EnvironmentSpec(HostSetup(environment), config)
            spec = FunctionSpec(scorers, environments, "sandbox" in scorers, folder)
            slots = [NodeSlot(node, 0.1)]
            group = WorkerGroup("functions", slots, log_dir=folder, environment={}, call_timeout_s=600.0)
            pool = FunctionPool(group, spec, [2], supervisor)
            refs = pool.start_build()
            group.where(START_S)
            wait_all(group.workers, refs, START_S, "start functions")
            print(json.dumps({"where": pool.listen()}), flush=True)
            yield pool
            pool.close()

        (folder / "parser.py").write_text(OWN_PARSER)
        (folder / "printing.py").write_text(PRINTS)
        common: dict[str, Any] = {"num_workers": 2, "on_failure": "value", "failure_value": 0.0}
        configs = {
            "sandbox": RewardConfig(functions=["code"], function_kwargs={"code": {"time_s": 3.0}}, timeout_s=60.0, **common),
            "unruly": RewardConfig(functions=[f"{UNRULY}:act"], timeout_s=1.5, memory_limit_gb=1, **common),
            "math": RewardConfig(functions=["math"], timeout_s=30.0, **common),
        }
        answers: dict[str, Any] = {}
        with judge_at(head.partition(":")[0]) as url:
            judge = JudgeConfig(
                model="m", base_url=url, template="{response}", parser=f"{folder}/parser.py:read", timeout_s=5.0, deadline_s=6.0,
                retries=1, backoff_s=0.01,
            )  # fmt: skip
            spec = JudgeSpec.of(RewardConfig(judge=judge))
            scorers: dict[str, Any] = {name: ScorerSpec(config, ("math",)) for name, config in configs.items()}
            with hosts(**scorers, judge=spec) as pool:
                runners = {
                    name: RewardRunner(RewardFunction.from_config(config), config, partial(pool.scorer, name))
                    for name, config in configs.items()
                }
                programs = {name: (escape(name, outside), "escaped") for name in ESCAPES}
                programs |= {name: (text, SECRET) for name, text in CHEATS.items()}
                written = {
                    name: answer(name, response(program), {"inputs": [""], "outputs": [output]})
                    for name, (program, output) in programs.items()
                }
                answers["sandbox"] = scores(runners["sandbox"], written)
                deeds = ["score 1", *(deed for deed, *_ in FAILURES), "print", "score 2"]
                answers["unruly"] = scores(runners["unruly"], {deed: answer(deed, deed, None) for deed in deeds})
                texts = {name: text for name, text in hostile_responses() if len(text) < 100_000}
                answers["math"] = scores(runners["math"], {name: answer(name, text, GOLD) for name, text in texts.items()})
                asked = JudgeRunner(judge, partial(pool.scorer, "judge"))
                marks = asked.wait([answer(name, name, None) for name in HTTP])
                answers["judge"] = {
                    name: [getattr(mark, "score", None), getattr(mark, "kind", None)]
                    for name, mark in zip(HTTP, marks, strict=True)
                }
        answers["environments"] = {}
        for name, (kind, options) in PLAYS.items():
            file = folder / "printing.py" if kind == "Printing" else PLAYED
            with hosts(Named(f"{file}:{kind}", options)) as pool:
                environments: Any = pool.environments()
                environments.begin("e", start("e"))
                events(environments, 1)
                environments.step("e", turn())
                event = events(environments, 1)["e"]
                answers["environments"][name] = [event.what, event.cause]
        supervisor.close()
        print(json.dumps(answers), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), json.loads(sys.argv[4]))
