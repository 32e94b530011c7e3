"""A policy loss of one's own: instead of cutting the gradient off at the clip range, let it fade.

To train with it, and with another value for its option:

    python -m grpo_rl.main recipe=arithmetic/grpo \
        actor_rollout_ref.actor.policy_loss.loss_mode=examples/own_loss.py:fading \
        actor_rollout_ref.actor.policy_loss.options.width=0.5
"""

from __future__ import annotations

import torch

from grpo_rl.algos.losses.registered import LossInput, TokenLoss
from grpo_rl.algos.segments import Segments


def fading(inputs: LossInput, *, width: float = 0.3) -> TokenLoss:
    """Formula: -A width tanh((r - 1) / width); r = π / π_old"""
    ratio_T = inputs.log_ratio_T().exp()
    loss_T = -inputs.advantages_T * width * torch.tanh((ratio_T - 1.0) / width)
    return TokenLoss(loss_T, {"ratio_max": ratio_T.detach()})


def main() -> None:
    moved = torch.tensor([0.0, 0.2, 0.5, 1.0])
    logprobs = moved.clone().requires_grad_()
    inputs = LossInput(logprobs, torch.ones(4), Segments(torch.tensor([4])), old_logprobs_T=torch.zeros(4))
    loss = fading(inputs)
    (gradient,) = torch.autograd.grad(loss.loss_T.sum(), logprobs)
    print("ratio r   gradient of a token with advantage 1")
    for ratio, value in zip(moved.exp().tolist(), gradient.tolist(), strict=True):
        print(f"{ratio:7.3f}   {value:7.3f}")


if __name__ == "__main__":
    main()
