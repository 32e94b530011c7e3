"""Two machines that share nothing but a folder, named as Debian names them: they train, survive, or are refused with their name.

Run by name: `pytest -m campaign tests/campaign`. The cluster is started by the lines of README.md.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from separate_machines import Machines, lacking

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
POLICY = "actor_rollout_ref"
STEPS = 12
WORDS = [
    "recipe=arithmetic/grpo",
    "data.train_batch_size=8",
    f"{POLICY}.actor.ppo_mini_batch_size=8",
    f"{POLICY}.rollout.n=4",
    f"{POLICY}.rollout.name=hf",
    f"{POLICY}.rollout.hf.batched=false",
    f"trainer.total_training_steps={STEPS}",
    "trainer.save_freq=4",
    "trainer.test_freq=-1",
    "trainer.val_before_train=false",
    "trainer.page_freq=0",
]
TWO = ["trainer.nnodes=2", "trainer.n_gpus_per_node=1"]


class Cluster:
    """The machines with a Ray cluster on them, and the runs in a folder that both see."""

    def __init__(self, machines: Machines, runs: Path) -> None:
        self.machines, self.runs = machines, runs
        self.head = machines.address(1)
        self.block = _readme_block()

    def readme(self, start: str) -> list[str]:
        """Return the words of the line of README.md's block that begins so, with this cluster's names."""
        line = next(line for line in self.block if line.startswith(start))
        return shlex.split(line.replace("HEAD", self.head).replace("/shared/runs", str(self.runs)), comments=True)

    def join(self) -> None:
        """Start Ray on the second machine."""
        self.machines.run(2, *self.readme(".venv/bin/ray start --address"))

    def command(self, name: str, *words: str, base: str | None = None) -> list[str]:
        """Return the main command of a run on both machines."""
        own = [f"ray_kwargs.ray_init.address={self.head}:6379", f"trainer.default_local_dir={base or self.runs}"]
        return [".venv/bin/python", "-m", "grpo_rl.main", *WORDS, *TWO, *own, f"trainer.experiment_name={name}", *words]

    def at_step(self, name: str, step: int, process: subprocess.Popen[str]) -> None:
        """Wait until a run has logged this step."""
        file = self.runs / name / "metrics.jsonl"
        while not file.is_file() or len(file.read_text().splitlines()) < step:
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.1)

    def policy(self, name: str) -> str:
        """Return the SHA-256 of a run's exported policy."""
        return hashlib.sha256((self.runs / name / "model" / "model.safetensors").read_bytes()).hexdigest()


def _readme_block() -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    block: str = next(block for block in blocks if "ray start --head" in block)
    return block.replace("\\\n", " ").splitlines()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    reason = lacking()
    if reason is None and importlib.util.find_spec("aiohttp_cors") is None:
        reason = "Ray has no job server here: bash scripts/setup.sh cluster dev"
    if reason is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("shared")
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": str(ROOT)}
    machines = Machines(folder, [ROOT, Path(sys.prefix).resolve()], quiet)
    try:
        made = Cluster(machines, folder / "runs")
        machines.add(1)
        machines.add(2)
        token = machines.run(1, *made.readme(".venv/bin/ray get-auth-token")).strip().splitlines()[-1]
        exported = (word.split("=") for word in made.readme("export")[1:])
        machines.environment |= {name: token if value == "TOKEN" else value for name, value in exported}
        machines.run(1, *made.readme(".venv/bin/ray start --head"))
        made.join()
        yield made
    finally:
        machines.close()


@pytest.fixture(scope="module")
def policy(cluster: Cluster) -> str:
    """The policy of one machine with two ranks, on a Ray of its own; its embedded model is trained first, in its own home."""
    words = [*WORDS, "trainer.n_gpus_per_node=2", f"trainer.default_local_dir={cluster.runs}", "trainer.experiment_name=one"]
    cluster.machines.run(1, ".venv/bin/python", "-m", "grpo_rl.main", *words)
    return cluster.policy("one")


def test_the_block_of_the_readme_trains(cluster: Cluster) -> None:
    """Typed on the second machine, whose home has no model, with a PATH that leads to no environment."""
    small = ["trainer.total_training_steps=1", "trainer.val_before_train=false", "trainer.test_freq=-1"]
    said = cluster.machines.run(2, *cluster.readme("bash scripts/submit.sh"), *small, "trainer.experiment_name=readme")
    assert "succeeded" in said
    assert (cluster.runs / "readme" / "model" / "model.safetensors").is_file()


def test_two_machines_train_the_policy_of_one_over_a_cut(cluster: Cluster, policy: str) -> None:
    process = cluster.machines.start(1, *cluster.command("cut"))
    cluster.at_step("cut", 3, process)
    cluster.machines.cut(2, 3.0)
    said, _ = process.communicate(timeout=280)
    assert process.returncode == 0, said
    assert cluster.policy("cut") == policy


def test_a_job_from_the_other_machine_trains_the_same_policy(cluster: Cluster, policy: str) -> None:
    where = ["--wait", "--address", f"http://{cluster.head}:8265"]
    words = [*WORDS, *TWO, f"trainer.default_local_dir={cluster.runs}", "trainer.experiment_name=job"]
    cluster.machines.run(2, "bash", "scripts/submit.sh", *where, *words)
    assert cluster.policy("job") == policy


def test_no_job_server_is_one_line(cluster: Cluster) -> None:
    where = ["--address", f"http://{cluster.machines.address(2)}:8265", f"trainer.default_local_dir={cluster.runs}"]
    said = cluster.machines.run(2, "bash", "scripts/submit.sh", *where, code=6)
    assert len(said.splitlines()) == 1
    assert "no job server at http://10.78.0.2:8265 (" in said and "setup.sh cluster" in said


def _other_code(cluster: Cluster) -> list[str]:
    changed = cluster.runs.parent / "changed"
    shutil.copytree(ROOT / "grpo_rl", changed, ignore=shutil.ignore_patterns("__pycache__"))
    clip = changed / "algos" / "losses" / "clip.py"
    clip.write_text(clip.read_text() + "\n# changed\n")
    cluster.machines.run(2, "mount", "--bind", str(changed), str(ROOT / "grpo_rl"))
    return []


def _other_storage(cluster: Cluster) -> list[str]:
    return ["trainer.default_local_dir=/tmp/unshared"]


def _a_model_on_one_machine(cluster: Cluster) -> list[str]:
    folder = next((cluster.runs / "readme" / "models").glob("arithmetic-*[!m]"))
    cluster.machines.run(1, "cp", "-r", str(folder), "/tmp/model")
    return [f"{POLICY}.model.path=/tmp/model"]


@pytest.mark.parametrize(
    ("prepare", "expected"),
    [
        (_other_code, "grpo_rl/algos/losses/clip.py differs; copy the same code to every machine"),
        (_other_storage, "trainer.default_local_dir must be on storage that all machines share"),
        (_a_model_on_one_machine, f"does not see /tmp/model, {POLICY}.model.path"),
    ],
)
def test_a_machine_without_what_the_run_needs_is_refused(
    cluster: Cluster, prepare: Callable[[Cluster], list[str]], expected: str
) -> None:
    words = prepare(cluster)
    try:
        said = cluster.machines.run(1, *cluster.command(f"refused{prepare.__name__}", *words), code=6)
    finally:
        if prepare is _other_code:
            cluster.machines.run(2, "umount", str(ROOT / "grpo_rl"))
    assert re.search(rf"^error: .*the machine 10\.78\.0\.2 \(node-2\) .*{re.escape(expected)}", said, re.MULTILINE), said
    assert "starting the actor" not in said


def test_the_run_of_a_killed_machine_goes_on_with_another(cluster: Cluster, policy: str) -> None:
    command = cluster.command("killed")
    process = cluster.machines.start(1, *command)
    cluster.at_step("killed", 5, process)
    cluster.machines.kill(2)
    said, _ = process.communicate(timeout=280)
    assert process.returncode == 6, said
    assert "node 10.78.0.2 (" in said
    cluster.machines.add(2)
    cluster.join()
    assert "resumed from" in cluster.machines.run(1, *command)
    assert cluster.policy("killed") == policy
