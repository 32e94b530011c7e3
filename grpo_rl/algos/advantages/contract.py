"""The interface of advantage estimators."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from grpo_rl.algos.advantages import blockwise
from grpo_rl.algos.segments import Segments
from grpo_rl.frozen import frozen
from grpo_rl.registry import Registry


@frozen
class AdvantageInput:
    """Optional columns are there if declared (`NEEDS`). K counts all rollouts' steps, P a reward's parts."""

    of_tokens_T: Tensor | None  # the reward of every token, if it does not follow from the outcomes: see `token_rewards_T`
    lengths_N: Tensor
    group_N: Tensor
    rewards_N: Tensor  # the outcomes, also of empty responses
    values_T: Tensor | None = None
    baselines_N: Tensor | None = None
    step_ends_K: Tensor | None = None  # position on the token axis of each reasoning step's last token, in any order
    step_rewards_K: Tensor | None = None
    step_states_K: Tensor | None = None  # equal numbers within a group are one state, in which steps begin
    reward_parts_NP: Tensor | None = None

    @property
    def token_rewards_T(self) -> Tensor:
        """Float32: the outcome at each last token, minus any KL penalty. Made only if read."""
        return token_rewards(self.rewards_N, self.lengths_N) if self.of_tokens_T is None else self.of_tokens_T

    def scores_N(self) -> Tensor:
        """Float64: the sum of a response's token rewards, or its outcome if it has no token."""
        if self.of_tokens_T is None:  # a sum of zeros and of the outcome in float32
            return torch.where(self.lengths_N > 0, self.rewards_N.float().double(), self.rewards_N.double())
        sums_N = Segments(self.lengths_N).sum(self.of_tokens_T.double())
        return torch.where(self.lengths_N > 0, sums_N, self.rewards_N.double())

    def column(self, name: str) -> Tensor:
        value = getattr(self, name)
        assert value is not None, f"there is no {name}: the estimator needs it, and has to declare that with @needs"
        return value


@frozen
class AdvantageOutput:
    advantages_T: Tensor
    returns_T: Tensor | None = None  # the targets of a critic, if rewards are discounted token by token


@frozen
class RolloutAdvantages:
    """All tokens of a response have the same advantage."""

    advantages_N: Tensor
    lengths_N: Tensor
    returns_T: ClassVar[None] = None

    @property
    def advantages_T(self) -> Tensor:
        return blockwise.spread(self.advantages_N, self.lengths_N)


AdvantageEstimator = Callable[..., AdvantageOutput | RolloutAdvantages]
"""(inp: AdvantageInput, *, <own options with defaults>) -> AdvantageOutput, or RolloutAdvantages"""

NEEDS: dict[str, tuple[str, ...]] = {
    "group": ("group_N",),
    "values": ("values_T",),
    "baselines": ("baselines_N",),
    "steps": ("step_ends_K", "step_rewards_K"),
    "states": ("step_states_K",),
    "parts": ("reward_parts_NP",),
}
"""What an estimator can need (`@needs`), with the columns that it reads then: several responses per prompt, a critic, greedy
responses, a reward that scores steps, episodes whose turns are the steps and have states, a reward in parts."""

ADVANTAGES: Registry[AdvantageEstimator] = Registry(
    "advantage estimator", "estimator(inp: AdvantageInput, *, option=default, ...) -> AdvantageOutput"
)


def reads_token_rewards(needs: frozenset[str]) -> bool:
    return not needs & {"steps", "parts"}


def token_rewards(rewards_N: Tensor, lengths_N: Tensor, kl_T: Tensor | None = None, kl_coef: float = 0.0) -> Tensor:
    """Return the float32 reward of every token: r_t = outcome [t is the response's last token] - kl_coef *
    kl_t.

    InstructGPT (arXiv 2203.02155), section 3.5; Ziegler et al. (arXiv 1909.08593), section 2. Raises
    ValueError for an outcome that is not finite.
    """
    check_rewards(rewards_N)
    rewards_T = torch.zeros(int(lengths_N.sum())) if kl_T is None else -kl_coef * kl_T.double()
    filled_N = lengths_N > 0
    rewards_T[lengths_N.cumsum(0)[filled_N] - 1] += rewards_N[filled_N].to(rewards_T.dtype)
    return rewards_T.float()


def check_rewards(rewards_N: Tensor) -> None:
    if bad := (~torch.isfinite(rewards_N)).nonzero().flatten().tolist():
        raise ValueError(f"the rewards of rollouts {bad[:8]} are not finite ({rewards_N[bad[0]].item()}); a reward is a number")
