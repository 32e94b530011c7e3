"""Policy losses per token: values by hand, the plain-Python reference, gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from objective_cases import SINGLE, inputs, own

from grpo_rl.algos.losses.registered import POLICY_LOSSES

ALL = SINGLE
CLIP = {"clip_low": 0.2, "clip_high": 0.28, "clip_c": 3.0}


def call(
    name: str, policy_T: torch.Tensor, old_T: torch.Tensor, advantages_T: torch.Tensor, lengths: Any, **columns: Any
) -> Any:
    """The loss with those of the bounds that it takes."""
    return POLICY_LOSSES.get(name)(
        inputs(policy_T, advantages_T, lengths, old_logprobs_T=old_T, **columns), **own(name, **CLIP)
    )


def one_token(name: str, ratio: float, advantage: float, old: float = -1.0) -> tuple[float, float, dict[str, float]]:
    """Loss, gradient with respect to the log-prob, and statistics of a single token."""
    policy_T = torch.tensor([math.log(ratio) + old], dtype=torch.float64, requires_grad=True)
    old_T = torch.tensor([old], dtype=torch.float64)
    loss_T, stats = call(name, policy_T, old_T, torch.tensor([advantage]), [1])
    loss_T.sum().backward()
    assert policy_T.grad is not None
    return loss_T.item(), policy_T.grad.item(), {key: value.item() for key, value in stats.items()}


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped", "dual"),
    [
        (1.0, 2.0, -2.0, -2.0, 0, 0),
        (1.1, 2.0, -2.2, -2.2, 0, 0),
        (1.5, 2.0, -2.56, 0.0, 1, 0),  # the upper bound 1.28 decides
        (0.5, 2.0, -1.0, -1.0, 0, 0),  # too unlikely for a good token: not clipped
        (0.9, -2.0, 1.8, 1.8, 0, 0),
        (0.5, -2.0, 1.6, 0.0, 1, 0),  # the lower bound 0.8 decides
        (2.0, -2.0, 4.0, 4.0, 0, 0),  # too likely for a bad token: not clipped
        (5.0, -2.0, 6.0, 0.0, 0, 1),  # but bounded by c = 3
        (5.0, 0.0, 0.0, 0.0, 0, 0),
    ],
)
def test_the_clipped_loss_by_hand(
    ratio: float, advantage: float, loss: float, gradient: float, clipped: int, dual: int
) -> None:
    value, slope, stats = one_token("vanilla", ratio, advantage)
    assert value == pytest.approx(loss, rel=1e-12)
    assert slope == pytest.approx(gradient, rel=1e-12)
    assert (stats["pg_clipfrac"], stats["pg_clipfrac_lower"]) == (clipped, dual)
    assert stats["ppo_kl"] == pytest.approx(-math.log(ratio))
    assert stats["ratio_max"] == pytest.approx(ratio)


def two_responses(name: str, advantages: list[float]) -> tuple[list[float], list[float], dict[str, list[float]]]:
    """Losses, gradients and statistics for ratios (1.4, 0.9) and (0.5)."""
    old_T = torch.tensor([-1.0, -2.0, -1.0], dtype=torch.float64)
    policy_T = (old_T + torch.tensor([1.4, 0.9, 0.5]).double().log()).requires_grad_()
    loss_T, stats = call(name, policy_T, old_T, torch.tensor(advantages), [2, 0, 1])
    loss_T.sum().backward()
    assert policy_T.grad is not None
    return loss_T.tolist(), policy_T.grad.tolist(), {key: value.tolist() for key, value in stats.items()}


@pytest.mark.parametrize("name", ["gspo", "gspo_token"])
def test_gspo_clips_whole_responses_by_hand(name: str) -> None:
    s = math.sqrt(1.4 * 0.9)  # 1.1225: inside, although 1.4 alone is not
    losses, gradients, stats = two_responses(name, [2.0, 2.0, -1.0])
    assert losses == pytest.approx([-2 * s, -2 * s, 0.8], rel=1e-6)
    assert gradients == pytest.approx([-2 * s, -2 * s, 0.0], rel=1e-6)
    assert stats["pg_clipfrac"] == [0, 0, 1]


@pytest.mark.parametrize("name", ALL)
@settings(deadline=None, max_examples=30)
@given(log_ratio=st.floats(-100, 100), certainty=st.floats(-50, 0), advantage=st.floats(-1e3, 1e3))
def test_losses_and_gradients_are_finite_for_any_ratio(name: str, log_ratio: float, certainty: float, advantage: float) -> None:
    # The likelier of the two policies has the log-prob `certainty`, down to probability 1.
    old_T = torch.tensor([certainty - max(log_ratio, 0.0)])
    policy_T = torch.tensor([certainty + min(log_ratio, 0.0)], requires_grad=True)
    loss_T, stats = call(name, policy_T, old_T, torch.tensor([advantage]), [1])
    loss_T.sum().backward()
    assert policy_T.grad is not None
    for value in (loss_T, policy_T.grad, *stats.values()):
        assert torch.isfinite(value).all()
    assert not any(value.requires_grad for value in stats.values())
