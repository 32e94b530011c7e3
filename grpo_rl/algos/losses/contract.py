"""How a policy loss is called, the table they are registered in, and what several of them share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from grpo_rl.algos.segments import Segments
from grpo_rl.registry import Registry

F = TypeVar("F", bound=Callable[..., Any])

MAX_LOG_RATIO = 20.0
"""Log-ratios are cut to +-20 before exp, as in verl: e^20 is far beyond every clip range and far from overflow."""

MAX_SEQUENCE_LOG_RATIO = 10.0
"""A response's mean log-ratio is cut above at this, as in verl."""


class PolicyLoss(Protocol):
    """How a policy loss is called.

    Its own options are further keywords with defaults. A loss that treats some tokens otherwise (`selected_by`)
    takes them as one more keyword without a default, `selected_T`.
    """

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
        **options: Any,
    ) -> tuple[Tensor, dict[str, Tensor]]: ...


Selection = Callable[..., Tensor]
"""(advantages_T, old_logprobs_T, generator, *, <own options with defaults>) -> selected_T, of booleans"""

POLICY_LOSSES: Registry[Callable[..., tuple[Tensor, dict[str, Tensor]]]] = Registry("policy loss")


def selected_by(selection: Selection) -> Callable[[F], F]:
    """Decorator: the loss takes `selected_T`, which `selection` chooses once for a whole mini-batch."""

    def note(function: F) -> F:
        function.selection = selection  # type: ignore[attr-defined]
        return function

    return note


def selection_of(loss: Callable[..., Any]) -> Selection | None:
    """What chooses the tokens that the loss treats otherwise; None where it treats all alike."""
    return getattr(loss, "selection", None)


def mean_log_ratio(policy_logprobs_T: Tensor, old_logprobs_T: Tensor, segments: Segments) -> Tensor:
    """Mean log-ratio of each response, cut above."""
    return segments.mean(policy_logprobs_T.double() - old_logprobs_T.double()).clamp(max=MAX_SEQUENCE_LOG_RATIO)


def clipped(log_ratio_T: Tensor, advantages_T: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, dict[str, Tensor]]:
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


def log_ratio(policy_logprobs_T: Tensor, old_logprobs_T: Tensor) -> Tensor:
    """log π - log π_old of each token, cut on both sides."""
    return (policy_logprobs_T.double() - old_logprobs_T.double()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
