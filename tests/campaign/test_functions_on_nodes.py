"""Three machines: rewards run on all of them with what the command has, behave as badly there as here, and outlive a machine.

Run by name: `pytest -m campaign -s tests/campaign/test_functions_on_nodes.py`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from separate_machines import Machines, lacking
from test_two_machines import POLICY, ROOT, Cluster, ended, engines, instead

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


def logs(cluster: Cluster, name: str) -> str:
    return "".join(file.read_text(errors="replace") for file in (cluster.runs / name / "logs").glob("reward-*.log"))


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

    process = cluster.start("killed", words, 2)
    cluster.machines.kill(3)
    code, said = ended(process)
    assert code == 0, said
    assert re.search(r"functions\d is gone with its node; its work goes to the other nodes", said), said
    rewards = [
        [row["reward/mean"] for row in read_metrics(cluster.runs / name / "metrics.jsonl")] for name in ("calm", "killed")
    ]
    print(f"MEASURED rewards without and with the machine's end: {rewards}")
    assert rewards[0] == rewards[1] and len(rewards[0]) == STEPS
    assert cluster.policy("calm") == cluster.policy("killed")
    cluster.add(3)


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
