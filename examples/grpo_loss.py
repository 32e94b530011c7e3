"""The GRPO loss in five lines, compared with the one that the program trains with.

One prompt, four responses of two tokens. The loss is DeepSeekMath's (arXiv 2402.03300, equation 3) with one update per
batch: the clipped ratio times the advantage, averaged over the tokens of all responses, without the KL term.
"""

from __future__ import annotations

import torch

from grpo_rl.algos.advantages.contract import AdvantageInput, token_rewards
from grpo_rl.algos.advantages.registered import ADVANTAGES
from grpo_rl.algos.losses.registered import POLICY_LOSSES, LossInput
from grpo_rl.algos.segments import Segments


def grpo_loss(logp: torch.Tensor, old_logp: torch.Tensor, rewards: torch.Tensor, clip: float = 0.2) -> torch.Tensor:
    """Return the loss of one group; log-probs are [responses, tokens], rewards are [responses]."""
    advantage = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    ratio = torch.exp(logp - old_logp)
    unclipped = ratio * advantage[:, None]
    clipped = ratio.clamp(1 - clip, 1 + clip) * advantage[:, None]
    return -torch.minimum(unclipped, clipped).mean()


def program_loss(logp: torch.Tensor, old_logp: torch.Tensor, rewards: torch.Tensor) -> torch.Tensor:
    """Return the same by the program's parts: estimator `grpo`, loss `vanilla`, average `token-mean`."""
    responses, tokens = logp.shape
    lengths, group = torch.full((responses,), tokens), torch.zeros(responses, dtype=torch.long)
    given = AdvantageInput(token_rewards(rewards, lengths), lengths, group, rewards)
    advantages = ADVANTAGES.get("grpo")(given).advantages_T
    inputs = LossInput(logp.flatten(), advantages, Segments(lengths), old_logprobs_T=old_logp.flatten())
    return POLICY_LOSSES.get("vanilla")(inputs).loss_T.mean()


def main() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0])
    old_logp = torch.tensor([[-0.1, -0.5], [-0.7, -0.2], [-1.0, -0.4], [-0.3, -0.9]])
    # The policy has moved since the responses were sampled, some tokens so far that they are clipped.
    logp = (old_logp + torch.tensor([[0.1, -0.3], [0.4, 0.0], [-0.1, 0.2], [0.5, -0.05]])).requires_grad_()
    loss = grpo_loss(logp, old_logp, rewards)
    (gradient,) = torch.autograd.grad(loss, logp)
    print(f"five lines   {loss.item():.6f}")
    print(f"the program  {program_loss(logp, old_logp, rewards).item():.6f}")
    print(f"gradient per token (0: clipped)\n{gradient.numpy().round(3)}")


if __name__ == "__main__":
    main()
