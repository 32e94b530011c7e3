"""Distillation: the policy π's distance to a teacher τ, as a negative advantage or as a loss of its own.

A distance is an estimate by the token itself (`kl.py`), or a divergence over the teacher's top k tokens and
all others as one. The advantage -k1 is that of "On-Policy Distillation" (Thinking Machines Lab, 2025);
divergences are GKD's (arXiv 2306.13649). Everything is float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from grpo_rl.algos.advantages import blockwise
from grpo_rl.algos.kl import KL_ESTIMATORS, k1, kl_estimate
from grpo_rl.algos.losses.contract import LossInput
from grpo_rl.config.schema.algorithm import DistillationConfig
from grpo_rl.config.schema.kinds import Fraction
from grpo_rl.errors import ConfigError
from grpo_rl.frozen import frozen
from grpo_rl.registry import Registry, coefficient_of, formula_of, options_of, own_options, shown

Divergence = Callable[..., Tensor]  # (policy_logprobs_TK, teacher_logprobs_TK, *, <own options>) -> divergence_T

DIVERGENCES: Registry[Divergence] = Registry(
    "divergence", "divergence(policy_logprobs_TK: Tensor, teacher_logprobs_TK: Tensor, *, option=default, ...) -> divergence_T"
)
LEAST_REST = 1e-6  # the least probability of all tokens outside of the top k together, for float32 log-probs
NEVER = -1000.0


@DIVERGENCES.register("forward_kl", "forward_kl_topk_tail")
def forward_kl(policy_logprobs_TK: Tensor, teacher_logprobs_TK: Tensor) -> Tensor:
    """The teacher's divergence from the policy, which has to cover all that the teacher may say.

    Formula: Σ_v τ_v (log τ_v - log π_v)
    """
    return (teacher_logprobs_TK.exp() * (teacher_logprobs_TK - policy_logprobs_TK)).sum(-1)


@DIVERGENCES.register("forward_kl_topk")
def forward_kl_topk(policy_logprobs_TK: Tensor, teacher_logprobs_TK: Tensor) -> Tensor:
    """The forward KL's part of the teacher's top k, as in verl: not 0 at its minimum, below 0 in places.

    Formula: Σ_{v in top k} τ_v (log τ_v - log π_v)
    """
    return forward_kl(policy_logprobs_TK[:, :-1], teacher_logprobs_TK[:, :-1])


@DIVERGENCES.register("reverse_kl")
def reverse_kl(policy_logprobs_TK: Tensor, teacher_logprobs_TK: Tensor) -> Tensor:
    """The policy's divergence from the teacher: what the policy says has to be likely to the teacher.

    Formula: Σ_v π_v (log π_v - log τ_v)
    """
    return forward_kl(teacher_logprobs_TK, policy_logprobs_TK)


@DIVERGENCES.register("jsd")
def jsd(policy_logprobs_TK: Tensor, teacher_logprobs_TK: Tensor, *, jsd_beta: Fraction = 0.5) -> Tensor:
    """The generalised Jensen-Shannon divergence of GKD (arXiv 2306.13649), eq. 1.

    Formula: jsd_beta KL(τ, m) + (1 - jsd_beta) KL(π, m); m = jsd_beta τ + (1 - jsd_beta) π

    A jsd_beta of 0 means KL(τ, π) and one of 1 KL(π, τ), as in TRL.
    """
    if jsd_beta in (0.0, 1.0):
        return (reverse_kl if jsd_beta else forward_kl)(policy_logprobs_TK, teacher_logprobs_TK)
    shares = math.log1p(-jsd_beta), math.log(jsd_beta)
    mixture_TK = torch.logaddexp(policy_logprobs_TK + shares[0], teacher_logprobs_TK + shares[1])
    parts = forward_kl(mixture_TK, teacher_logprobs_TK), forward_kl(mixture_TK, policy_logprobs_TK)
    return jsd_beta * parts[0] + (1.0 - jsd_beta) * parts[1]


def with_rest(logprobs_TK: Tensor) -> Tensor:
    rest_T1 = -torch.expm1(logprobs_TK.logsumexp(-1, keepdim=True))
    return torch.cat([logprobs_TK, rest_T1.clamp(min=LEAST_REST).log()], -1)


@frozen
class Distillation:
    """The teacher's part of the objective. Raises ConfigError for unknown or contradictory settings."""

    loss_mode: str = "k1"
    topk: int = 0  # tokens that a divergence compares; -1: all, 0: an estimate by the sampled token
    coef: float = 1.0
    task: bool = True
    as_advantage: bool = True
    discount: float = 0.0
    max_clamp: float | None = None
    options: tuple[tuple[str, float], ...] = ()

    @classmethod
    def from_config(cls, config: DistillationConfig) -> Distillation | None:
        loss_config = config.distillation_loss
        if not config.enabled:
            return None
        key, mode, is_k1 = "distillation.distillation_loss", loss_config.loss_mode, loss_config.loss_mode in ("kl", "k1")
        estimates = mode in KL_ESTIMATORS
        divergence = None if estimates else DIVERGENCES.get(mode)
        if loss_config.use_policy_gradient and not is_k1:
            raise ConfigError(
                f"{key}.use_policy_gradient=true: with loss_mode={mode} the mean gradient would not be that of a divergence from the "
                "teacher; loss_mode=k1, or use_policy_gradient=false, which differentiates it"
            )
        if is_k1 and not loss_config.use_policy_gradient:
            raise ConfigError(
                f"{key}.loss_mode={mode}: has no gradient from the teacher; use_policy_gradient=true, or k2 or k3"
            )
        if not estimates and loss_config.topk == 0:
            raise ConfigError(
                f"{key}.topk=0: loss_mode={mode} compares the teacher's likeliest tokens; 1 or more, or -1 for all"
            )
        options = {} if divergence is None else {"jsd_beta": loss_config.jsd_beta}
        return cls(
            mode,
            0 if estimates else loss_config.topk,
            loss_config.distillation_loss_coef if loss_config.use_task_rewards else 1.0,
            loss_config.use_task_rewards,
            loss_config.use_policy_gradient,
            loss_config.discount,
            loss_config.loss_max_clamp,
            tuple((name, value) for name, value in options.items() if divergence and name in options_of(divergence)),
        )

    def distance_T(self, inputs: LossInput) -> Tensor:
        if self.topk == 0:
            teacher_T = inputs.column("teacher_logprobs_T")
            distance_T = kl_estimate(inputs.policy_logprobs_T, teacher_T, self.loss_mode, inputs.old_T())
        else:
            policy_TK, teacher_TK = inputs.column("policy_top_logprobs_TK"), inputs.column("teacher_top_logprobs_TK")
            possible_TK = policy_TK.detach() > NEVER
            pair = (torch.where(possible_TK, column_TK.double(), NEVER) for column_TK in (policy_TK, teacher_TK))
            divergence = DIVERGENCES.get(self.loss_mode)
            distance_T = divergence(*map(with_rest, pair), **own_options(divergence, dict(self.options)))
        return distance_T if self.max_clamp is None else distance_T.clamp(-self.max_clamp, self.max_clamp)

    def advantages_T(self, inputs: LossInput) -> Tensor:
        """Return each token's advantage: the task's, and -coef Σ_l discount^l k1 of the tokens after it."""
        gains_T = -self.coef * self.distance_T(inputs).detach()
        if self.discount:
            summed_T, own_T = torch.empty(len(gains_T), dtype=torch.float64), gains_T.cpu()
            for lot in blockwise.lots(inputs.segments.lengths_N.cpu()):
                lot.write(blockwise.suffix_sums(lot.rows(own_T), self.discount), summed_T)
            gains_T = summed_T.to(gains_T.device)
        return inputs.advantages_T.double() + gains_T if self.task else gains_T

    def stats(self, inputs: LossInput) -> dict[str, Tensor]:
        """Return the sum of k1, whose mean estimates the KL of the policy to its teacher."""
        k1_T = k1(inputs.policy_logprobs_T.detach(), inputs.column("teacher_logprobs_T"))
        return {"sum/distillation_kl": k1_T.sum()}

    def formula(self) -> str:
        if self.as_advantage:
            later = f"Σ_l {self.discount:g}^l " if self.discount else ""
            return f"{'A of the task + ' * self.task}{self.coef:g} {later}(log τ - log π);  τ the teacher"
        if self.topk:
            tokens = (
                "over the whole vocabulary" if self.topk < 0 else f"over the teacher's top {self.topk} and all others as one"
            )
            return f"{shown(DIVERGENCES.get(self.loss_mode), self.options)}, {tokens}  [{self.loss_mode}]"
        return f"{formula_of(KL_ESTIMATORS.get(self.loss_mode)).replace('π_ref', 'τ')}  [{self.loss_mode}]"

    def coefficient(self) -> str:
        if self.as_advantage:
            return self.formula()
        of_estimate = coefficient_of(KL_ESTIMATORS.get(self.loss_mode)).replace("π_ref", "τ") if not self.topk else ""
        return f"- {self.coef:g} ({of_estimate})" if of_estimate else f"- {self.coef:g} ∇D/∇log π"
