"""`scripts/submit.sh --slurm`: the job file runs with stand-ins of Slurm's and Ray's programs, and comes back after preemption."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from sockets import free_port

from grpo_rl.cluster.run_session import STOP_WAIT
from grpo_rl.commands.slurm import job_file
from grpo_rl.config.compose import compose
from grpo_rl.config.recipes import folder
from grpo_rl.config.schema.tree import TrainerConfig
from grpo_rl.errors import ConfigError
from grpo_rl.plan.make import make_plan

NAME = "trainer.experiment_name=it's/a b"
SMALL = ["recipe=arithmetic/grpo", NAME]

STAND_INS = {
    # Slurm's: its options are written down, and the program runs on this machine.
    "srun": 'echo "srun $*" >> "$SAID"; while [[ $1 == --* ]]; do shift; done; exec "$@"',
    "scontrol": 'echo "scontrol $*" >> "$SAID"',
    # A head that others reach at its port, and workers that stay.
    "ray": 'echo "ray $* ${#RAY_AUTH_TOKEN}" >> "$SAID"; if [[ $2 == --head ]]; then exec "$REAL" -m http.server "${3#--port=}"; fi; exec sleep 60',
    # A run that saves for a moment when it is asked to end.
    "python": 'printf "run%s\\n" "$(printf " <%s>" "$@")" >> "$SAID"; trap "sleep 1; exit 75" USR1; touch "$SAID.begun"; while true; do sleep 0.1; done',
}


JOB = free_port() - 20_000
"""Its port is free."""


def start(text: str, tmp_path: Path) -> subprocess.Popen[bytes]:
    """Start a job file as Slurm does on its first node, with stand-ins in the place of the environment's programs."""
    for name, body in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    bin_folder = str(Path(sys.executable).parent)
    (tmp_path / "job.sh").write_text(
        text.replace(f"{bin_folder}/ray", f"{tmp_path}/ray").replace(sys.executable, f"{tmp_path}/python")
    )
    slurm = {"SLURM_JOB_ID": str(JOB), "SLURM_CPUS_ON_NODE": "2", "SLURMD_NODENAME": "node1"}
    environment = (
        os.environ | slurm | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SAID": f"{tmp_path}/said", "REAL": sys.executable}
    )
    return subprocess.Popen(["bash", tmp_path / "job.sh"], env=environment, cwd="/", stderr=subprocess.DEVNULL)


@pytest.mark.parametrize("nodes", [1, 3])
def test_a_job_goes_on_after_its_time_is_over(tmp_path: Path, nodes: int) -> None:
    hostile = f"data.system_prompt='$head:$(touch {tmp_path}/PWNED)`touch {tmp_path}/PWNED`\"'"
    job = start(job_file([*SMALL, f"trainer.nnodes={nodes}", "trainer.n_gpus_per_node=1", hostile], tmp_path), tmp_path)
    while not (tmp_path / "said.begun").exists():
        assert job.poll() is None
        time.sleep(0.05)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(timeout=240) == 75
    said = (tmp_path / "said").read_text().splitlines()
    assert said[-1] == f"scontrol requeue {JOB}"
    (run,) = [line for line in said if line.startswith("run")]
    assert run.startswith(f"run <-m> <grpo_rl.main> <{SMALL[0]}> <{NAME}> <trainer.nnodes={nodes}>")
    assert f"<{hostile}>" in run and not (tmp_path / "PWNED").exists(), "the job runs no word"
    if nodes == 1:
        assert len(said) == 2
        return
    port = 20_000 + JOB
    address = f"{os.uname().nodename}:{port}"
    assert f"<ray_kwargs.ray_init.address={address}>" in run
    assert sorted(line for line in said if line.startswith("ray")) == [
        f"ray start --address={address} --block 64",
        f"ray start --head --port={port} --block 64",
    ]
    assert "--nodes=2 --ntasks=2 --exclude=node1" in "".join(line for line in said if "--address" in line and "srun" in line)


def test_nodes_and_gpus_are_those_of_the_named_machine() -> None:
    text = job_file(["recipe=gsm8k/qwen2.5-7b", "machine=2x8xH100-80GB", "trainer.experiment_name=x"], Path("/shared/grpo_rl"))
    for line in (
        "#SBATCH --nodes=2",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --signal=B:USR1@90",
        "cd /shared/grpo_rl || exit 1",
    ):
        assert line in text.splitlines()
    assert "trainer.nnodes=2 trainer.n_gpus_per_node=8" in text and "machine=" not in text


@pytest.mark.parametrize("name", ["skypilot", "rayjob"])
def test_the_files_for_other_clusters_start_a_run_that_can_be_planned(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = yaml.safe_load((folder() / f"cluster/{name}.yaml").read_text())
    text = file["run"] if name == "skypilot" else file["spec"]["entrypoint"]
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    command = text[text.index("-m grpo_rl.main") :].replace("\\\n", " ")
    for variable, value in {
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NUM_GPUS_PER_NODE": "8",
        "EXPERIMENT": "x",
        "head": "10.0.0.1",
    }.items():
        command = command.replace(f"${variable}", value)
    words = [word for word in shlex.split(command)[2:] if "/shared/" not in word]
    plan = make_plan(compose([*words, "machine=2x8xH100-80GB", "trainer.dry_run=true"]))
    assert (plan.config.trainer.nnodes, plan.config.trainer.n_gpus_per_node) == (2, 8)


def test_the_job_for_kuberay_has_the_fields_of_its_kind() -> None:
    """The names are those of KubeRay's `rayjob_types.go` and `raycluster_types.go`; no Kubernetes has read the file."""
    file = yaml.safe_load((folder() / "cluster/rayjob.yaml").read_text())
    assert (file["apiVersion"], file["kind"]) == ("ray.io/v1", "RayJob")
    spec = file["spec"]
    fields = {"submissionMode", "entrypoint", "runtimeEnvYAML", "backoffLimit", "shutdownAfterJobFinishes", "rayClusterSpec"}
    assert spec.keys() == fields
    assert spec["submissionMode"] == "K8sJobMode" and spec["shutdownAfterJobFinishes"] is True
    assert float(yaml.safe_load(spec["runtimeEnvYAML"])["env_vars"][STOP_WAIT]) > TrainerConfig().grace_s
    cluster = spec["rayClusterSpec"]
    assert cluster["rayVersion"] == version("ray"), "with another one Ray refuses to connect"
    assert cluster["authOptions"] == {"mode": "token"}
    [workers] = cluster["workerGroupSpecs"]
    nodes, gpus = (int(value) for value in re.findall(r"trainer\.n(?:nodes|_gpus_per_node)=(\d+)", spec["entrypoint"]))
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"] == nodes
    for group in (cluster["headGroupSpec"], workers):
        pod = group["template"]["spec"]
        [container] = pod["containers"]
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        assert int(container["resources"]["limits"].get("nvidia.com/gpu", 0)) == (gpus if group is workers else 0)
    assert workers["template"]["spec"]["terminationGracePeriodSeconds"] > TrainerConfig().grace_s


def test_skypilots_cluster_has_a_token_that_nobody_can_guess(tmp_path: Path) -> None:
    run = yaml.safe_load((folder() / "cluster/skypilot.yaml").read_text())["run"]
    known = {
        "PATH": os.environ["PATH"],
        "SKYPILOT_NODE_IPS": "127.0.0.1",
        "SKYPILOT_TASK_ID": "sky-2026",
        "SKYPILOT_NODE_RANK": "0",
    }
    for token in ("", "short"):
        done = subprocess.run(
            ["bash", "-c", run], env=known | {"RAY_AUTH_TOKEN": token}, cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 2 and "RAY_AUTH_TOKEN: give a random one" in done.stderr


def test_a_job_needs_a_name_to_go_on_under() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.experiment_name=NAME"):
        job_file(["recipe=arithmetic/grpo"], Path("/"))
