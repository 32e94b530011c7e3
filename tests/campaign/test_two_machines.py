"""Machines that share nothing but a folder, named as Debian names them: they train, survive, or are refused with their name.

Run by name: `pytest -m campaign -s tests/campaign/test_two_machines.py`. The cluster is started by the lines of README.md.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from separate_machines import Machines, lacking

from grpo_rl.telemetry.metrics.metrics_file import read_metrics

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
PYTHON = ".venv/bin/python"
POLICY = "actor_rollout_ref"
STEPS = 12
END_S = 500.0
NAMED_S = 20.0
"""Longest time from a machine's end to that of the run."""
REFUSED_S = 60.0
"""Longest time from the command to its refusal."""
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
ONE = ["trainer.n_gpus_per_node=2"]
TWO = ["trainer.nnodes=2", "trainer.n_gpus_per_node=1"]
ASYNC = ["trainer.schedule=async", "trainer.asynchronous.max_staleness=1"]


def engines(machines: int) -> list[str]:
    """One rank that trains, and an engine on each of so many other machines."""
    pool = f"{POLICY}.rollout"
    return ["trainer.nnodes=1", "trainer.n_gpus_per_node=1", f"{pool}.nnodes={machines}", f"{pool}.n_gpus_per_node=1"]


def instead(*words: str) -> list[str]:
    """The run's words with these in the place of those of the same keys."""
    keys = {word.partition("=")[0] for word in words}
    return [*(word for word in WORDS if word.partition("=")[0] not in keys), *words]


class Cluster:
    """The machines with a Ray cluster on them, and the runs in a folder that all see."""

    def __init__(self, machines: Machines, runs: Path) -> None:
        self.machines, self.runs = machines, runs
        self.head = machines.address(1)
        self.block = _readme_block()
        self.said = ""

    def begin(self) -> None:
        """Start two machines with Ray, and train as README.md says, on the second, whose home has no model and PATH no environment."""
        self.machines.add(1)
        token = self.machines.run(1, *self.readme(".venv/bin/ray get-auth-token")).strip().splitlines()[-1]
        exported = (word.split("=") for word in self.readme("export")[1:])
        self.machines.environment |= {name: token if value == "TOKEN" else value for name, value in exported}
        self.machines.run(1, *self.readme(".venv/bin/ray start --head"))
        self.add(2)
        small = ["trainer.total_training_steps=1", "trainer.val_before_train=false", "trainer.test_freq=-1"]
        block = self.readme("bash scripts/submit.sh")
        self.said = self.machines.run(2, *block, *small, "trainer.experiment_name=readme", timeout_s=1200)

    @property
    def model(self) -> Path:
        """The embedded model as that run has left it."""
        return next((self.runs / "readme" / "models").glob("arithmetic-*[!m]"))

    def readme(self, start: str) -> list[str]:
        """Return the words of the line of README.md's block that begins so, with this cluster's names."""
        line = next(line for line in self.block if line.startswith(start))
        return shlex.split(line.replace("HEAD", self.head).replace("/shared/runs", str(self.runs)), comments=True)

    def add(self, number: int) -> None:
        """Start a machine, also one that is gone, and Ray on it."""
        self.machines.add(number)
        self.machines.run(number, *self.readme(".venv/bin/ray start --address"))

    def command(self, name: str, words: list[str]) -> list[str]:
        """Return the main command of a run on this cluster."""
        at = [f"ray_kwargs.ray_init.address={self.head}:6379", f"trainer.default_local_dir={self.runs}"]
        return [PYTHON, "-m", "grpo_rl.main", *at, *self.named(name, words)]

    def named(self, name: str, words: list[str]) -> list[str]:
        """Return the words with the run's name and the model of the README's run, which costs a minute to make."""
        mine = any(word.startswith((f"{POLICY}.model.path=", "recipe=agents/")) for word in words)
        return [*words, *([] if mine else [f"{POLICY}.model.path={self.model}"]), f"trainer.experiment_name={name}"]

    def train(self, name: str, words: list[str], on: int = 1, code: int = 0) -> str:
        """Return what a run prints that is started on machine `on`."""
        return self.machines.run(on, *self.command(name, words), code=code)

    def start(self, name: str, words: list[str], step: int, on: int = 1) -> subprocess.Popen[str]:
        """Return a run that has logged this step."""
        process = self.machines.start(on, *self.command(name, words))
        self.until(name, step, process)
        return process

    def until(self, name: str, step: int, process: subprocess.Popen[str] | None = None) -> None:
        """Wait until a run has logged this step."""
        file, until = self.runs / name / "metrics.jsonl", time.monotonic() + END_S
        while not file.is_file() or len(file.read_text().splitlines()) < step:
            assert process is None or process.poll() is None, process.communicate()[0]
            assert time.monotonic() < until, f"{name} does not come to step {step}"
            time.sleep(0.1)

    def submit(self, words: list[str], *more: str, on: int = 2) -> str:
        """Return what submit.sh prints on a machine."""
        where = ["--address", f"http://{self.head}:8265", *more, f"trainer.default_local_dir={self.runs}"]
        return self.machines.run(on, "bash", "scripts/submit.sh", *where, *words)

    def workers(self, number: int) -> int:
        """Return how many workers of runs are on a machine."""
        return int(self.machines.run(number, "pgrep", "-c", "-f", "ray::WorkerHost", code=None))

    def policy(self, name: str) -> str:
        """Return the SHA-256 of a run's exported policy."""
        return hashlib.sha256((self.runs / name / "model" / "model.safetensors").read_bytes()).hexdigest()

    def learnt(self, name: str) -> list[dict[str, Any]]:
        """Return a run's metrics without what depends on the clock or the machine."""
        timed = ("timing_s/", "perf/", "plan/", "time", "recovery/", "episode/wait_s")
        rows = read_metrics(self.runs / name / "metrics.jsonl")
        return [{key: value for key, value in row.items() if not key.startswith(timed)} for row in rows]


def _readme_block() -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    block: str = next(block for block in blocks if "ray start --head" in block)
    return block.replace("\\\n", " ").splitlines()


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Return a command's exit code and what it printed."""
    said, _ = process.communicate(timeout=END_S)
    return process.returncode, said


def lost(process: subprocess.Popen[str]) -> str:
    """Return the error line of a run that has just lost a part of its cluster, printed with the seconds that it took."""
    began = time.monotonic()
    code, said = ended(process)
    took = time.monotonic() - began
    [line] = [line for line in said.splitlines() if line.startswith("error: ")] or [said]
    print(f"MEASURED lost: code {code} after {took:.1f} s: {line}")
    assert code == 6, said
    assert took < NAMED_S
    return line


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    reason = lacking()
    if reason is None and importlib.util.find_spec("aiohttp_cors") is None:
        reason = "Ray has no job server here: bash scripts/setup.sh cluster dev"
    if reason is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("shared")
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": str(ROOT)}
    # Machines that share these cores with others: no worker steps behind everything else, and no thread spins while it waits.
    quiet |= {"RAY_worker_niceness": "0", "GOMP_SPINCOUNT": "0"}
    # A cache of embedded models on a path that is not below /tmp saves minutes if the tests are repeated.
    quiet |= {name: os.environ[name] for name in ("GRPO_RL_CACHE", "OMP_NUM_THREADS") if name in os.environ}
    machines = Machines(folder, [ROOT, Path(sys.prefix).resolve()], quiet)
    try:
        made = Cluster(machines, folder / "runs")
        made.begin()
        yield made
    finally:
        machines.close()


@pytest.fixture(scope="module")
def policy(cluster: Cluster) -> str:
    """The policy of one machine with two ranks, on a Ray of its own."""
    alone(cluster, "one", WORDS)
    return cluster.policy("one")


def alone(cluster: Cluster, name: str, words: list[str]) -> None:
    """Train on the first machine alone, with two ranks and a Ray of its own."""
    own = [*ONE, f"trainer.default_local_dir={cluster.runs}"]
    cluster.machines.run(1, PYTHON, "-m", "grpo_rl.main", *cluster.named(name, words), *own)


def test_the_block_of_the_readme_trains(cluster: Cluster) -> None:
    assert "succeeded" in cluster.said
    assert (cluster.runs / "readme" / "model" / "model.safetensors").is_file()


def test_no_job_server_is_one_line(cluster: Cluster) -> None:
    where = ["--address", f"http://{cluster.machines.address(2)}:8265", f"trainer.default_local_dir={cluster.runs}"]
    said = cluster.machines.run(2, "bash", "scripts/submit.sh", *where, code=6)
    assert len(said.splitlines()) == 1
    assert "no job server at http://10.78.0.2:8265 (" in said and "setup.sh cluster" in said


@contextmanager
def _instead_on_2(cluster: Cluster, there: Path, change: Callable[[str], str], file: str = "") -> Iterator[None]:
    """Lay a changed copy over a file on the second machine, or over a folder with one `file` of it changed."""
    copy = cluster.runs.parent / "changed"
    if file:
        shutil.copytree(there, copy, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy(there, copy)
    changed = copy / file
    changed.write_text(change(changed.read_text()))
    cluster.machines.run(2, "mount", "--bind", str(copy), str(there))
    try:
        yield
    finally:
        cluster.machines.run(2, "umount", str(there))
        shutil.rmtree(copy) if file else copy.unlink()


@contextmanager
def other_code(cluster: Cluster) -> Iterator[list[str]]:
    with _instead_on_2(cluster, ROOT / "grpo_rl", lambda text: text + "\n# changed\n", "algos/losses/clip.py"):
        yield []


@contextmanager
def another_version(cluster: Cluster) -> Iterator[list[str]]:
    there = Path(str(metadata.distribution("transformers").locate_file(""))).resolve()
    [file] = there.glob("transformers-*.dist-info/METADATA")
    with _instead_on_2(cluster, file, lambda text: re.sub(r"(?m)^Version: .*$", "Version: 4.0.1", text, count=1)):
        yield []


@contextmanager
def storage_not_shared(cluster: Cluster) -> Iterator[list[str]]:
    yield ["trainer.default_local_dir=/tmp/unshared"]


@contextmanager
def a_model_on_one_machine(cluster: Cluster) -> Iterator[list[str]]:
    cluster.machines.run(1, "cp", "-r", str(cluster.model), "/tmp/model")
    yield [f"{POLICY}.model.path=/tmp/model"]


@pytest.mark.parametrize(
    ("different", "expected"),
    [
        (other_code, "has other code than the controller's machine (node-1): grpo_rl/algos/losses/clip.py differs"),
        (another_version, "has transformers 4.0.1, and the controller's machine (node-1) "),
        (storage_not_shared, "trainer.default_local_dir must be on storage that all machines share"),
        (a_model_on_one_machine, f"does not see /tmp/model, {POLICY}.model.path"),
    ],
)
def test_a_machine_without_what_the_run_needs_is_refused(cluster: Cluster, different: Any, expected: str) -> None:
    with different(cluster) as words:
        began = time.monotonic()
        said = cluster.train(f"refused/{different.__name__}", [*WORDS, *TWO, *words], code=6)
        took = time.monotonic() - began
    print(f"MEASURED {different.__name__}: refused {took:.1f} s after the command (bar {REFUSED_S:.0f})")
    assert re.search(rf"^error: .*the machine 10\.78\.0\.2 \(node-2\) .*{re.escape(expected)}", said, re.MULTILINE), said
    assert "starting the actor" not in said
    assert took < REFUSED_S


def test_two_machines_train_the_policy_of_one_over_a_cut(cluster: Cluster, policy: str) -> None:
    process = cluster.start("cut", [*WORDS, *TWO], 3)
    # A rank of the actor, one of the reference, an engine and the functions on each.
    assert cluster.workers(1) == cluster.workers(2) == 4
    cluster.machines.cut(2, 3.0)
    code, said = ended(process)
    assert code == 0, said
    assert cluster.policy("cut") == policy


def test_a_job_from_the_other_machine_trains_the_same_policy(cluster: Cluster, policy: str) -> None:
    cluster.submit(cluster.named("job", [*WORDS, *TWO]), "--wait")
    assert cluster.policy("job") == policy


def test_a_job_keeps_others_out_of_its_folder_and_saves_when_it_is_stopped(cluster: Cluster) -> None:
    words = [*instead("trainer.total_training_steps=500", "trainer.save_freq=-1"), *TWO]
    said = cluster.submit(cluster.named("stopped", words))
    job = next(word for word in said.split() if word.strip("'\"").startswith("raysubmit_")).strip("'\"")
    cluster.until("stopped", 3)
    began = time.monotonic()
    refused = cluster.train("stopped", words, on=2, code=2)
    print(f"MEASURED the same run's name on the other machine: refused {time.monotonic() - began:.1f} s after the command")
    status = json.loads((cluster.runs / "stopped" / "status.json").read_text())
    assert status["host"] == "node-1" and f"{status['pid']}" in refused and "node-1" in refused
    cluster.machines.run(2, ".venv/bin/ray", "job", "stop", "--address", f"http://{cluster.head}:8265", job)
    status = json.loads((cluster.runs / "stopped" / "status.json").read_text())
    assert (status["state"], status["error"]["exit_code"]) == ("preempted", 75)
    assert status["last_commit"] == status["step"] >= 3
    assert (cluster.runs / "stopped" / "checkpoints" / f"step_{status['step']}").is_dir()


def test_a_plain_job_of_rays_has_the_log_and_the_exit_code_of_its_run_and_saves_when_it_is_stopped(cluster: Cluster) -> None:
    """Without submit.sh, as people submit to a cluster that they already have."""
    ray, address = [".venv/bin/ray", "job"], ["--address", f"http://{cluster.head}:8265"]
    run_words = [f"trainer.default_local_dir={cluster.runs}", "ray_kwargs.ray_init.address=auto"]

    def submit(name: str, words: list[str], *options: str, code: int = 0) -> str:
        command = [str(ROOT / PYTHON), "-m", "grpo_rl.main", *run_words, *cluster.named(name, words)]
        return cluster.machines.run(2, *ray, "submit", *address, *options, "--", *command, code=code)

    output = submit("plain", [*instead("trainer.total_training_steps=1", "trainer.save_freq=-1"), *TWO])
    assert "`ray job stop` kills this run after 3 s" in output and "succeeded" in output
    assert (cluster.runs / "plain" / "logs" / "console.log").read_text().strip().splitlines()[-1].strip() in output
    output = submit("bad", [*WORDS, "trainer.no_such_key=1"], code=1)
    assert "no_such_key" in output and "exit code 2" in output
    wait = ["--runtime-env-json", json.dumps({"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "90"}})]
    words = [*instead("trainer.total_training_steps=500", "trainer.save_freq=-1"), *TWO]
    submit("plain_stopped", words, "--no-wait", "--submission-id", "plain_stopped", *wait)
    cluster.until("plain_stopped", 3)
    cluster.machines.run(2, *ray, "stop", *address, "plain_stopped")
    status = json.loads((cluster.runs / "plain_stopped" / "status.json").read_text())
    assert (status["state"], status["error"]["exit_code"]) == ("preempted", 75)
    assert status["last_commit"] == status["step"] >= 3
    assert "kills this run" not in cluster.machines.run(2, *ray, "logs", *address, "plain_stopped")


AS_USER = """
set -e
home=~root
if [[ $2 == "$home"/* ]]; then  # a Python that other users do not reach
    mkdir -p /tmp/python; mount --rbind "$2" /tmp/python
    mount -t tmpfs -o mode=755 tmpfs "$home"; mkdir -p "$2"; mount --rbind /tmp/python "$2"
fi
mkdir -p "/tmp/home$1"; chown "$1:$1" "/tmp/home$1"
uid=$1; shift 2
exec setpriv --reuid "$uid" --regid "$uid" --clear-groups env HOME="/tmp/home$uid" "$@"
"""


def as_user(uid: int, *words: str) -> list[str]:
    """Return the words that run a command as this user of a machine, with a home of their own."""
    return ["unshare", "--mount", "bash", "-c", AS_USER, "bash", str(uid), sys.base_prefix, *words]


def test_runs_of_two_users_on_one_cluster_do_not_disturb_each_other(cluster: Cluster, policy: str) -> None:
    """Jobs run as the cluster's user; a controller of another one's cannot connect to its raylet, and says so."""
    submit = ["bash", "scripts/submit.sh", "--wait", "--address", f"http://{cluster.head}:8265"]
    words = [f"trainer.default_local_dir={cluster.runs}", *WORDS, *TWO, "reward.num_workers=1"]
    processes = {
        uid: cluster.machines.start(2, *as_user(uid, *submit, *cluster.named(f"user{uid}", words))) for uid in (1001, 1002)
    }
    for process in processes.values():
        code, output = ended(process)
        assert code == 0 and "succeeded" in output, output
    assert [cluster.policy(f"user{uid}") for uid in processes] == [policy] * 2
    controllers = [json.loads((cluster.runs / f"user{uid}" / "status.json").read_text())["pid"] for uid in processes]
    assert len(set(controllers)) == 2
    for number in (1, 2):
        assert cluster.workers(number) == 0
        assert cluster.machines.run(number, "bash", "-c", "ls -d /tmp/grpo-* /dev/shm/grpo* 2>/dev/null", code=None) == ""
    at = [f"ray_kwargs.ray_init.address={cluster.head}:6379", "trainer.default_local_dir=/tmp/home1001"]
    direct = [PYTHON, "-m", "grpo_rl.main", *at, *WORDS, *TWO]
    refused = cluster.machines.run(2, *as_user(1001, *direct, f"actor_rollout_ref.model.path={cluster.model}"), code=2)
    assert f"{cluster.model}/config.json: Permission denied" in refused
    output = cluster.machines.run(2, *as_user(1001, *direct), code=6)
    assert "on this machine is another user's (uid 0), and lets nobody else connect: submit the run as a job" in output


def test_seeds_are_jobs_of_their_own_with_one_table(cluster: Cluster) -> None:
    words = [*instead("trainer.total_training_steps=2", "trainer.save_freq=-1"), *TWO]
    cluster.submit(cluster.named("both", words), "--wait", "--seeds", "1,2")
    table = cluster.machines.run(2, PYTHON, "-m", "grpo_rl.sweep.outcome", str(cluster.runs / "both"))
    print(table)
    assert re.search(r"all runs +2/2", table)
    assert cluster.policy("both/seed=1") != cluster.policy("both/seed=2")


@pytest.mark.parametrize("recipe", ["arithmetic/ppo", "agents/calculator"])
def test_a_critic_and_episodes_are_the_same_on_two_machines(cluster: Cluster, recipe: str) -> None:
    words = instead(f"recipe={recipe}", "trainer.total_training_steps=4")
    name = recipe.rpartition("/")[2]
    alone(cluster, f"{name}_one", words)
    cluster.train(f"{name}_two", [*words, *TWO])
    assert cluster.policy(f"{name}_two") == cluster.policy(f"{name}_one")
    assert cluster.learnt(f"{name}_two") == cluster.learnt(f"{name}_one")


def test_a_link_that_is_cut_for_good_ends_the_run_which_goes_on_with_a_new_machine(cluster: Cluster, policy: str) -> None:
    process = cluster.start("unlinked", [*WORDS, *TWO], 5)
    cluster.machines.cut(2)
    assert re.search(r"its node 10\.78\.0\.2 \([^)]*actor\d[^)]*\) has not answered", lost(process))
    cluster.add(3)
    assert "resumed from" in cluster.train("unlinked", [*WORDS, *TWO])
    assert cluster.policy("unlinked") == policy
    cluster.machines.kill(2)
    cluster.add(2)


def test_the_run_of_a_killed_machine_goes_on_with_another(cluster: Cluster, policy: str) -> None:
    process = cluster.start("killed", [*WORDS, *TWO], 5)
    victim = next(number for number in (2, 3) if number in cluster.machines.running and cluster.workers(number))
    cluster.machines.kill(victim)
    assert re.search(rf"its node 10\.78\.0\.{victim} \([^)]*actor\d[^)]*\) has not answered", lost(process))
    cluster.add(victim)
    assert "resumed from" in cluster.train("killed", [*WORDS, *TWO])
    assert cluster.policy("killed") == policy


def test_engines_on_other_machines(cluster: Cluster) -> None:
    """The policy does not depend on how many engines there are or where; a machine of theirs may die, and the run goes on."""
    if 3 not in cluster.machines.running:
        cluster.add(3)
    # Twelve steps would end before the loss of a node is certain.
    words = instead("trainer.total_training_steps=80")
    cluster.train("engine", [*words, *engines(1)])
    process = cluster.start("engines", [*words, *engines(2)], 5)
    workers = {number: cluster.workers(number) for number in (1, 2, 3)}
    # An engine on each of two, actor and reference on the third, the functions on all.
    assert sorted(workers.values()) == [2, 2, 3]
    victim = next(number for number in (2, 3) if workers[number] == 2)
    cluster.machines.kill(victim)
    assert re.search(rf"its node 10\.78\.0\.{victim} \(rollout\d\) has not answered", lost(process))
    cluster.add(victim)
    assert "resumed from" in cluster.train("engines", [*words, *engines(2)])
    assert cluster.policy("engines") == cluster.policy("engine")


def test_an_engine_comes_with_a_machine_and_goes_with_it(cluster: Cluster) -> None:
    """A machine that joins the cluster brings an engine, its death takes it away, and the run goes on to the policy of one engine."""
    if 3 in cluster.machines.running:
        cluster.machines.kill(3)
    words = [*instead("trainer.total_training_steps=80", "trainer.save_freq=-1"), *engines(1)]
    cluster.train("steady", words)
    elastic = [f"{POLICY}.rollout.min_replicas=1", f"{POLICY}.rollout.max_replicas=2"]
    process = cluster.start("elastic", [*words, *elastic], 3)

    def until(serving: int) -> int:
        """Wait until so many engines serve; return the step then."""
        for _ in range(600):
            status = json.loads((cluster.runs / "elastic" / "status.json").read_text())
            if len(status.get("engines", {}).get("serving", ())) == serving:
                return int(status["step"])
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.1)
        raise AssertionError(f"{serving} engines do not serve")

    cluster.add(3)
    began = time.monotonic()
    joined = until(2)
    print(f"MEASURED joins: serves {time.monotonic() - began:.1f} s after the machine is there, at step {joined}")
    cluster.machines.kill(3)
    left = until(1)
    code, said = ended(process)
    print(f"MEASURED leaves: noticed at step {left}")
    assert code == 0, said
    assert cluster.policy("elastic") == cluster.policy("steady")


@pytest.mark.parametrize("machines", [1, 2])
def test_asynchronous_engines_on_other_machines_go_on_over_a_cut(cluster: Cluster, machines: int) -> None:
    name = f"async{machines}"
    process = cluster.start(name, [*WORDS, *engines(machines), *ASYNC], 3)
    engine = next(number for number in (2, 3) if number in cluster.machines.running and cluster.workers(number))
    cluster.machines.cut(engine, 4.0)
    code, said = ended(process)
    assert code == 0, said
    assert [row["step"] for row in read_metrics(cluster.runs / name / "metrics.jsonl")] == [*range(1, STEPS + 1)]


@pytest.mark.parametrize("agent", ["ray::RuntimeEnv", "ray::DashboardA"])
def test_a_killed_agent_of_ray_on_the_other_machine_is_named(cluster: Cluster, agent: str) -> None:
    """A raylet ends with its agents, and the machine is as good as gone."""
    if 3 in cluster.machines.running:
        cluster.machines.kill(3)
    process = cluster.start(f"agent{agent[5]}", [*WORDS, *TWO], 3)
    cluster.machines.run(2, "pkill", "-9", "-f", agent)
    assert re.search(r"its node 10\.78\.0\.2 \([^)]*actor\d[^)]*\) ", lost(process))
    cluster.machines.kill(2)
    cluster.add(2)


def test_a_head_that_is_gone_ends_the_run_of_another_machine(cluster: Cluster) -> None:
    """The last test: the cluster ends with it."""
    process = cluster.start("headless", [*WORDS, *TWO], 5, on=2)
    cluster.machines.kill(1)
    assert re.search(
        r"the Ray cluster is lost: its (head \(gcs_server\)|node 10\.78\.0\.1 \(.*\)) has not answered", lost(process)
    )
