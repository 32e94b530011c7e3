"""Advantage estimators: rewards of a batch in, one advantage per trained token out.

An estimator takes an `AdvantageInput` and its own options as keywords with defaults, computes in float64,
and returns float32. Register one with `@ADVANTAGES.register("name")`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_rl.algos.segments import Segments
from grpo_rl.registry import Registry

AdvantageEstimator = Callable[..., Tensor]
"""(inp: AdvantageInput, *, <own options>) -> advantages_T"""

ADVANTAGES: Registry[AdvantageEstimator] = Registry("advantage estimator")


@dataclass(frozen=True, slots=True)
class AdvantageInput:
    """What estimators see of a batch. Groups may differ in size and be interleaved."""

    token_rewards_T: Tensor
    """The outcome at each response's last token, minus any KL penalty per token: see `token_rewards`."""
    lengths_N: Tensor
    group_N: Tensor
    """Equal numbers belong to one prompt."""
    rewards_N: Tensor
    """The outcomes once more: a response without a token has no place for its own in `token_rewards_T`."""

    def scores_N(self) -> Tensor:
        """Reward of each response in float64: the sum of its token rewards, or its outcome if it has no token."""
        segments = Segments(self.lengths_N)
        sums_N = segments.sum(self.token_rewards_T.double())
        return torch.where(segments.nonempty_N, sums_N, self.rewards_N.double())


def token_rewards(rewards_N: Tensor, lengths_N: Tensor, kl_T: Tensor | None = None, kl_coef: float = 0.0) -> Tensor:
    """Reward of every token, float32: r_t = outcome [t is the response's last token] - kl_coef * kl_t.

    InstructGPT (arXiv 2203.02155), section 3.5; Ziegler et al. (arXiv 1909.08593), section 2. Raises
    ValueError for an outcome that is not finite.
    """
    if not bool(torch.isfinite(rewards_N).all()):
        bad = (~torch.isfinite(rewards_N)).nonzero().flatten().tolist()
        raise ValueError(f"the rewards of rollouts {bad[:8]} are not finite ({rewards_N[bad[0]].item()}); a reward is a number")
    rewards_T = Segments(lengths_N).put_last(rewards_N.double())
    if kl_T is not None:
        rewards_T = rewards_T - kl_coef * kl_T.double()
    return rewards_T.float()


@ADVANTAGES.register("grpo")
def grpo(inp: AdvantageInput, *, norm_by_std: bool = True, epsilon: float = 1e-6) -> Tensor:
    """The group-normalised reward of the response, the same on all its tokens.

    Formula: A = (R - mean(R of group)) / (std(R of group) + epsilon)

    DeepSeekMath (arXiv 2402.03300), section 4.1.2. The standard deviation is the sample's (n - 1).
    `norm_by_std=False` leaves the division out: Dr. GRPO (arXiv 2503.20783), section 3.2. A group whose
    rewards are all equal, and so every group of one, gives exactly 0.
    """
    scores_N = inp.scores_N()
    deviation_N, std_N = _within_group(scores_N, inp.group_N)
    advantages_N = deviation_N / (std_N + epsilon) if norm_by_std else deviation_N
    return Segments(inp.lengths_N).broadcast(advantages_N.float())


def _within_group(scores_N: Tensor, group_N: Tensor) -> tuple[Tensor, Tensor]:
    """Deviation from the group's mean, and the group's sample standard deviation, both per rollout.

    Both are exactly 0 in a group of equal scores. The mean of equal numbers need not equal them in floating
    point, and such a residue divided by a standard deviation near 0 would be a signal out of nothing, so
    equality is tested on the scores themselves.
    """
    groups, index_N = torch.unique(group_N, return_inverse=True)
    zeros_G = scores_N.new_zeros(len(groups))
    count_G = zeros_G.index_add(0, index_N, torch.ones_like(scores_N))
    mean_G = zeros_G.index_add(0, index_N, scores_N) / count_G
    highest_G = zeros_G.scatter_reduce(0, index_N, scores_N, "amax", include_self=False)
    lowest_G = zeros_G.scatter_reduce(0, index_N, scores_N, "amin", include_self=False)

    deviation_N = torch.where((highest_G == lowest_G)[index_N], 0.0, scores_N - mean_G[index_N])
    variance_G = zeros_G.index_add(0, index_N, deviation_N.square()) / (count_G - 1).clamp(min=1)
    return deviation_N, variance_G.sqrt()[index_N]
