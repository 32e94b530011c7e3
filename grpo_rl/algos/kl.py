"""KL(policy || reference) per token: estimators from the sampled token, the full sum, and coefficient
controllers.

d = policy_logprobs - ref_logprobs of the sampled token; k1, k2, k3: Schulman, "Approximating KL Divergence"
(2020). Everything is float64, except `full_kl`. The gradient of k1 or k3 is not that of the KL, because the
samples depend on the policy too (Tang and Munos, arXiv 2506.09477); that of k2 is, on-policy. So the names
with a `+` have a base's value and the gradient of k2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from grpo_rl.registry import Registry, coefficient_of, formula_of, needs, needs_of

KlEstimator = Callable[..., Tensor]  # (policy_logprobs_T, ref_logprobs_T, *, <old_logprobs_T, own options>) -> kl_T

KL_ESTIMATORS: Registry[KlEstimator] = Registry(
    "KL estimator", "kl(policy_logprobs_T: Tensor, ref_logprobs_T: Tensor, *, option=default, ...) -> kl_T: Tensor"
)


def kl_estimate(
    policy_logprobs_T: Tensor,
    ref_logprobs_T: Tensor,
    kind: str,
    old_logprobs_T: Tensor | None = None,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> Tensor:
    """Raises ConfigError for an unknown estimator. Without `old_logprobs_T` the policy itself has sampled."""
    estimator = KL_ESTIMATORS.get(kind)
    keywords = dict(options)
    if "old_logprobs" in needs_of(estimator):
        keywords["old_logprobs_T"] = policy_logprobs_T if old_logprobs_T is None else old_logprobs_T
    return estimator(policy_logprobs_T, ref_logprobs_T, **keywords)


@KL_ESTIMATORS.register("kl", "k1")
def k1(policy_logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """The log-ratio itself: unbiased, either sign, high variance. Its own gradient has mean 0.

    Formula: d; d = log π - log π_ref

    Gradient: 1
    """
    return policy_logprobs_T.double() - ref_logprobs_T.double()


@KL_ESTIMATORS.register("abs")
def absolute(policy_logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """Size of the log-ratio: a distance, no estimate of the KL.

    Formula: |d|; d = log π - log π_ref

    Gradient: sign(log π - log π_ref)
    """
    return k1(policy_logprobs_T, ref_logprobs_T).abs()


@KL_ESTIMATORS.register("mse", "k2")
def k2(policy_logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """Half the squared log-ratio: biased in value, and the one whose gradient is the KL's.

    Formula: d²/2; d = log π - log π_ref

    Gradient: log π - log π_ref
    """
    return 0.5 * k1(policy_logprobs_T, ref_logprobs_T).square()


@KL_ESTIMATORS.register("low_var_kl", "k3")
def k3(policy_logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """The low-variance estimator of GRPO: unbiased in value (up to the clamps) and never negative.

    Formula: min(e^x - x - 1, 10); x = clamp(log π_ref - log π, -20, 20)

    Gradient: 1 - π_ref/π, but 0 where a bound acts

    DeepSeekMath (arXiv 2402.03300), eq. 4; the clamps are verl's. An infinite difference is not clamped: what
    has broken down must not look like a distance of 10.
    """
    d_T = k1(policy_logprobs_T, ref_logprobs_T)
    x_T = -d_T.clamp(-20.0, 20.0)
    return torch.where(d_T.isinf(), d_T.abs(), (torch.expm1(x_T) - x_T).clamp(0.0, 10.0))


def straight_through(name: str) -> KlEstimator:
    base = KL_ESTIMATORS.get(name)

    def estimator(policy_logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
        k2_T = k2(policy_logprobs_T, ref_logprobs_T)
        return base(policy_logprobs_T, ref_logprobs_T).detach() + (k2_T - k2_T.detach())

    formula = f"sg(v) + k2 - sg(k2); v = {formula_of(base)}; k2 = (log π - log π_ref)²/2"
    estimator.__doc__ = (
        f"Value of {name}, gradient of k2; sg stops the gradient.\n\nFormula: {formula}\n\nGradient: {coefficient_of(k2)}"
    )
    return estimator


for _names in (("kl", "k1"), ("abs",), ("mse", "k2"), ("low_var_kl", "k3")):
    KL_ESTIMATORS.register(*(f"{name}+" for name in _names))(straight_through(_names[-1]))


@KL_ESTIMATORS.register("k3_unbiased")
@needs("old_logprobs")
def k3_unbiased(policy_logprobs_T: Tensor, ref_logprobs_T: Tensor, *, old_logprobs_T: Tensor) -> Tensor:
    """k3 weighted by the ratio to the policy that sampled: value and gradient are the KL's, however old the
    samples are.

    Formula: r (e^x - x - 1); x = log π_ref - log π, r = π / π_old, whose gradient is r d ∇log π; d = -x

    Gradient: r (log π - log π_ref)

    DeepSeek-V3.2 (arXiv 2512.02556), section 3.1. The gradient is taken in that form, because the derivatives
    of the two factors cancel in floating point; log r is cut to ±20 and x above at 20 in the value alone.
    """
    ratio_T = k1(policy_logprobs_T.detach(), old_logprobs_T.detach()).clamp(-20.0, 20.0).exp()
    x_T = (-k1(policy_logprobs_T.detach(), ref_logprobs_T)).clamp(max=20.0)
    k2_T = k2(policy_logprobs_T, ref_logprobs_T)
    return ratio_T * (torch.expm1(x_T) - x_T + (k2_T - k2_T.detach()))


def full_kl(policy_logits_TV: Tensor, ref_logits_TV: Tensor) -> Tensor:
    """The exact KL of the two next-token distributions, in float32 (float64 for float64 logits).

    Formula: Σ_v π_v (log π_v - log π_ref,v)

    A token with logit -inf in the policy contributes 0. Callers pass chunks: the work space is a few times
    [T, V].
    """
    dtype = torch.promote_types(policy_logits_TV.dtype, torch.float32)
    policy_logprobs_TV = policy_logits_TV.to(dtype).log_softmax(-1)
    ref_logprobs_TV = ref_logits_TV.to(dtype).log_softmax(-1)
    possible_TV = policy_logprobs_TV.detach() > -math.inf
    # Not 0 * inf: what the policy cannot produce is taken out before the product, in value and in gradient.
    log_ratio_TV = torch.where(possible_TV, policy_logprobs_TV - ref_logprobs_TV, 0.0)
    return (policy_logprobs_TV.exp() * log_ratio_TV).sum(-1)


class KlController:
    """A coefficient; with `target_kl` it is steered so that the measured KL comes to that.

    value <- value * (1 + clip(KL / target_kl - 1, -0.2, 0.2) * num_rollouts / horizon): Ziegler et al. (arXiv 1909.08593),
    section 2.2."""

    def __init__(self, kl_coef: float, target_kl: float | None = None, horizon: int = 1) -> None:
        self.value, self.target_kl, self.horizon = kl_coef, target_kl, horizon

    def update(self, current_kl: float, num_rollouts: int) -> None:
        """Raises ValueError for a KL that is not finite, or a horizon too short to be safe."""
        if self.target_kl is None:
            return
        if not math.isfinite(current_kl):
            raise ValueError(f"the measured KL is {current_kl}: the policy or the reference has broken down")
        if 0.2 * num_rollouts >= self.horizon:
            raise ValueError(
                f"kl_ctrl.horizon={self.horizon} is too short for {num_rollouts} rollouts a step: the coefficient could "
                f"reach 0 or change its sign. Take more than {0.2 * num_rollouts:g}, best several times {num_rollouts}"
            )
        error = min(max(current_kl / self.target_kl - 1.0, -0.2), 0.2)
        self.value *= 1.0 + error * num_rollouts / self.horizon

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]
