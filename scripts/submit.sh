#!/usr/bin/env bash
# Submits a run to a Ray cluster: sends this folder along and starts the main command on the cluster.
#
#   scripts/submit.sh [--address URL] [--wait] [--python PATH] [--seeds 1,2,3] key=value ...
#
#   --address URL   the cluster's job server, e.g. http://head-node:8265; default: $RAY_API_SERVER_ADDRESS,
#                   $RAY_ADDRESS, or http://127.0.0.1:8265
#   --wait          stay and show the output; default: print the job's name and return
#   --python PATH   the Python that has Ray on the cluster's head; default: the one of this folder's environment, if the head
#                   has it at the same path, and else its python3
#   --seeds 1,2,3   a job for each seed (seed=N), named NAME/seed=N after trainer.experiment_name=NAME; the cluster runs as
#                   many at once as it has room for. The table of all, when they are done:
#                   python -m grpo_rl.sweep.outcome FOLDER/NAME. With --multirun among the words one job runs them in turns.
#   --dry-run       print the commands and submit nothing
#   --slurm         print a job file for Slurm instead: its nodes and GPUs are those of the plan, for `machine=4x8xH100-80GB` among the
#                   words or as trainer.nnodes says; the run saves before its time is over, and the job goes on in its next turn
#
# Environment variables that are set here and named in GRPO_RL_SEND_ENV (default: WANDB_API_KEY
# MLFLOW_TRACKING_URI HF_TOKEN HF_HUB_OFFLINE) are set for the job too. Paths in the overrides (data,
# model, trainer.default_local_dir) are read on the cluster: they must lie on storage that all its nodes see.
# A cluster with token login: RAY_AUTH_MODE=token and RAY_AUTH_TOKEN, as for every `ray` command.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

address=${RAY_API_SERVER_ADDRESS:-${RAY_ADDRESS:-http://127.0.0.1:8265}}
wait_flag=--no-wait
python=
seeds=()
dry_run=
slurm=
while [[ $# -gt 0 ]]; do
    case $1 in
        --address)
            address=${2:?--address needs a URL}
            shift 2
            ;;
        --wait)
            wait_flag=
            shift
            ;;
        --python)
            python=${2:?--python needs a path}
            shift 2
            ;;
        --seeds)
            IFS=, read -r -a seeds <<<"${2:?--seeds needs a list, such as 1,2,3}"
            for seed in "${seeds[@]}"; do
                [[ $seed =~ ^(0|[1-9][0-9]*)$ ]] || { echo "--seeds $2: '$seed' is not a seed; write 1,2,3" >&2; exit 2; }
            done
            shift 2
            ;;
        --dry-run)
            dry_run=1
            shift
            ;;
        --slurm)
            slurm=1
            shift
            ;;
        -h | --help)
            sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
            exit 0
            ;;
        *) break ;;
    esac
done

if [[ -n $slurm ]]; then
    if [[ ! -x .venv/bin/python ]]; then bash scripts/setup.sh cluster >&2; fi
    exec .venv/bin/python -m grpo_rl.commands.slurm "$@"
fi

if [[ " $*" != *" trainer.default_local_dir="* ]]; then
    echo "note: without trainer.default_local_dir=/shared/folder the results stay in the job's temporary folder on the cluster" >&2
fi

ray=.venv/bin/ray
if [[ ! -x $ray ]] && ! ray=$(command -v ray); then
    bash scripts/setup.sh
    ray=.venv/bin/ray
fi

# The file has values of GRPO_RL_SEND_ENV, so that it is this user's alone, and goes at the end; other users see command lines.
# Written by Python, so that values with quotes or line breaks arrive as they are. It asks for the job server first: Ray answers
# one that is not there with forty lines. Ray puts the head's own PATH in the place of ${PATH}; it kills a job that it stops after
# three seconds, if not told otherwise, and a run ends by itself within trainer.grace_s.
secrets=$(umask 077 && mktemp)
trap 'rm -f "$secrets"' EXIT
ADDRESS=$address DRY_RUN=$dry_run BIN=$(realpath -s "$(dirname "$ray")") "$(dirname "$ray")/python" - >"$secrets" <<'PYTHON'
import http.client, json, os, sys, urllib.error, urllib.request

address = os.environ["ADDRESS"]
if address.startswith("http") and not os.environ["DRY_RUN"]:
    try:
        urllib.request.urlopen(f"{address}/api/version", timeout=10).close()
    except urllib.error.HTTPError:
        pass  # it answers, and wants a token
    except (OSError, ValueError, http.client.HTTPException) as error:
        print(
            f"no job server at {address} ({getattr(error, 'reason', error)}). A head has one where Ray is installed with it "
            "(bash scripts/setup.sh cluster) and started for others to reach: .venv/bin/ray start --head --dashboard-host=0.0.0.0",
            file=sys.stderr,
        )
        sys.exit(6)

names = os.environ.get("GRPO_RL_SEND_ENV", "WANDB_API_KEY MLFLOW_TRACKING_URI HF_TOKEN HF_HUB_OFFLINE").split()
left_out = [".git", ".venv", ".*_cache", "**/__pycache__", "runs", "outputs", "multirun", "build", "dist", "tests"]
print(json.dumps({
    "excludes": [f"/{name}" if "*" not in name else name for name in left_out],
    "env_vars": {name: os.environ[name] for name in names if name in os.environ}
    | {"PATH": os.environ["BIN"] + ":${PATH}", "RAY_JOB_STOP_WAIT_TIME_S": "90"},
}))
PYTHON

# submit WORD...: one job.
submit() {
    local command=("$ray" job submit --address "$address" ${wait_flag:+"$wait_flag"}
        --working-dir . --runtime-env "$secrets" -- "${python:-python3}" -m grpo_rl.main "$@")
    if [[ -n $dry_run ]]; then printf '%q ' "${command[@]}" && echo; else "${command[@]}"; fi
}

if ((${#seeds[@]} == 0)); then
    submit "$@"
    exit
fi

name=
words=()
for word in "$@"; do
    if [[ $word == trainer.experiment_name=* ]]; then name=${word#*=}; else words+=("$word"); fi
done
if [[ -z $name ]]; then
    echo "--seeds needs trainer.experiment_name=NAME: the runs are NAME/seed=1 and so on" >&2
    exit 2
fi
# Quoted for Hydra's grammar, in which a bare = would begin another value.
for seed in "${seeds[@]}"; do submit "${words[@]}" "seed=$seed" "trainer.experiment_name='$name/seed=$seed'"; done
