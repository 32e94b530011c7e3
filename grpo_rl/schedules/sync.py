"""`sync`: every rollout is sampled by the policy that it then trains."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from grpo_rl.trainer.session import Session


def train(s: Session) -> None:
    """GRPO (DeepSeekMath, arXiv 2402.03300, Algorithm 1) and its kin.

    With a critic it is PPO (arXiv 1707.06347, Algorithm 1), with `filter_groups` DAPO (arXiv 2503.14476, Algorithm 1), and
    with a loss over pairs online DPO (arXiv 2402.04792): the best and the worst response of each group.
    """
    for step in s.steps():
        s.sync_weights()
        rollouts = s.score(s.sample(s.next_prompts()))
        if trained := s.select(rollouts):
            batch = s.values(s.logprobs(s.batch(trained)))
            step.log(s.update(s.advantages(batch)))
