"""An advantage estimator of one's own: how far a response is from the median of its group.

The median does not move with one extraordinary reward, as the mean of GRPO does. To train with it:

    python -m grpo_rl.main recipe=arithmetic/grpo algorithm.adv_estimator=examples/own_estimator.py:median
"""

from __future__ import annotations

import torch

from grpo_rl.algos.advantages.contract import token_rewards
from grpo_rl.algos.advantages.registered import ADVANTAGES, AdvantageInput, AdvantageOutput, needs
from grpo_rl.algos.segments import Segments


@needs("group")
def median(inp: AdvantageInput, *, scale: float = 1.0) -> AdvantageOutput:
    """Formula: A = scale (R - median(R of group))"""
    scores_N = inp.scores_N()
    advantages_N = torch.zeros_like(scores_N)
    for group in inp.group_N.unique():
        inside_N = inp.group_N == group
        # torch.median would take the lower of the two values in the middle.
        advantages_N[inside_N] = scale * (scores_N[inside_N] - scores_N[inside_N].quantile(0.5))
    return AdvantageOutput(Segments(inp.lengths_N).broadcast(advantages_N).float())


def main() -> None:
    rewards, lengths, group = torch.tensor([0.0, 0.0, 1.0, 9.0]), torch.tensor([1, 1, 1, 1]), torch.zeros(4, dtype=torch.long)
    given = AdvantageInput(token_rewards(rewards, lengths), lengths, group, rewards)
    print(f"rewards  {rewards.tolist()}")
    for name, estimator in {"median": median, "dr_grpo": ADVANTAGES.get("dr_grpo")}.items():
        print(f"{name:<8} {estimator(given).advantages_T.tolist()}")


if __name__ == "__main__":
    main()
