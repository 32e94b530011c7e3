"""Policy losses: one loss per trained token. Averaging stays apart, in `aggregate.py`.

A loss takes (policy_logprobs_T, old_logprobs_T, advantages_T, segments) and the clip bounds as keywords, and
returns the loss per token, with gradient, and detached statistics per token. A statistic whose name ends in
`_max` is reported as the largest value, all others as the mean over trained tokens. Losses compute in
float64, because log-probs of -30 and more leave a float32 ratio few digits, and return it. Register one with
`@POLICY_LOSSES.register("name")`.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from grpo_rl.algos.segments import Segments
from grpo_rl.registry import Registry

MAX_LOG_RATIO = 20.0
"""Log-ratios are cut to +-20 before exp, as in verl: e^20 is far beyond every clip range and far from overflow."""

MAX_SEQUENCE_LOG_RATIO = 10.0
"""A response's mean log-ratio is cut above at this, as in verl."""


class PolicyLoss(Protocol):
    """How a policy loss is called."""

    def __call__(
        self,
        policy_logprobs_T: Tensor,
        old_logprobs_T: Tensor,
        advantages_T: Tensor,
        segments: Segments,
        *,
        clip_low: float,
        clip_high: float,
        clip_c: float,
    ) -> tuple[Tensor, dict[str, Tensor]]: ...


POLICY_LOSSES: Registry[PolicyLoss] = Registry("policy loss")


@POLICY_LOSSES.register("vanilla")
def vanilla(
    policy_logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    segments: Segments,
    *,
    clip_low: float,
    clip_high: float,
    clip_c: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped loss per token, with separate bounds and dual clip.

    Formula: max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), at most -clip_c A where A < 0;
    r = π / π_old

    PPO (arXiv 1707.06347), eq. 7; GRPO (arXiv 2402.03300), eq. 3; separate bounds: DAPO (arXiv 2503.14476),
    section 3.1; dual clip: Ye et al. (arXiv 1912.09729), "Dual-clip PPO". `pg_clipfrac` counts the tokens where the clip
    decides, `pg_clipfrac_lower` those where the dual clip does, `ppo_kl` is log π_old - log π.
    """
    log_ratio_T = _log_ratio(policy_logprobs_T, old_logprobs_T)
    loss_T, stats = _clipped(log_ratio_T, advantages_T, clip_low, clip_high)
    negative_T, bound_T = advantages_T < 0, -clip_c * advantages_T.double()
    stats["pg_clipfrac_lower"] = (negative_T & (loss_T > bound_T)).detach().double()
    return torch.where(negative_T, torch.minimum(loss_T, bound_T), loss_T), stats


@POLICY_LOSSES.register("reinforce")
def reinforce(
    policy_logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    segments: Segments,
    *,
    clip_low: float,
    clip_high: float,
    clip_c: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The score-function loss per token. With A = 1 it is supervised cross-entropy.

    Formula: -A log π

    Williams (1992), "Simple statistical gradient-following algorithms". It has no ratio, so nothing is clipped.
    """
    loss_T = -advantages_T.double() * policy_logprobs_T.double()
    return loss_T, {"ppo_kl": -_log_ratio(policy_logprobs_T, old_logprobs_T).detach()}


@POLICY_LOSSES.register("gspo")
def gspo(
    policy_logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    segments: Segments,
    *,
    clip_low: float,
    clip_high: float,
    clip_c: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """GSPO's clipped loss: the sequence's ratio, clipped as a whole, on each of its tokens.

    Formula: max(-A s, -A clip(s, 1 - clip_low, 1 + clip_high));
    s = exp(mean over the response of log π / π_old)

    GSPO (arXiv 2507.18071), section 4.1. Its clip range is far smaller than PPO's (3e-4 and 4e-4). The mean
    log-ratio is cut at 10, as in verl; there is no dual clip.
    """
    log_ratio_N = _mean_log_ratio(policy_logprobs_T, old_logprobs_T, segments)
    return _clipped(segments.broadcast(log_ratio_N), advantages_T, clip_low, clip_high)


@POLICY_LOSSES.register("gspo_token")
def gspo_token(
    policy_logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    segments: Segments,
    *,
    clip_low: float,
    clip_high: float,
    clip_c: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """GSPO's loss with a gradient through each token alone, for advantages that differ within a response.

    Formula: max(-A s, -A clip(s, 1 - clip_low, 1 + clip_high));
    s = sg(exp(mean over the response of log π / π_old)) π / sg(π)

    GSPO-token (arXiv 2507.18071), section 4.3; sg stops the gradient. Where a response's tokens share one
    advantage and one weight, value and gradient are those of `gspo`.
    """
    log_ratio_N = _mean_log_ratio(policy_logprobs_T, old_logprobs_T, segments)
    through_T = policy_logprobs_T.double() - policy_logprobs_T.detach().double()
    log_ratio_T = (segments.broadcast(log_ratio_N.detach()) + through_T).clamp(max=MAX_SEQUENCE_LOG_RATIO)
    return _clipped(log_ratio_T, advantages_T, clip_low, clip_high)


@POLICY_LOSSES.register("cispo")
def cispo(
    policy_logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    segments: Segments,
    *,
    clip_low: float,
    clip_high: float,
    clip_c: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """REINFORCE weighted by the clipped ratio as a constant: no token loses its gradient.

    Formula: -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log π; r = π / π_old

    CISPO: MiniMax-M1 (arXiv 2506.13585), section 3.1; sg stops the gradient. The upper bound is 1 + clip_high,
    as in verl; TRL takes it as the bound itself.
    """
    log_ratio_T = _log_ratio(policy_logprobs_T, old_logprobs_T).detach()
    ratio_T = log_ratio_T.exp()
    weight_T = ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss_T = -weight_T * advantages_T.double() * policy_logprobs_T.double()
    return loss_T, {
        "pg_clipfrac": (weight_T != ratio_T).double(),
        "ppo_kl": -log_ratio_T,
        "ratio_max": ratio_T,
    }


@POLICY_LOSSES.register("sapo")
def sapo(
    policy_logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    segments: Segments,
    *,
    clip_low: float,
    clip_high: float,
    clip_c: float,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> tuple[Tensor, dict[str, Tensor]]:
    """A soft gate in place of the clip: the gradient fades as the ratio leaves 1.

    Formula: -A sigmoid(τ (r - 1)) 4/τ; r = π / π_old; τ = 1 where A > 0, else 1.05

    SAPO (arXiv 2511.20347). The clip bounds have no part in it.
    """
    advantages_T = advantages_T.double()
    log_ratio_T = _log_ratio(policy_logprobs_T, old_logprobs_T)
    ratio_T = log_ratio_T.exp()
    temperature_T = torch.where(advantages_T > 0, tau_pos, tau_neg).double()
    loss_T = -advantages_T * torch.sigmoid(temperature_T * (ratio_T - 1.0)) * 4.0 / temperature_T
    return loss_T, {"ppo_kl": -log_ratio_T.detach(), "ratio_max": ratio_T.detach()}


@POLICY_LOSSES.register("geo_mean")
def geo_mean(
    policy_logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    segments: Segments,
    *,
    clip_low: float,
    clip_high: float,
    clip_c: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """GMPO's loss: the geometric mean of the clipped ratios of a response, on each of its tokens.

    Formula: -mean(A) exp(mean over the response of l);
    l = min(log r, clip_high) where A > 0, max(log r, -clip_low) where A < 0; r = π / π_old

    GMPO (arXiv 2507.20673), section 3. The bounds hold for the log-ratio.
    """
    advantages_T = advantages_T.double()
    log_ratio_T = _log_ratio(policy_logprobs_T, old_logprobs_T)
    # Only the side on which a larger step would still pay is bounded, as in PPO's pessimistic minimum.
    upper_T = torch.where(advantages_T > 0, clip_high, torch.inf)
    lower_T = torch.where(advantages_T < 0, -clip_low, -torch.inf)
    bounded_T = torch.minimum(torch.maximum(log_ratio_T, lower_T), upper_T)
    ratio_N = segments.mean(bounded_T).exp()
    loss_T = segments.broadcast(-segments.mean(advantages_T) * ratio_N)
    return loss_T, {
        "pg_clipfrac": (bounded_T != log_ratio_T).detach().double(),
        "ppo_kl": -log_ratio_T.detach(),
        "ratio_max": segments.broadcast(ratio_N).detach(),
    }


def _mean_log_ratio(policy_logprobs_T: Tensor, old_logprobs_T: Tensor, segments: Segments) -> Tensor:
    """Mean log-ratio of each response, cut above."""
    return segments.mean(policy_logprobs_T.double() - old_logprobs_T.double()).clamp(max=MAX_SEQUENCE_LOG_RATIO)


def _clipped(log_ratio_T: Tensor, advantages_T: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's pessimistic clipped loss and its statistics."""
    advantages_T = advantages_T.double()
    ratio_T = log_ratio_T.exp()
    plain_T = -advantages_T * ratio_T
    clipped_T = -advantages_T * ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high)
    return torch.maximum(plain_T, clipped_T), {
        "pg_clipfrac": (clipped_T > plain_T).detach().double(),
        "ppo_kl": -log_ratio_T.detach(),
        "ratio_max": ratio_T.detach(),
    }


def _log_ratio(policy_logprobs_T: Tensor, old_logprobs_T: Tensor) -> Tensor:
    return (policy_logprobs_T.double() - old_logprobs_T.double()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
