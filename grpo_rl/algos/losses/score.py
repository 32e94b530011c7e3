"""Losses that keep every token's gradient, weigh it, or drop it, instead of the clip."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_rl.algos.losses.contract import POLICY_LOSSES, LossInput, TokenLoss, by_advantage
from grpo_rl.config.schema.kinds import Coefficient, Positive, Ratio, Taper


@POLICY_LOSSES.register("reinforce", "gpg")
@by_advantage
def reinforce(inputs: LossInput) -> TokenLoss:
    """The score-function loss per token. With A = 1 it is supervised cross-entropy.

    Formula: -A log π

    Gradient: A

    Williams (1992), "Simple statistical gradient-following algorithms"; the loss of GPG (arXiv 2504.02546).
    """
    loss_T = -inputs.advantages_T.double() * inputs.policy_logprobs_T.double()
    return TokenLoss(loss_T, {"ppo_kl": -inputs.log_ratio_T().detach()})


@POLICY_LOSSES.register("sft")
def sft(inputs: LossInput) -> TokenLoss:
    """The cross-entropy of demonstrated tokens.

    Formula: -log π

    Gradient: 1

    Supervised fine-tuning, as in DeepSeekMath (arXiv 2402.03300), appendix A.1.1. It reads no advantages.
    """
    return TokenLoss(-inputs.policy_logprobs_T.double())


@POLICY_LOSSES.register("cispo")
@by_advantage
def cispo(inputs: LossInput, *, clip_low: Ratio = 0.2, clip_high: Ratio = 0.2) -> TokenLoss:
    """REINFORCE weighted by the clipped ratio as a constant: no token loses its gradient.

    Formula: -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log π; r = π / π_old

    Gradient: clip(r, 1 - clip_low, 1 + clip_high) A

    CISPO: MiniMax-M1 (arXiv 2506.13585), section 3.1; sg stops the gradient. The upper bound is 1 +
    clip_high, as in verl; TRL takes it as the bound itself.
    """
    log_ratio_T = inputs.log_ratio_T().detach()
    ratio_T = log_ratio_T.exp()
    weight_T = ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss_T = -weight_T * inputs.advantages_T.double() * inputs.policy_logprobs_T.double()
    stats = {"pg_clipfrac": (weight_T != ratio_T).double(), "ppo_kl": -log_ratio_T, "ratio_max": ratio_T}
    return TokenLoss(loss_T, stats)


@POLICY_LOSSES.register("topr")
@by_advantage
def topr(inputs: LossInput, *, negative_low: Taper = 0.0, negative_high: Taper = 1.0) -> TokenLoss:
    """REINFORCE whose responses of negative advantage are weighted by their tapered ratio.

    Formula: -sg(w) A log π; w = 1 where A >= 0, else clip(s, negative_low, negative_high);
    s = exp(mean over the response of log π / π_old)

    Gradient: A where A >= 0, else clip(s, negative_low, negative_high) A

    TOPR (arXiv 2503.14286), section 3, with the mean log-ratio of the response as in verl; sg stops the
    gradient. A response that has become unlikely is not pushed down further.
    """
    ratio_T = inputs.segments.broadcast(inputs.mean_log_ratio_N().detach()).exp()
    advantages_T = inputs.advantages_T.double()
    weight_T = torch.where(advantages_T < 0, ratio_T.clamp(negative_low, negative_high), torch.ones_like(ratio_T))
    loss_T = -weight_T * advantages_T * inputs.policy_logprobs_T.double()
    tapered_T = ((advantages_T < 0) & (weight_T != ratio_T)).double()
    return TokenLoss(loss_T, {"pg_clipfrac": tapered_T, "ppo_kl": -inputs.log_ratio_T().detach(), "ratio_max": ratio_T})


@POLICY_LOSSES.register("sapo")
@by_advantage
def sapo(inputs: LossInput, *, tau_pos: Positive = 1.0, tau_neg: Positive = 1.05) -> TokenLoss:
    """A soft gate in place of the clip: the gradient fades as the ratio leaves 1.

    Formula: -A sigmoid(τ (r - 1)) 4/τ; r = π / π_old; τ = tau_pos where A > 0, else tau_neg

    Gradient: 4 r A σ (1 - σ); σ = sigmoid(τ (r - 1))

    SAPO (arXiv 2511.20347).
    """
    advantages_T = inputs.advantages_T.double()
    log_ratio_T = inputs.log_ratio_T()
    ratio_T = log_ratio_T.exp()
    # Filled as float64: torch.where of two Python numbers would round them to float32.
    temperature_T = torch.full_like(advantages_T, tau_neg).masked_fill(advantages_T > 0, tau_pos)
    loss_T = -advantages_T * torch.sigmoid(temperature_T * (ratio_T - 1.0)) * 4.0 / temperature_T
    return TokenLoss(loss_T, {"ppo_kl": -log_ratio_T.detach(), "ratio_max": ratio_T.detach()})


@POLICY_LOSSES.register("dppo_tv")
@by_advantage
def dppo_tv(inputs: LossInput, *, clip_low: Ratio = 0.2, clip_high: Ratio = 0.2, max_ratio: Positive = 20.0) -> TokenLoss:
    """REINFORCE weighted by the ratio, without tokens whose probability has moved far in the paying
    direction.

    Formula: -sg(min(r, max_ratio)) A log π, but 0 where A > 0 and π - π_old > clip_high, or A <= 0 and π - π_old < -clip_low;
    r = π / π_old

    Gradient: min(r, max_ratio) A, but 0 where A > 0 and π - π_old > clip_high, or A <= 0 and π - π_old < -clip_low

    DPPO with binary total variation (arXiv 2602.04879); sg stops the gradient. The clip bounds are
    differences of probabilities. verl takes clip_ratio_c (3) for `max_ratio`.
    """
    difference_T = inputs.policy_logprobs_T.detach().double().exp() - inputs.old_T().double().exp()
    return _divergence_masked(inputs, difference_T > clip_high, difference_T < -clip_low, max_ratio)


@POLICY_LOSSES.register("dppo_kl")
@by_advantage
def dppo_kl(inputs: LossInput, *, clip_low: Ratio = 0.2, clip_high: Ratio = 0.2, max_ratio: Positive = 20.0) -> TokenLoss:
    """The loss of `dppo_tv` with a bound on the divergence between "this token" and "another one".

    Formula: -sg(min(r, max_ratio)) A log π, but 0 where A > 0, π > π_old and D > clip_high, or A <= 0, π < π_old and D > clip_low;
    D = π_old log(π_old / π) + (1 - π_old) log((1 - π_old) / (1 - π)), r = π / π_old

    Gradient: min(r, max_ratio) A, but 0 where A > 0, π > π_old and D > clip_high, or A <= 0, π < π_old and D > clip_low

    DPPO with binary KL (arXiv 2602.04879); sg stops the gradient. The clip bounds are divergences in nats.
    """
    policy_T, old_T = inputs.policy_logprobs_T.detach().double(), inputs.old_T().double()
    divergence_T = _binary_kl(old_T, policy_T)
    too_likely_T = (divergence_T > clip_high) & (policy_T > old_T)
    too_unlikely_T = (divergence_T > clip_low) & (policy_T < old_T)
    return _divergence_masked(inputs, too_likely_T, too_unlikely_T, max_ratio)


@POLICY_LOSSES.register("dro")
def dro(inputs: LossInput, *, dro_beta: Coefficient = 0.1) -> TokenLoss:
    """The score-function loss with a quadratic pull towards the policy that sampled.

    Formula: -A log π + dro_beta/2 (log π - log π_old)²

    Gradient: A - dro_beta (log π - log π_old)

    Direct reward optimisation (arXiv 2405.19107) with the advantage in place of reward minus value. The pull
    bounds the step, so the log-ratio is not cut.
    """
    policy_T = inputs.policy_logprobs_T.double()
    difference_T = policy_T - inputs.old_T().double()
    loss_T = -inputs.advantages_T.double() * policy_T + 0.5 * dro_beta * difference_T.square()
    return TokenLoss(loss_T, {"ppo_kl": -difference_T.detach()})


def _divergence_masked(inputs: LossInput, too_likely_T: Tensor, too_unlikely_T: Tensor, max_ratio: float) -> TokenLoss:
    advantages_T = inputs.advantages_T.double()
    log_ratio_T = inputs.log_ratio_T().detach()
    ratio_T = log_ratio_T.exp()
    dropped_T = torch.where(advantages_T > 0, too_likely_T, too_unlikely_T)
    weight_T = torch.where(dropped_T, 0.0, ratio_T.clamp(max=max_ratio))
    stats = {
        "pg_clipfrac": dropped_T.double(),
        "pg_clipfrac_lower": ((ratio_T > max_ratio) & ~dropped_T).double(),
        "ppo_kl": -log_ratio_T,
        "ratio_max": ratio_T,
    }
    return TokenLoss(-weight_T * advantages_T * inputs.policy_logprobs_T.double(), stats)


def _binary_kl(old_T: Tensor, policy_T: Tensor) -> Tensor:
    """KL between the events "this token", of log-probs; infinite if only the policy is certain."""
    log_rest_old_T, log_rest_T = torch.log(-torch.expm1(old_T)), torch.log(-torch.expm1(policy_T))
    # A rest without probability contributes nothing: not 0 * (-inf + inf).
    rest_T = torch.where(old_T < 0, -torch.expm1(old_T) * (log_rest_old_T - log_rest_T), 0.0)
    return old_T.exp() * (old_T - policy_T) + rest_T
