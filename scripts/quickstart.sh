#!/usr/bin/env bash
# From nothing to a trained model: makes the environment, then trains the embedded model with GRPO.
#
#   scripts/quickstart.sh [key=value ...]     e.g. trainer.total_training_steps=20
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/setup.sh
exec .venv/bin/python -m grpo_rl.main recipe=arithmetic/grpo "$@"
