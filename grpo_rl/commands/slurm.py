"""The job file of a run for Slurm: `scripts/submit.sh --slurm WORDS > job.sh`, then `sbatch job.sh`. The job
starts a Ray cluster on its nodes, and the controller on the first. Before its time is over, or when it is
preempted, the run saves and ends with code 75; the job is requeued and goes on."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from grpo_rl.config.compose import compose
from grpo_rl.errors import ConfigError, Preempted
from grpo_rl.main import exit_code_after
from grpo_rl.plan.decisions import Plan
from grpo_rl.plan.make import make_plan

NAME, MACHINE = "trainer.experiment_name", ("machine", "trainer.machine", "trainer.machine_host_gib")
MARGIN_S = 60  # beyond trainer.grace_s, for ending the other processes and requeueing

_HEAD = """\
#!/usr/bin/env bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
{gpus}#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@{signal_s}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={name}-%j.log
# Change the time, and add what your cluster asks for: --partition, --account.
set -uo pipefail
trap 'kill $(jobs -p) 2>/dev/null' EXIT
cd {folder} || exit 1
"""

_CLUSTER = """\
# A Ray cluster of this job's nodes. Its port differs from those of other jobs, and its token keeps other users out.
head=$(hostname)
port=$((20000 + SLURM_JOB_ID % 20000))
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')
on_each=(srun --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_ON_NODE"{srun_gpus})
"${{on_each[@]}}" --nodes=1 --ntasks=1 --nodelist="$SLURMD_NODENAME" {ray} start --head --port="$port" --block &
ray_head=$!
until (exec 3<>"/dev/tcp/$head/$port") 2>/dev/null; do kill -0 "$ray_head" || exit 6; sleep 1; done
"${{on_each[@]}}" --nodes={others} --ntasks={others} --exclude="$SLURMD_NODENAME" {ray} start --address="$head:$port" --block &
"""

_RUN = """\
{python} -m grpo_rl.main {words} &
run=$!
trap 'kill -USR1 "$run"' USR1 TERM
code=75
# A signal interrupts `wait`, which then says so with a code above 128, while the run is still saving.
while wait "$run"; code=$?; ((code > 128)) && kill -0 "$run" 2>/dev/null; do :; done
if ((code == {preempted})); then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
"""


def job_file(words: Sequence[str], folder: Path) -> str:
    """Return the job file of a run, started in `folder`, which all nodes see. Raises ConfigError."""
    composed = compose([*words, "trainer.dry_run=true"])
    config = composed.config
    if config.trainer.experiment_name is None:
        raise ConfigError(f"{NAME}: a job that is put into the queue again goes on under its name; give it one: {NAME}=NAME")
    plan = make_plan(composed)
    nodes, gpus = _machines(plan)
    job_words = [word for word in words if word.partition("=")[0].lstrip("+") not in MACHINE]
    if plan.machine.name:
        job_words += [f"trainer.nnodes={config.trainer.nnodes}", f"trainer.n_gpus_per_node={config.trainer.n_gpus_per_node}"]
    ray = "ray_kwargs.ray_init"
    if nodes > 1:
        job_words.append(f"{ray}.wait_for_nodes_s=300")
    python = Path(sys.executable)
    parts = {
        "name": re.sub(r"[^\w.-]+", "-", config.trainer.experiment_name),
        "nodes": nodes,
        "gpus": f"#SBATCH --gpus-per-node={gpus}\n" if gpus else "",
        "signal_s": round(config.trainer.grace_s) + MARGIN_S,
        "folder": shlex.quote(str(folder)),
        "srun_gpus": f" --gpus-per-node={gpus}" if gpus else "",
        "others": nodes - 1,
        "ray": shlex.quote(str(python.parent / "ray")),
        "python": shlex.quote(str(python)),
        # The last word is the only one that the shell may expand.
        "words": shlex.join(job_words) + (f' "{ray}.address=$head:$port"' if nodes > 1 else ""),
        "preempted": Preempted.exit_code,
    }
    return (_HEAD + (_CLUSTER if nodes > 1 else "") + _RUN).format(**parts)


def _machines(plan: Plan) -> tuple[int, int]:
    """Return the number of machines, and of GPUs of each."""
    machine = plan.machine
    if machine.name:
        return machine.nodes, machine.num_gpus
    devices = max(pool.devices_per_node for pool in plan.pools) if machine.device == "cuda" else 0
    return sum(pool.nnodes for pool in plan.pools), devices


def main(words: Sequence[str]) -> int:
    def work() -> int:
        print(job_file(words, Path.cwd()), end="")
        return 0

    return exit_code_after(work)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
