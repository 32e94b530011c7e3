"""A training that is started and read from Python, with the estimator, the loss, the reward and the task of this folder.

Takes a minute on two cores. Words after the file's name are settings, as on the command line.
"""

from __future__ import annotations

import sys
from pathlib import Path

import grpo_rl
import grpo_rl.errors

HERE = Path(__file__).resolve().parent


def train(*words: str) -> grpo_rl.Run:
    """Train the embedded model to give the larger of two numbers; `words` have the last say."""
    return grpo_rl.train([
        "recipe=arithmetic/grpo",
        f"data.train_files='task:{HERE}/own_task.py:larger?highest=60'",
        f"data.val_files='task:{HERE}/own_task.py:larger?highest=60&seed=1&num_rows=64'",
        f"reward.functions=['{HERE}/own_reward.py:terse']",
        f"algorithm.adv_estimator='{HERE}/own_estimator.py:median'",
        f"actor_rollout_ref.actor.policy_loss.loss_mode='{HERE}/own_loss.py:fading'",
        "data.train_batch_size=32",
        "actor_rollout_ref.actor.ppo_mini_batch_size=32",
        "actor_rollout_ref.actor.optim.lr=2e-4",
        "trainer.total_training_steps=15",
        "trainer.experiment_name=from-python",
        *words,
    ])  # fmt: skip


def main() -> None:
    try:
        run = train(*sys.argv[1:])
    except grpo_rl.errors.GrpoRlError as error:
        print(f"the training ended with {type(error).__name__}: {error}", *getattr(error, "__notes__", []), sep="\n  ")
        raise SystemExit(error.exit_code) from None
    print(run)
    print(run.metrics("reward/mean", "reward/terse/needless", "response_length/mean").dropna().round(3).tail(3))
    print(f"model: {run.model}")


if __name__ == "__main__":
    main()
