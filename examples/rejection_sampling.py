"""Rejection sampling and supervised fine-tuning as a loop: the policy learns its own right answers, each token with weight 1.

RAFT (arXiv 2304.06767) without its best-of-n. At a ratio of 1 the gradient of the loss with advantage 1 is that of -log π.

    python -m grpo_rl.main recipe=arithmetic/grpo trainer.schedule=examples/rejection_sampling.py:train
"""

import torch

from grpo_rl.trainer.session import Session

RIGHT = 1.0


def train(s: Session) -> None:
    for step in s.steps():
        s.sync_weights()
        rollouts = s.score(s.sample(s.next_prompts()))
        right = [rollout for rollout in rollouts if rollout.reward is not None and rollout.reward >= RIGHT]
        step.log({"rejection/kept_fraction": len(right) / len(rollouts)})
        if right:
            batch = s.advantages(s.logprobs(s.batch(right)))
            step.log(s.update(batch.replace(advantages_N=torch.ones(batch.num_rollouts), advantages_T=None)))
