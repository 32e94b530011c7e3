"""The interface of policy losses, their registry, and the parts that several of them share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from grpo_rl.algos.segments import Segments
from grpo_rl.frozen import frozen
from grpo_rl.registry import Registry
from grpo_rl.types import LossColumns

F = TypeVar("F", bound=Callable[..., Any])

MAX_LOG_RATIO = 20.0  # log-ratios are cut to +-20 before exp, as in verl

MAX_SEQUENCE_LOG_RATIO = 10.0  # A response's mean log-ratio is cut above at this, as in verl


@frozen
class LossInput(LossColumns[Tensor]):
    """One micro-batch's trained tokens on one device; optional columns are there if declared (`NEEDS`)."""

    policy_logprobs_T: Tensor
    advantages_T: Tensor
    segments: Segments
    group_N: Tensor | None = None
    entropy_T: Tensor | None = None  # in nats
    full_kl_T: Tensor | None = None
    policy_top_logprobs_TK: Tensor | None = None  # of the K tokens of `teacher_top_logprobs_TK`

    def old_T(self) -> Tensor:
        """Return the old log-probs; without any the policy's own, detached: the ratio is then exactly 1."""
        return self.policy_logprobs_T.detach() if self.old_logprobs_T is None else self.old_logprobs_T

    def log_ratio_T(self) -> Tensor:
        """Return log π - log π_old in float64, cut to ±MAX_LOG_RATIO."""
        return (self.policy_logprobs_T.double() - self.old_T().double()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    def mean_log_ratio_N(self) -> Tensor:
        """Return each response's mean log-ratio in float64, cut above at MAX_SEQUENCE_LOG_RATIO."""
        difference_T = self.policy_logprobs_T.double() - self.old_T().double()
        return self.segments.mean(difference_T).clamp(max=MAX_SEQUENCE_LOG_RATIO)

    def column(self, name: str) -> Tensor:
        value = getattr(self, name)
        assert value is not None, f"there is no {name}: the objective needs it, and a loss has to declare that with @needs"
        return value


class TokenLoss(NamedTuple):
    """A statistic `..._max` is reported as the largest value, all others as the mean over trained tokens."""

    loss_T: Tensor
    stats: Mapping[str, Tensor] = MappingProxyType({})


PolicyLoss = Callable[..., TokenLoss]  # (inputs: LossInput, *, <own options with defaults>) -> TokenLoss

Selection = Callable[..., Tensor]
"""(advantages_T, old_logprobs_T, generator, *, <own options with defaults>) -> selected_T, of booleans"""

NEEDS: dict[str, tuple[str, ...]] = {
    **{column.metadata["need"]: (column.name,) for column in fields(LossColumns) if column.metadata["need"]},
    "entropy": ("entropy_T",),
}
"""What a policy loss can need (`@needs`), with the columns that it reads then: the reference policy, the
number of trained tokens of the response's group, rollouts in pairs (see `preference.py`), single answers
of labelled rows with an estimate of the KL, the entropy. The other columns are always there."""

POLICY_LOSSES: Registry[PolicyLoss] = Registry(
    "policy loss", "loss(inputs: LossInput, *, option=default, ...) -> TokenLoss(loss_T, stats)"
)


def selected_by(selection: Selection) -> Callable[[F], F]:
    """Declare that a loss reads `selected_T`, which `selection` chooses once for a whole mini-batch."""

    def note(function: F) -> F:
        function.selection = selection  # type: ignore[attr-defined]
        return function

    return note


def selection_of(loss: Callable[..., Any]) -> Selection | None:
    return getattr(loss, "selection", None)


def by_advantage(loss: F) -> F:
    """Declare that a response whose advantages are all 0 gets no gradient, and so no backward pass."""
    loss.by_advantage = True  # type: ignore[attr-defined]
    return loss


def scales_with_advantage(loss: Callable[..., Any]) -> bool:
    return getattr(loss, "by_advantage", False)


def clipped(log_ratio_T: Tensor, advantages_T: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, dict[str, Tensor]]:
    advantages_T = advantages_T.double()
    ratio_T = log_ratio_T.exp()
    plain_T = -advantages_T * ratio_T
    clipped_T = -advantages_T * ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high)
    return torch.maximum(plain_T, clipped_T), {
        "pg_clipfrac": (clipped_T > plain_T).detach().double(),
        "ppo_kl": -log_ratio_T.detach(),
        "ratio_max": ratio_T.detach(),
    }
