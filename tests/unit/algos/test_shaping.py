"""Overlong responses, adaptive entropy, and the critic's loss."""

from __future__ import annotations

import pytest
import torch

from grpo_rl.algos.losses.value import explained_variance, value_loss
from grpo_rl.algos.shaping import AdaptiveEntropy, overlong_penalty


def test_the_overlong_penalty_falls_over_the_buffer_by_hand() -> None:
    lengths_N = torch.tensor([0, 60, 70, 80, 100, 130])
    assert overlong_penalty(lengths_N, max_length=100, buffer=40).tolist() == [0, 0, -0.25, -0.5, -1, -1]
    assert overlong_penalty(lengths_N, max_length=100, buffer=40, penalty_factor=2.0).tolist() == [0, 0, -0.5, -1, -2, -2]


def test_the_entropy_coefficient_rises_below_its_target_and_acts_only_there() -> None:
    controller = AdaptiveEntropy(target_entropy=0.2, step=0.25, initial=0.5)
    values = [controller.value]
    for entropy in (0.1, 0.2, 0.3, 0.3, 0.1):
        controller.update(entropy)
        values.append(controller.value)
    # +, unchanged at the target, - and off, - and off, +
    assert values == [0.5, 0.75, 0.75, 0.0, 0.0, 0.5]


@pytest.mark.parametrize(
    ("value", "old", "returned", "loss", "slope", "clipped"),
    [
        (1.0, 1.0, 3.0, 2.0, -2.0, 0),
        (2.0, 1.0, 3.0, 1.125, 0.0, 1),  # a step of 1 counts as 0.5: (1.5 - 3)² / 2
        (0.0, 1.0, 3.0, 4.5, -3.0, 0),  # a step the wrong way is charged in full
        (1.2, 1.0, 3.0, 1.62, -1.8, 0),
        (3.0, 1.0, 0.0, 4.5, 3.0, 0),
    ],
)
def test_the_clipped_value_loss_by_hand(
    value: float, old: float, returned: float, loss: float, slope: float, clipped: int
) -> None:
    values_T = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    loss_T, stats = value_loss(values_T, torch.tensor([old]), torch.tensor([returned]))
    loss_T.sum().backward()
    assert loss_T.item() == pytest.approx(loss)
    assert values_T.grad is not None and values_T.grad.item() == pytest.approx(slope)
    assert stats["vf_clipfrac"].item() == clipped and stats["vpred_mean"].item() == value


def test_explained_variance_is_one_for_a_perfect_critic_and_zero_for_a_constant_one() -> None:
    returns_T = torch.tensor([1.0, 2.0, 4.0])
    assert explained_variance(returns_T, returns_T) == 1.0
    assert explained_variance(returns_T + 5, returns_T) == 1.0  # an offset is bias, not variance
    assert explained_variance(torch.ones(3), returns_T) == pytest.approx(0.0, abs=1e-12)
    assert explained_variance(-returns_T, returns_T) == pytest.approx(-3.0)
    assert explained_variance(torch.randn(3), torch.ones(3)) == explained_variance(torch.zeros(0), torch.zeros(0)) == 0.0
