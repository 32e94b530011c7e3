"""What a run has measured and sampled, as pandas frames: python examples/read_a_run.py runs/grpo_rl/my_run"""

from __future__ import annotations

import sys

import grpo_rl


def main() -> None:
    run = grpo_rl.Run(sys.argv[1])
    print(run)
    print(f"learning rate {run.setting('actor_rollout_ref.actor.optim.lr')}, checkpoints at {list(run.checkpoints)}")

    metrics = run.metrics("reward/mean", "response_length/mean", "timing_s/step").dropna()
    print(f"\nthe last steps\n{metrics.tail(3).round(3)}")

    rollouts = run.rollouts()  # of the last logged step; each row is a response
    groups = rollouts.groupby("uid")["reward"].agg(["mean", "max", "size"])
    learnable = groups[(groups["mean"] > rollouts["reward"].min()) & (groups["mean"] < groups["max"])]
    print(f"\nin step {run.rollout_steps()[-1]}, {len(learnable)} of {len(groups)} prompts had better and worse responses")
    worst = rollouts.loc[rollouts["reward"].idxmin()]
    print(f"a response with the lowest reward ({worst['reward']:g}): {worst['prompt']!r} -> {worst['response']!r}")


if __name__ == "__main__":
    main()
