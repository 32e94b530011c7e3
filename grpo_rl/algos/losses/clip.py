"""Losses that clip the ratio, per token or per response."""

from __future__ import annotations

import torch

from grpo_rl.algos.losses.contract import POLICY_LOSSES, LossInput, TokenLoss, by_advantage, clipped
from grpo_rl.config.schema.kinds import Ratio, RatioAboveOne


@POLICY_LOSSES.register("vanilla")
@by_advantage
def vanilla(inputs: LossInput, *, clip_low: Ratio = 0.2, clip_high: Ratio = 0.2, clip_c: RatioAboveOne = 3.0) -> TokenLoss:
    """PPO's clipped loss per token, with separate bounds and dual clip.

    Formula: max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), at most -clip_c A where A < 0;
    r = π / π_old

    Gradient: r A, but 0 where A > 0 and r > 1 + clip_high, or A < 0 and r < 1 - clip_low or r > clip_c

    PPO (arXiv 1707.06347), eq. 7; GRPO (arXiv 2402.03300), eq. 3; separate bounds: DAPO (arXiv 2503.14476),
    section 3.1; dual clip: Ye et al. (arXiv 1912.09729). `pg_clipfrac` counts the tokens where the clip
    decides, `pg_clipfrac_lower` those where the dual clip does, `ppo_kl` is log π_old - log π.
    """
    loss_T, stats = clipped(inputs.log_ratio_T(), inputs.advantages_T, clip_low, clip_high)
    negative_T, bound_T = inputs.advantages_T < 0, -clip_c * inputs.advantages_T.double()
    stats["pg_clipfrac_lower"] = (negative_T & (loss_T > bound_T)).detach().double()
    return TokenLoss(torch.where(negative_T, torch.minimum(loss_T, bound_T), loss_T), stats)


@POLICY_LOSSES.register("gspo")
@by_advantage
def gspo(inputs: LossInput, *, clip_low: Ratio = 0.2, clip_high: Ratio = 0.2) -> TokenLoss:
    """GSPO's clipped loss: the sequence's ratio, clipped as a whole, on each of its tokens.

    Formula: max(-A s, -A clip(s, 1 - clip_low, 1 + clip_high));
    s = exp(mean over the response of log π / π_old)

    Gradient: s mean(A), over the response's tokens but those with A > 0 and s > 1 + clip_high, or A < 0 and s < 1 - clip_low

    GSPO (arXiv 2507.18071), section 4.1, with clip ranges of 3e-4 and 4e-4. The mean log-ratio is cut at 10,
    as in verl; there is no dual clip.
    """
    log_ratio_T = inputs.segments.broadcast(inputs.mean_log_ratio_N())
    return TokenLoss(*clipped(log_ratio_T, inputs.advantages_T, clip_low, clip_high))


@POLICY_LOSSES.register("geo_mean")
@by_advantage
def geo_mean(inputs: LossInput, *, clip_low: Ratio = 0.2, clip_high: Ratio = 0.2) -> TokenLoss:
    """GMPO's loss: the geometric mean of the clipped ratios of a response, on each of its tokens.

    Formula: -mean(A) exp(mean over the response of l);
    l = min(log r, clip_high) where A > 0, max(log r, -clip_low) where A < 0; r = π / π_old

    Gradient: mean(A) exp(mean over the response of l), but 0 where l is a bound

    GMPO (arXiv 2507.20673), section 3. The bounds hold for the log-ratio.
    """
    advantages_T, segments = inputs.advantages_T.double(), inputs.segments
    log_ratio_T = inputs.log_ratio_T()
    # Only the side on which a larger step would still pay is bounded, as in PPO's pessimistic minimum.
    # Filled as float64: torch.where of two Python numbers would round the bounds to float32.
    upper_T = torch.full_like(advantages_T, torch.inf).masked_fill(advantages_T > 0, clip_high)
    lower_T = torch.full_like(advantages_T, -torch.inf).masked_fill(advantages_T < 0, -clip_low)
    bounded_T = torch.minimum(torch.maximum(log_ratio_T, lower_T), upper_T)
    ratio_N = segments.mean(bounded_T).exp()
    loss_T = segments.broadcast(-segments.mean(advantages_T) * ratio_N)
    stats = {
        "pg_clipfrac": (bounded_T != log_ratio_T).detach().double(),
        "ppo_kl": -log_ratio_T.detach(),
        "ratio_max": segments.broadcast(ratio_N).detach(),
    }
    return TokenLoss(loss_T, stats)
