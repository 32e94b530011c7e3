"""KL estimators, the full sum over the vocabulary, and the coefficient controllers."""

from __future__ import annotations

import math

import pytest
import torch

from grpo_rl.algos.kl import (
    KL_ESTIMATORS,
    KlController,
    full_kl,
    kl_estimate,
)

ALL = sorted(KL_ESTIMATORS)


def kl_of(d: float, kind: str) -> float:
    return kl_estimate(torch.tensor([d - 1.0]), torch.tensor([-1.0]), kind).item()


@pytest.mark.parametrize(
    ("kind", "at_half", "at_minus_two"),
    [
        ("k1", 0.5, -2.0),
        ("abs", 0.5, 2.0),
        ("k2", 0.125, 2.0),
        ("k3", math.exp(-0.5) - 0.5, math.exp(2) - 3),  # e^-d + d - 1
    ],
)
def test_values_by_hand(kind: str, at_half: float, at_minus_two: float) -> None:
    assert kl_of(0.5, kind) == pytest.approx(at_half, rel=1e-7)
    assert kl_of(-2.0, kind) == pytest.approx(at_minus_two, rel=1e-7)
    assert kl_of(0.0, kind) == 0


@pytest.mark.parametrize("d", [-100.0, -30.0, 30.0, 100.0])
def test_k3_stops_at_ten_and_has_no_gradient_there(d: float) -> None:
    policy_T = torch.tensor([d], requires_grad=True)
    kl_T = kl_estimate(policy_T, torch.zeros(1), "k3")
    kl_T.sum().backward()
    assert kl_T.item() == 10.0
    assert policy_T.grad is not None and policy_T.grad.item() == 0.0


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("ref", [float("-inf"), float("nan")])
def test_a_reference_that_has_broken_down_shows_in_every_estimator(kind: str, ref: float) -> None:
    policy_T = torch.tensor([-1.0], requires_grad=True)
    assert not kl_estimate(policy_T, torch.tensor([ref]), kind).isfinite().any()


@pytest.mark.parametrize("kind", [kind for kind in ALL if kind.endswith("+")])
@pytest.mark.parametrize("d", [0.75, -1.25, 30.0, -30.0])
def test_the_forms_with_a_plus_have_a_base_s_value_and_the_gradient_of_k2_even_behind_a_clamp(kind: str, d: float) -> None:
    policy_T = torch.tensor([d - 40.0], requires_grad=True)
    ref_T = torch.tensor([-40.0])
    kl_T = kl_estimate(policy_T, ref_T, kind)
    assert kl_T.tolist() == kl_estimate(policy_T, ref_T, kind.removesuffix("+")).tolist()
    kl_T.sum().backward()
    assert policy_T.grad is not None and policy_T.grad.item() == pytest.approx(d, rel=1e-6)


def test_the_unbiased_k3_by_hand() -> None:
    # r = e^0.2, x = -0.7: value r (e^x - x - 1), gradient r d
    policy_T = torch.tensor([-0.3], dtype=torch.float64, requires_grad=True)
    kl_T = kl_estimate(policy_T, torch.tensor([-1.0]), "k3_unbiased", torch.tensor([-0.5]))
    kl_T.sum().backward()
    assert kl_T.item() == pytest.approx(math.exp(0.2) * (math.exp(-0.7) + 0.7 - 1), rel=1e-7)
    assert policy_T.grad is not None and policy_T.grad.item() == pytest.approx(math.exp(0.2) * 0.7, rel=1e-7)


def test_full_kl_by_hand() -> None:
    policy_TV = torch.tensor([[0.75, 0.25], [0.5, 0.5]]).log()
    ref_TV = torch.tensor([[0.5, 0.5], [0.5, 0.5]]).log()
    expected = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert full_kl(policy_TV, ref_TV).tolist() == pytest.approx([expected, 0.0], abs=1e-7)


def softmax_logprobs(seed: int) -> torch.Tensor:
    return torch.randn(20, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).log_softmax(0)


RIGHT_VALUE = {"k1", "kl", "k3", "low_var_kl", "k1+", "kl+", "k3+", "low_var_kl+", "k3_unbiased"}
RIGHT_GRADIENT = {"k2", "mse", "k3_unbiased"} | {kind for kind in ALL if kind.endswith("+")}


@pytest.mark.parametrize("kind", ALL)
def test_which_estimators_have_the_kl_as_their_mean_by_enumeration(kind: str) -> None:
    policy_V, ref_V = softmax_logprobs(3), softmax_logprobs(4)
    mean = (policy_V.exp() * kl_estimate(policy_V, ref_V, kind)).sum().item()
    exact = full_kl(policy_V[None], ref_V[None]).item()
    assert (mean == pytest.approx(exact, rel=1e-9)) == (kind in RIGHT_VALUE)


def mean_gradient(kind: str, logits_V: torch.Tensor, ref_V: torch.Tensor, old_V: torch.Tensor) -> torch.Tensor:
    """Gradient of the loss that averages the estimator over samples of `old_V`, by enumeration of the samples."""
    policy_V = logits_V.log_softmax(-1)
    return torch.autograd.grad((old_V.exp() * kl_estimate(policy_V, ref_V, kind, old_V)).sum(), logits_V)[0]


@pytest.mark.parametrize("kind", ALL)
def test_which_estimators_have_the_gradient_of_the_kl_on_policy_by_enumeration(kind: str) -> None:
    logits_V, ref_V = softmax_logprobs(5).requires_grad_(), softmax_logprobs(6)
    (exact_V,) = torch.autograd.grad(full_kl(logits_V[None], ref_V[None]).sum(), logits_V)
    gradient_V = mean_gradient(kind, logits_V, ref_V, logits_V.detach())
    assert torch.allclose(gradient_V, exact_V, rtol=1e-9, atol=1e-12) == (kind in RIGHT_GRADIENT)


def test_off_policy_only_the_unbiased_k3_keeps_value_and_gradient_by_enumeration() -> None:
    logits_V, ref_V, old_V = softmax_logprobs(7).requires_grad_(), softmax_logprobs(8), softmax_logprobs(9)
    (exact_V,) = torch.autograd.grad(full_kl(logits_V[None], ref_V[None]).sum(), logits_V)
    right = {k for k in ALL if torch.allclose(mean_gradient(k, logits_V, ref_V, old_V), exact_V, rtol=1e-9, atol=1e-12)}
    assert right == {"k3_unbiased"}
    policy_V = logits_V.detach()
    mean = (old_V.exp() * kl_estimate(policy_V, ref_V, "k3_unbiased", old_V)).sum()
    torch.testing.assert_close(mean, full_kl(policy_V[None], ref_V[None])[0])


@pytest.mark.parametrize(
    ("measured", "factor"),
    [(0.11, 1.001), (0.1, 1.0), (0.095, 0.9995), (5.0, 1.002), (0.0, 0.998)],  # 100 of 10000 rollouts
)
def test_the_adaptive_controller_moves_by_ziegler_s_rule(measured: float, factor: float) -> None:
    controller = KlController(0.5, target_kl=0.1, horizon=10_000)
    controller.update(measured, num_rollouts=100)
    assert controller.value == pytest.approx(0.5 * factor, rel=1e-9)


def test_a_horizon_that_could_turn_the_coefficient_negative_is_refused() -> None:
    with pytest.raises(ValueError, match="horizon=200 is too short for 1000 rollouts"):
        KlController(0.5, target_kl=0.1, horizon=200).update(0.0, num_rollouts=1000)
