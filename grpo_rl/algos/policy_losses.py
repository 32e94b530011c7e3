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
    advantages_T = advantages_T.double()
    log_ratio_T = _log_ratio(policy_logprobs_T, old_logprobs_T)
    ratio_T = log_ratio_T.exp()

    plain_T = -advantages_T * ratio_T
    clipped_T = -advantages_T * ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high)
    pessimistic_T = torch.maximum(plain_T, clipped_T)
    bound_T = -advantages_T * clip_c
    negative_T = advantages_T < 0
    loss_T = torch.where(negative_T, torch.minimum(pessimistic_T, bound_T), pessimistic_T)

    return loss_T, {
        "pg_clipfrac": (clipped_T > plain_T).detach().double(),
        "pg_clipfrac_lower": (negative_T & (pessimistic_T > bound_T)).detach().double(),
        "ppo_kl": -log_ratio_T.detach(),
        "ratio_max": ratio_T.detach(),
    }


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


def _log_ratio(policy_logprobs_T: Tensor, old_logprobs_T: Tensor) -> Tensor:
    return (policy_logprobs_T.double() - old_logprobs_T.double()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
