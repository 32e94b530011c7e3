"""Three machines: rewards run on all of them with what the command has, behave as badly there as here, and outlive a machine.

Run by name: `pytest -m campaign -s tests/campaign/test_functions_on_nodes.py`.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from separate_machines import Machines, lacking, lacks_shares
from test_two_machines import POLICY, PYTHON, ROOT, Cluster, ended, engines, instead

sys.path.insert(0, str(ROOT / "tests/unit/rewards"))
from test_runner import FAILURES

from grpo_rl.models import builtin
from grpo_rl.telemetry.metrics.metrics_file import read_metrics

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(1800)]
TOKEN = "hf_of_the_command_alone_0123456789"
STEPS = 6
OWN = """
import os, socket, time
from beside import half

def score(data_source, solution_str, ground_truth, extra_info):
    print("scored on", socket.gethostname(), len(os.environ["HF_TOKEN"]), flush=True)
    time.sleep(0.005)
    return len(set(solution_str)) * half

def waits(data_source, solution_str, ground_truth, extra_info):
    time.sleep(0.05)
    return 1.0

def computes(data_source, solution_str, ground_truth, extra_info):
    until = time.process_time() + 0.005
    while time.process_time() < until:
        pass
    return 1.0

def hostile(data_source, solution_str, ground_truth, extra_info):
    if socket.gethostname() == "node-2":
        print("x" * 10_000_000, flush=True)
        os._exit(3)
    while socket.gethostname() == "node-3":
        pass
    return len(set(solution_str)) * half
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if (reason := lacking()) is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("shared")
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    quiet |= {name: os.environ[name] for name in ("GRPO_RL_CACHE", "OMP_NUM_THREADS") if name in os.environ}
    machines = Machines(folder, [ROOT, Path(sys.prefix).resolve()], quiet | {"RAY_worker_niceness": "0", "GOMP_SPINCOUNT": "0"})
    try:
        made = Cluster(machines, folder / "runs")
        machines.add(1)
        token = machines.run(1, *made.readme(".venv/bin/ray get-auth-token")).strip().splitlines()[-1]
        exported = (word.split("=") for word in made.readme("export")[1:])
        machines.environment |= {name: token if value == "TOKEN" else value for name, value in exported}
        machines.run(1, *made.readme(".venv/bin/ray start --head"))
        made.add(2)
        made.add(3)
        (folder / "own.py").write_text(OWN)
        (folder / "beside.py").write_text("half = 0.5\n")
        yield made
    finally:
        machines.close()


@pytest.fixture(scope="module")
def words(cluster: Cluster) -> list[str]:
    """A rank on one machine and an engine on each other, one of which is enough."""
    model = builtin.build("builtin:arithmetic", cluster.runs.parent / "model")
    elastic = [f"{POLICY}.rollout.min_replicas=1", f"{POLICY}.rollout.max_replicas=2"]
    own = [f"{POLICY}.model.path={model}", f"reward.functions=[{cluster.runs.parent}/own.py:score]"]
    return [*instead(f"trainer.total_training_steps={STEPS}", "trainer.save_freq=-1"), *engines(2), *elastic, *own]


OUTSIDE = """
import json, os, platform, socket, sys
from test_sandbox_escapes import NUMBERS
canary, server, local = sys.argv[1], socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX)
local.bind("\\0canary")
local.listen()
import grpo_rl.rewards.sandbox.code_rule as rule
there = {"canary": canary, "package": rule.__file__, "port": server.getsockname()[1], "abstract": "canary"}
there |= {"python": os.path.realpath(sys.executable), "host": socket.gethostname(), **NUMBERS[platform.machine()]}
print(json.dumps(there), flush=True)
while True:
    server.accept()
"""
"""Opens on a machine what an escape could reach there."""


def logs(cluster: Cluster, name: str) -> str:
    return "".join(file.read_text(errors="replace") for file in (cluster.runs / name / "logs").glob("reward-*.log"))


ROLES = """
for pid in $(pgrep -f ray::WorkerHost); do readlink /proc/$pid/fd/1 | grep -o '[a-z_]*[0-9]*[.]log' | sed 's/[.]log//'; done
pgrep -fa "grpo_rl[.](envs|rewards)[.]" | grep -o "grpo_rl[.][a-z_.]*"
pgrep -fa "grpo_rl[.]main" | grep -o "grpo_rl[.]main"
"""
"""Prints the roles of the processes of a run on a machine: a worker's log is named after it."""


def roles_on(cluster: Cluster, number: int) -> list[str]:
    return sorted(cluster.machines.run(number, "bash", "-c", ROLES, code=None).split())


def test_rewards_run_on_all_machines_and_one_that_dies_costs_no_response(cluster: Cluster, words: list[str]) -> None:
    cluster.machines.environment["HF_TOKEN"] = TOKEN
    process = cluster.start("calm", words, 2)
    held = [cluster.machines.run(number, "grep", "-rl", TOKEN, "/tmp/ray", code=None) for number in (1, 2, 3)]
    code, said = ended(process)
    assert code == 0, said
    assert re.search(r"functions on (node-\d, ){2}node-\d: 1 reward process", said), said
    assert TOKEN not in said and held == ["", "", ""], held
    scored = re.findall(r"scored on (node-\d) (\d+)", logs(cluster, "calm"))
    shares = {node: scored.count((node, str(len(TOKEN)))) for node in ("node-1", "node-2", "node-3")}
    print(f"MEASURED responses scored by node: {shares}")
    assert sum(shares.values()) == len(scored) and min(shares.values()) > len(scored) / 6, shares

    # Started on the head of Ray, so that another machine can die; the run cannot go on without that of its actor.
    process = cluster.start("killed", words, 2)
    killed = next(number for number in (3, 2) if "actor0" not in roles_on(cluster, number))
    cluster.machines.kill(killed)
    code, said = ended(process)
    assert code == 0, said
    assert re.search(r"functions\d is gone with its node; its work goes to the other nodes", said), said
    rewards = [
        [row["reward/mean"] for row in read_metrics(cluster.runs / name / "metrics.jsonl")] for name in ("calm", "killed")
    ]
    print(f"MEASURED rewards without and with the machine's end: {rewards}")
    assert rewards[0] == rewards[1] and len(rewards[0]) == STEPS
    assert cluster.policy("calm") == cluster.policy("killed")
    cluster.add(killed)


@pytest.mark.parametrize(("function", "cores"), [("waits", None), ("computes", 0.55)])
def test_three_machines_score_beside_each_other(cluster: Cluster, function: str, cores: float | None) -> None:
    if cores is not None and (reason := lacks_shares()) is not None:
        pytest.skip(reason)
    folder = cluster.runs.parent / function
    folder.mkdir()
    path = os.pathsep.join(
        str(ROOT / name) for name in ("", "tests", "tests/integration", "tests/unit/rewards", "tests/unit/envs")
    )
    words = [f"{cluster.head}:6379", str(folder), f"{cluster.runs.parent}/own.py:{function}"]
    for number in sorted(cluster.machines.running):
        cluster.machines.share(number, cores)
    output = cluster.machines.run(1, PYTHON, "tests/campaign/scored_per_second.py", *words, timeout_s=600.0, PYTHONPATH=path)
    for number in sorted(cluster.machines.running):
        cluster.machines.share(number, None)
    rates = json.loads(output.splitlines()[-1])
    print(f"MEASURED responses a second by number of machines, {function}: {rates}, {rates['3'] / rates['1']:.2f} times")
    assert rates.keys() == {"1", "3"}


def test_a_function_that_exits_or_hangs_on_another_machine_costs_its_own_response(cluster: Cluster, words: list[str]) -> None:
    own = f"reward.functions=[{cluster.runs.parent}/own.py:hostile]"
    bad = [own, "reward.timeout_s=0.5", "reward.on_failure=value", "reward.failure_value=0", "trainer.total_training_steps=1"]
    kept = [word for word in words if not word.startswith(("reward.functions", "trainer.total_training_steps"))]
    cluster.train("hostile", [*kept, *bad])
    [row] = read_metrics(cluster.runs / "hostile" / "metrics.jsonl")
    print(f"MEASURED hostile: {row['reward/timeouts']:g} timeouts, {row['reward/errors']:g} errors of 32 responses")
    assert row["reward/timeouts"] > 0 and row["reward/errors"] > 0
    assert len(logs(cluster, "hostile")) < 10_000_000, "a log has 4 MiB"


def test_a_file_that_is_on_one_machine_alone_is_named_with_the_machine(cluster: Cluster, words: list[str]) -> None:
    for name in ("own.py", "beside.py"):
        cluster.machines.run(1, "cp", str(cluster.runs.parent / name), f"/tmp/{name}")
    kept = [word for word in words if not word.startswith("reward.functions")]
    said = cluster.train("absent", [*kept, "reward.functions=[/tmp/own.py:score]"], code=6)
    assert re.search(
        r"error: .*the machine 10\.78\.0\.\d \(node-[23]\) has other code .*/tmp/(own|beside)\.py is not there", said
    ), said
    cluster.machines.run(2, "cp", str(cluster.runs.parent / "own.py"), "/tmp/own.py")
    cluster.machines.run(3, "cp", str(cluster.runs.parent / "own.py"), "/tmp/own.py")
    said = cluster.train("absent", [*kept, "reward.functions=[/tmp/own.py:score]"], code=6)
    assert re.search(r"error: .*\(node-[23]\) has other code .*/tmp/beside\.py is not there", said), said


def test_red_inputs_earn_nothing_and_cost_their_own_response_on_another_machine(cluster: Cluster) -> None:
    folder = cluster.runs.parent / "red"
    folder.mkdir()
    (canary := folder / "canary").write_text("alive")
    canary.chmod(0o666)
    folders = ("", "tests", "tests/integration", "tests/unit/rewards", "tests/unit/envs")
    path = os.pathsep.join(str(ROOT / name) for name in folders)
    reached = cluster.machines.start(2, PYTHON, "-c", OUTSIDE, str(canary), PYTHONPATH=path)
    assert reached.stdout is not None
    outside = reached.stdout.readline()
    words = [f"{cluster.head}:6379", cluster.machines.address(2), str(folder), outside]
    program = [PYTHON, "tests/campaign/red_inputs.py", *words]
    output = cluster.machines.run(1, *program, timeout_s=900.0, CANARY_TOKEN="secret", PYTHONPATH=path)
    cluster.machines.run(2, "pkill", "-9", "-f", "code_rule")
    assert (
        "on node-2: 2 sandbox processes, 2 unruly processes, 2 math processes, 1 judge process; programs in a sandbox" in output
    )
    answers = json.loads(next(line for line in output.splitlines() if line.startswith('{"sandbox"')))
    print("MEASURED red inputs on another machine:", {kind: len(results) for kind, results in answers.items()})
    assert {name: score for name, (score, *_) in answers["sandbox"].items() if score} == {}
    assert canary.read_text() == "alive"
    kinds = {deed: kind for deed, (_, kind, _) in answers["unruly"].items()}
    assert kinds == {"score 1": None, "print": None, "score 2": None} | {deed: kind for deed, kind, _ in FAILURES}
    assert {name: cause for name, (_, kind, cause) in answers["math"].items() if kind} == {}
    assert {name: score for name, (score, *_) in answers["math"].items() if score} == {}
    assert answers["judge"] == {
        "refuses": [None, "judge_error"],
        "breaks off": [None, "judge_error"],
        "answers at great length": [None, "judge_error"],
        "gives no score": [2.0, None],
        "makes the parser exit": [None, "judge_error"],
        "makes the parser hang": [None, "judge_timeout"],
        "is fine": [2.0, None],
    }
    played = {name: what for name, (what, _) in answers["environments"].items()}
    assert played == {
        "raises": "failed",
        "answers nothing": "failed",
        "rewards nan": "failed",
        "holds the interpreter": "timeout",
        "blocks": "timeout",
        "prints": "answered",
    }
    for log in folder.glob("*.log"):
        assert log.stat().st_size < 5 * 2**20, "a log has 4 MiB"
    remaining = cluster.machines.run(2, "pgrep", "-a", "-f", "rewards.runtime.process|envs.runtime|sandbox", code=None)
    assert remaining == "", remaining


def test_where_each_process_of_a_run_with_environments_is(cluster: Cluster) -> None:
    process = cluster.start("agents", instead("recipe=agents/calculator", "trainer.total_training_steps=200", *engines(2)), 1)
    by_machine = {number: roles_on(cluster, number) for number in (1, 2, 3)}
    cluster.machines.run(1, "pkill", "-TERM", "-f", "grpo_rl[.]main")
    code, output = ended(process)
    assert code == 75, output
    for number, roles in by_machine.items():
        print(f"MEASURED node-{number}: {', '.join(f'{roles.count(role)} {role}' for role in dict.fromkeys(roles))}")
    everywhere = {"functions", "grpo_rl.envs.runtime.episode_host"}
    kinds = {number: {role.rstrip("0123456789") for role in roles} for number, roles in by_machine.items()}
    assert all(everywhere <= roles for roles in kinds.values()), kinds
    assert "grpo_rl.main" in kinds[1] and "grpo_rl.main" not in kinds[2] | kinds[3]
    assert sorted(role for roles in by_machine.values() for role in roles if role.startswith("rollout")) == [
        "rollout0",
        "rollout1",
    ]
