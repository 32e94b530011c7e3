"""KL estimators, the full sum over the vocabulary, and the coefficient controllers."""

from __future__ import annotations

import math

import algos_reference as reference
import pytest
import torch

from grpo_rl.algos.kl import (
    KL_ESTIMATORS,
    AdaptiveKlController,
    FixedKlController,
    full_kl,
    kl_estimate,
)
from grpo_rl.errors import ConfigError

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


@pytest.mark.parametrize(("alias", "name"), [("kl", "k1"), ("mse", "k2"), ("low_var_kl", "k3")])
def test_both_names_of_an_estimator_are_the_same_function(alias: str, name: str) -> None:
    assert KL_ESTIMATORS.get(alias) is KL_ESTIMATORS.get(name)


def test_an_unknown_estimator_is_refused_with_the_nearest_names() -> None:
    with pytest.raises(ConfigError, match="low_var_kl"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "low_var")


@pytest.mark.parametrize("d", [-100.0, -30.0, 30.0, 100.0])
def test_k3_stops_at_ten_and_has_no_gradient_there(d: float) -> None:
    policy_T = torch.tensor([d], requires_grad=True)
    kl_T = kl_estimate(policy_T, torch.zeros(1), "k3")
    kl_T.sum().backward()
    assert kl_T.item() == 10.0
    assert policy_T.grad is not None and policy_T.grad.item() == 0.0


def test_k3_keeps_its_digits_where_policy_and_reference_almost_agree() -> None:
    # e^x - x - 1 = x²/2 + x³/6 + ...; written like that it loses its digits here even in float64.
    x = 2.0**-20
    value = kl_estimate(torch.tensor([-1.0]), torch.tensor([-1.0 + x]), "k3").item()
    assert value == pytest.approx(x**2 / 2 + x**3 / 6, rel=1e-6)


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("extremes", [False, True])
def test_every_estimator_agrees_with_the_plain_python_reference(kind: str, extremes: bool) -> None:
    data = reference.ragged(3, num_rollouts=20, extremes=extremes)
    kl_T = kl_estimate(reference.as_float32(data.policy), reference.as_float32(data.ref), kind)
    expected = [reference.kl(kind, p, r) for p, r in zip(data.policy, data.ref, strict=True)]
    assert kl_T.tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("kind", ALL)
def test_gradients_of_every_estimator_are_those_of_finite_differences(kind: str) -> None:
    policy_T = torch.tensor([-0.3, -2.0, -4.0], dtype=torch.float64, requires_grad=True)
    ref_T = torch.tensor([-1.0, -1.7, -2.1], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda p: kl_estimate(p, ref_T, kind), policy_T)


def test_full_kl_by_hand() -> None:
    policy_TV = torch.tensor([[0.75, 0.25], [0.5, 0.5]]).log()
    ref_TV = torch.tensor([[0.5, 0.5], [0.5, 0.5]]).log()
    expected = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert full_kl(policy_TV, ref_TV).tolist() == pytest.approx([expected, 0.0], abs=1e-7)


def test_full_kl_takes_logits_up_to_a_constant_and_never_falls_below_zero() -> None:
    generator = torch.Generator().manual_seed(0)
    policy_TV = torch.randn(50, 31, generator=generator, dtype=torch.float64)
    ref_TV = torch.randn(50, 31, generator=generator, dtype=torch.float64)
    kl_T = full_kl(policy_TV, ref_TV)
    assert (kl_T > 0).all()
    torch.testing.assert_close(full_kl(policy_TV + 5, ref_TV - 3), kl_T)
    assert (full_kl(policy_TV, policy_TV) == 0).all()


def test_full_kl_is_computed_in_float32_for_bfloat16_logits() -> None:
    logits_TV = torch.randn(4, 100, generator=torch.Generator().manual_seed(1)).bfloat16()
    kl_T = full_kl(logits_TV, torch.zeros_like(logits_TV))
    assert kl_T.dtype == torch.float32
    torch.testing.assert_close(kl_T, full_kl(logits_TV.double(), torch.zeros(4, 100).double()).float(), rtol=1e-5, atol=1e-6)


def test_full_kl_gradient_is_that_of_finite_differences() -> None:
    generator = torch.Generator().manual_seed(2)
    policy_TV = torch.randn(3, 5, generator=generator, dtype=torch.float64).requires_grad_()
    ref_TV = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda p: full_kl(p, ref_TV), policy_TV)


def test_full_kl_is_finite_for_impossible_tokens_and_huge_logits() -> None:
    policy_TV = torch.tensor([[0.0, -math.inf, 0.0], [1e4, 0.0, -1e4]], requires_grad=True)
    ref_TV = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    kl_T = full_kl(policy_TV, ref_TV)
    assert kl_T.tolist() == pytest.approx([math.log(1.5), math.log(3)], rel=1e-6)
    kl_T.sum().backward()
    assert policy_TV.grad is not None and torch.isfinite(policy_TV.grad).all()


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_the_mean_over_the_policy_of_k1_and_of_k3_is_the_full_kl(kind: str) -> None:
    generator = torch.Generator().manual_seed(3)
    policy_V = torch.randn(20, generator=generator, dtype=torch.float64).log_softmax(0)
    ref_V = torch.randn(20, generator=generator, dtype=torch.float64).log_softmax(0)
    mean = (policy_V.exp() * kl_estimate(policy_V, ref_V, kind)).sum()
    torch.testing.assert_close(mean, full_kl(policy_V[None], ref_V[None])[0])


def test_the_mean_gradient_of_k2_is_that_of_the_full_kl_and_that_of_k1_is_zero() -> None:
    generator = torch.Generator().manual_seed(4)
    logits_V = torch.randn(20, generator=generator, dtype=torch.float64).requires_grad_()
    ref_V = torch.randn(20, generator=generator, dtype=torch.float64).log_softmax(0)

    def mean_gradient(kind: str) -> torch.Tensor:
        policy_V = logits_V.log_softmax(0)
        sampled = (policy_V.detach().exp() * kl_estimate(policy_V, ref_V, kind)).sum()
        return torch.autograd.grad(sampled, logits_V)[0]

    (exact_V,) = torch.autograd.grad(full_kl(logits_V[None], ref_V[None]).sum(), logits_V)
    torch.testing.assert_close(mean_gradient("k2"), exact_V)
    torch.testing.assert_close(mean_gradient("k1"), torch.zeros(20, dtype=torch.float64), rtol=0, atol=1e-12)


def test_the_fixed_controller_stays_where_it_is() -> None:
    controller = FixedKlController(0.3)
    controller.update(current_kl=100.0, num_rollouts=64)
    assert controller.value == 0.3


@pytest.mark.parametrize(
    ("measured", "factor"),
    [(0.11, 1.001), (0.1, 1.0), (0.095, 0.9995), (5.0, 1.002), (0.0, 0.998)],  # 100 of 10000 rollouts
)
def test_the_adaptive_controller_moves_by_ziegler_s_rule(measured: float, factor: float) -> None:
    controller = AdaptiveKlController(0.5, target_kl=0.1, horizon=10_000)
    controller.update(measured, num_rollouts=100)
    assert controller.value == pytest.approx(0.5 * factor, rel=1e-9)


def test_the_adaptive_controller_goes_on_where_a_checkpoint_left_it() -> None:
    controller = AdaptiveKlController(0.5, target_kl=0.1, horizon=1000)
    controller.update(0.3, num_rollouts=100)
    resumed = AdaptiveKlController(0.5, target_kl=0.1, horizon=1000)
    resumed.load_state_dict(controller.state_dict())
    assert resumed.value == controller.value == pytest.approx(0.51)


def test_a_horizon_that_could_turn_the_coefficient_negative_is_refused() -> None:
    with pytest.raises(ValueError, match="horizon=200 is too short for 1000 rollouts"):
        AdaptiveKlController(0.5, target_kl=0.1, horizon=200).update(0.0, num_rollouts=1000)


def test_a_kl_that_is_not_a_number_is_refused() -> None:
    with pytest.raises(ValueError, match="nan"):
        AdaptiveKlController(0.5, target_kl=0.1, horizon=1000).update(math.nan, num_rollouts=10)
