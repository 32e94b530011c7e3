#!/usr/bin/env bash
# Submits a run to a Ray cluster: sends this folder along and starts the main command on the cluster.
#
#   scripts/submit.sh [--address URL] [--wait] key=value ...
#
#   --address URL   the cluster's job server, e.g. http://head-node:8265; default: $RAY_API_SERVER_ADDRESS,
#                   $RAY_ADDRESS, or http://127.0.0.1:8265
#   --wait          stay and show the output; default: print the job's name and return
#
# Environment variables that are set here and named in GRPO_RL_SEND_ENV (default: WANDB_API_KEY
# MLFLOW_TRACKING_URI HF_TOKEN HF_HUB_OFFLINE) are set for the job too. Paths in the overrides (data,
# model, trainer.default_local_dir) are read on the cluster: they must lie on storage that all its nodes see.
# A cluster with token login: RAY_AUTH_MODE=token and RAY_AUTH_TOKEN, as for every `ray` command.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

address=${RAY_API_SERVER_ADDRESS:-${RAY_ADDRESS:-http://127.0.0.1:8265}}
wait_flag=--no-wait
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
        -h | --help)
            sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
            exit 0
            ;;
        *) break ;;
    esac
done

if [[ " $*" != *" trainer.default_local_dir="* ]]; then
    echo "note: without trainer.default_local_dir=/shared/folder the results stay in the job's temporary folder on the cluster" >&2
fi

ray=.venv/bin/ray
if [[ ! -x $ray ]] && ! ray=$(command -v ray); then
    bash scripts/setup.sh
    ray=.venv/bin/ray
fi

# Written by Python, so that values with quotes or line breaks arrive as they are.
runtime_env=$("$(dirname "$ray")/python" - <<'PYTHON'
import json, os

names = os.environ.get("GRPO_RL_SEND_ENV", "WANDB_API_KEY MLFLOW_TRACKING_URI HF_TOKEN HF_HUB_OFFLINE").split()
left_out = [".git", ".venv", ".*_cache", "**/__pycache__", "runs", "outputs", "multirun", "build", "dist", "tests"]
print(json.dumps({
    "excludes": [f"/{name}" if "*" not in name else name for name in left_out],
    "env_vars": {name: os.environ[name] for name in names if name in os.environ},
}))
PYTHON
)

exec "$ray" job submit --address "$address" ${wait_flag:+"$wait_flag"} \
    --working-dir . --runtime-env-json "$runtime_env" \
    -- python -m grpo_rl.main "$@"
