"""Losses of reward models and critics, the measures of scores, overlong responses and adaptive entropy: by hand and against plain versions."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_rl.algos.losses.reward_scores import bradley_terry, step_classification
from grpo_rl.algos.losses.value import explained_variance, value_loss
from grpo_rl.algos.scoring_quality import auc, calibration, pair_accuracy
from grpo_rl.algos.shaping import AdaptiveEntropy, overlong_penalty

LOG2 = math.log(2.0)


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


# ---- Bradley-Terry ------------------------------------------------------------------------------------


def test_bradley_terry_by_hand() -> None:
    loss_P, stats = bradley_terry(tensor(2.0, 1.0, 0.0), tensor(0.0, 1.0, 1.0))
    # log(1 + e^-2), log 2, log(1 + e)
    assert loss_P.tolist() == pytest.approx([0.1269280110429725, LOG2, 1.3132616875182228], rel=1e-12)
    assert stats["accuracy"].tolist() == [1.0, 0.0, 0.0] and stats["margin"].tolist() == [2.0, 0.0, -1.0]


def test_the_margin_is_subtracted_and_the_centre_pulls_the_sum_to_0() -> None:
    loss_P, _ = bradley_terry(tensor(2.0, 3.0), tensor(0.0, 2.0), margin_P=tensor(2.0, 0.0))
    assert loss_P.tolist() == pytest.approx([LOG2, 0.31326168751822286], rel=1e-12)
    loss_P, _ = bradley_terry(tensor(2.0, 1.0), tensor(0.0, -1.0), center_coef=0.25)
    assert loss_P.tolist() == pytest.approx([0.1269280110429725 + 1.0, 0.1269280110429725], rel=1e-12)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.floats(-20, 20), st.floats(-20, 20)), min_size=1, max_size=6), st.floats(-10, 10))
def test_bradley_terry_reads_differences_and_its_gradient_is_the_probability_of_being_wrong(
    scores: list[tuple[float, float]], shift: float
) -> None:
    chosen_P, rejected_P = (tensor(*side).requires_grad_() for side in zip(*scores, strict=True))
    loss_P, _ = bradley_terry(chosen_P, rejected_P)
    torch.testing.assert_close(loss_P, bradley_terry(chosen_P + shift, rejected_P + shift)[0], rtol=1e-9, atol=1e-12)
    chosen_grad, rejected_grad = torch.autograd.grad(loss_P.sum(), (chosen_P, rejected_P))
    wrong_P = torch.sigmoid(rejected_P - chosen_P).detach()
    torch.testing.assert_close(chosen_grad, -wrong_P, rtol=1e-9, atol=1e-15)
    torch.testing.assert_close(rejected_grad, wrong_P, rtol=1e-9, atol=1e-15)
    # -log sigmoid(x) + log sigmoid(-x) = -x
    swapped_P = bradley_terry(rejected_P, chosen_P)[0]
    torch.testing.assert_close(loss_P - swapped_P, rejected_P - chosen_P, rtol=1e-9, atol=1e-9)


# ---- steps --------------------------------------------------------------------------------------------


def test_step_classification_by_hand() -> None:
    loss_K, stats = step_classification(tensor(0.0, 2.0, 2.0, -1.0, 2.0), tensor(1.0, 1.0, 0.0, 0.0, 0.25))
    low, high = 0.1269280110429725, 2.1269280110429727  # log(1 + e^-2), log(1 + e^2)
    assert loss_K.tolist() == pytest.approx([LOG2, low, high, 0.31326168751822286, 0.25 * low + 0.75 * high], rel=1e-12)
    assert stats["accuracy"].tolist() == [0.0, 1.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize("label", [-1.0, 1.5, math.nan])
def test_labels_that_are_no_shares_are_refused(label: float) -> None:
    with pytest.raises(ValueError, match="labels of steps must lie in 0 to 1"):
        step_classification(tensor(0.0), tensor(label))


# ---- measures -----------------------------------------------------------------------------------------


def test_pair_accuracy_by_hand() -> None:
    assert pair_accuracy(tensor(1.0, 0.0, 3.0, 2.0), tensor(0.0, 1.0, 3.0, 1.0)) == 0.625


@pytest.mark.parametrize(
    ("scores", "good", "area"),
    [
        ([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1], 0.75),  # of the four good-bad couples, (0.35, 0.4) is the wrong one
        ([1.0, 2.0], [0, 1], 1.0),
        ([2.0, 1.0], [0, 1], 0.0),
        ([1.0, 1.0, 1.0], [0, 1, 1], 0.5),
        ([1.0, 2.0, 2.0, 3.0], [0, 0, 1, 1], 0.875),  # one tie of four
    ],
)
def test_auc_by_hand(scores: list[float], good: list[int], area: float) -> None:
    assert auc(tensor(*scores), torch.tensor(good)) == area


def test_calibration_by_hand() -> None:
    # Bins of width 0.5: (0.2, 0.4; one of two good) and (0.6, 0.8, 1.0; two of three good).
    found = calibration(tensor(0.2, 0.4, 0.6, 0.8, 1.0), tensor(0, 1, 1, 0, 1), num_bins=2)
    assert found["calibration_error"] == pytest.approx(2 / 5 * 0.2 + 3 / 5 * (0.8 - 2 / 3))
    assert found["brier"] == pytest.approx((0.04 + 0.36 + 0.16 + 0.64 + 0.0) / 5)


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
