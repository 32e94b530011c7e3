"""Losses that hold back the few tokens whose update would cost the most entropy.

To first order a step lowers the policy's entropy by the covariance of log-probability and advantage (Cui et
al., arXiv 2505.22617). It is taken once over the whole mini-batch, with π_old in place of π, so that the loss
does not depend on micro-batches; in the first update π_old is π, as in the paper.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_rl.algos.losses.contract import POLICY_LOSSES, LossInput, TokenLoss, by_advantage, clipped, selected_by
from grpo_rl.config.schema.kinds import Coefficient, Factor, Fraction, Ratio


def covariances(advantages_T: Tensor, old_logprobs_T: Tensor) -> Tensor:
    """Return each token's share (A - mean A) (log π_old - mean log π_old) of the covariance, in float64."""
    advantages_T, old_logprobs_T = advantages_T.double(), old_logprobs_T.double()
    if not len(advantages_T):
        return advantages_T
    return (advantages_T - advantages_T.mean()) * (old_logprobs_T - old_logprobs_T.mean())


def between_bounds(
    advantages_T: Tensor,
    old_logprobs_T: Tensor,
    generator: torch.Generator,
    *,
    clip_cov_ratio: Fraction = 0.0002,
    clip_cov_lb: Factor = 1.0,
    clip_cov_ub: Factor = 5.0,
) -> Tensor:
    """A random choice: `clip_cov_ratio` of all, at least one. Raises ValueError if none is between."""
    if clip_cov_lb >= clip_cov_ub:
        raise ValueError(f"clip_cov_lb={clip_cov_lb:g} must be below clip_cov_ub={clip_cov_ub:g}")
    covariance_T = covariances(advantages_T, old_logprobs_T)
    candidates = ((covariance_T > clip_cov_lb) & (covariance_T < clip_cov_ub)).nonzero().flatten()
    number = max(1, int(clip_cov_ratio * len(covariance_T)))
    chosen = candidates[torch.randperm(len(candidates), generator=generator)[:number]]
    return torch.zeros(len(covariance_T), dtype=torch.bool).index_fill(0, chosen, True)


def largest(
    advantages_T: Tensor, old_logprobs_T: Tensor, generator: torch.Generator, *, kl_cov_ratio: Fraction = 0.0002
) -> Tensor:
    """The tokens with the largest positive covariance: `kl_cov_ratio` of all, at least one, and ties."""
    covariance_T = covariances(advantages_T, old_logprobs_T)
    if not len(covariance_T):
        return torch.zeros(0, dtype=torch.bool)
    number = min(len(covariance_T), max(1, int(kl_cov_ratio * len(covariance_T))))
    least = torch.topk(covariance_T, number).values[-1]
    return (covariance_T >= least) & (covariance_T > 0)


@POLICY_LOSSES.register("clip_cov")
@selected_by(between_bounds)
@by_advantage
def clip_cov(inputs: LossInput, *, clip_low: Ratio = 0.2, clip_high: Ratio = 0.2) -> TokenLoss:
    """PPO's clipped loss, without the chosen tokens.

    Formula: max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), but 0 on a few random tokens with
    clip_cov_lb < (A - mean A) (log π_old - mean log π_old) < clip_cov_ub; r = π / π_old

    Gradient: r A, but 0 on the tokens left out, and where A > 0 and r > 1 + clip_high, or A < 0 and r < 1 - clip_low

    Clip-Cov (arXiv 2505.22617), section 4.2. There is no dual clip.
    """
    selected_T = inputs.column("selected_T")
    loss_T, stats = clipped(inputs.log_ratio_T(), inputs.advantages_T, clip_low, clip_high)
    return TokenLoss(torch.where(selected_T, 0.0, loss_T), {**stats, "cov_selected": selected_T.double()})


@POLICY_LOSSES.register("kl_cov")
@selected_by(largest)
def kl_cov(inputs: LossInput, *, ppo_kl_coef: Coefficient = 0.1) -> TokenLoss:
    """The unclipped surrogate, with a penalty on moving the chosen tokens.

    Formula: -A r, and + ppo_kl_coef |log π - log π_old| on the tokens of largest (A - mean A) (log π_old - mean log π_old);
    r = π / π_old

    Gradient: r A, and - ppo_kl_coef sign(log π - log π_old) on those tokens

    KL-Cov (arXiv 2505.22617), section 4.2. There are no clip bounds.
    """
    selected_T, log_ratio_T = inputs.column("selected_T"), inputs.log_ratio_T()
    ratio_T = log_ratio_T.exp()
    penalty_T = torch.where(selected_T, ppo_kl_coef * log_ratio_T.abs(), 0.0)
    stats = {"cov_selected": selected_T.double(), "ppo_kl": -log_ratio_T.detach(), "ratio_max": ratio_T.detach()}
    return TokenLoss(-inputs.advantages_T.double() * ratio_T + penalty_T, stats)
