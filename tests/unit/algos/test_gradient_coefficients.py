"""The gradient coefficient in a function's docstring is the factor of the gradient of log π that autograd finds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from grpo_rl.algos import trial
from grpo_rl.algos.kl import KL_ESTIMATORS, kl_estimate
from grpo_rl.algos.losses.preference import Pairs
from grpo_rl.algos.losses.registered import POLICY_LOSSES, LossInput, selection_of
from grpo_rl.registry import coefficient_of, shown

LOW, HIGH, DUAL = 0.2, 0.28, 3.0


def sequence_mean(inputs: LossInput, x_T: Tensor) -> Tensor:
    return inputs.segments.broadcast(inputs.segments.mean(x_T))


def clipped(ratio_T: Tensor, advantages_T: Tensor, value_T: Tensor) -> Tensor:
    zero_T = ((advantages_T > 0) & (ratio_T > 1 + HIGH)) | ((advantages_T < 0) & (ratio_T < 1 - LOW))
    return torch.where(zero_T, 0.0, value_T)


def vanilla(inputs: LossInput, r_T: Tensor, a_T: Tensor) -> Tensor:
    return torch.where((a_T < 0) & (r_T > DUAL), 0.0, clipped(r_T, a_T, r_T * a_T))


def gspo(inputs: LossInput, r_T: Tensor, a_T: Tensor) -> Tensor:
    s_T = sequence_mean(inputs, r_T.log()).exp()
    return sequence_mean(inputs, clipped(s_T, a_T, s_T * a_T))


def geo_mean(inputs: LossInput, r_T: Tensor, a_T: Tensor) -> Tensor:
    low, high = 0.4, 0.4
    l_T = torch.where(a_T > 0, r_T.log().clamp(max=high), r_T.log().clamp(min=-low))
    value_T = sequence_mean(inputs, a_T) * sequence_mean(inputs, l_T).exp()
    return torch.where(l_T == r_T.log(), value_T, 0.0)


def sapo(inputs: LossInput, r_T: Tensor, a_T: Tensor) -> Tensor:
    tau_T = torch.where(a_T > 0, torch.tensor(1.0).double(), torch.tensor(1.05).double())
    gate_T = (tau_T * (r_T - 1)).sigmoid()
    return 4 * r_T * a_T * gate_T * (1 - gate_T)


def dppo_tv(inputs: LossInput, r_T: Tensor, a_T: Tensor) -> Tensor:
    moved_T = inputs.policy_logprobs_T.exp() - inputs.old_T().double().exp()
    zero_T = ((a_T > 0) & (moved_T > HIGH)) | ((a_T <= 0) & (moved_T < -LOW))
    return torch.where(zero_T, 0.0, r_T.clamp(max=20.0) * a_T)


def dppo_kl(inputs: LossInput, r_T: Tensor, a_T: Tensor) -> Tensor:
    new_T, old_T = inputs.policy_logprobs_T.exp(), inputs.old_T().double().exp()
    d_T = old_T * (old_T / new_T).log() + (1 - old_T) * ((1 - old_T) / (1 - new_T)).log()
    zero_T = ((a_T > 0) & (new_T > old_T) & (d_T > HIGH)) | ((a_T <= 0) & (new_T < old_T) & (d_T > LOW))
    return torch.where(zero_T, 0.0, r_T.clamp(max=20.0) * a_T)


def left_out(inputs: LossInput, r_T: Tensor, a_T: Tensor) -> Tensor:
    assert inputs.selected_T is not None
    return torch.where(inputs.selected_T, 0.0, clipped(r_T, a_T, r_T * a_T))


def held_back(inputs: LossInput, r_T: Tensor, a_T: Tensor) -> Tensor:
    assert inputs.selected_T is not None
    return r_T * a_T - torch.where(inputs.selected_T, r_T.log().sign(), 0.0)


def topr(inputs: LossInput, r_T: Tensor, a_T: Tensor) -> Tensor:
    s_T = sequence_mean(inputs, r_T.log()).exp()
    return torch.where(a_T < 0, s_T.clamp(0.9, 1.1), 1.0) * a_T


CLIP = {"clip_low": LOW, "clip_high": HIGH}
LOSSES: dict[str, tuple[dict[str, float], Callable[[LossInput, Tensor, Tensor], Tensor]]] = {
    "vanilla": (CLIP | {"clip_c": DUAL}, vanilla),
    "gspo": (CLIP, gspo),
    "geo_mean": ({"clip_low": 0.4, "clip_high": 0.4}, geo_mean),
    "clip_cov": (CLIP, left_out),
    "kl_cov": ({"ppo_kl_coef": 1.0}, held_back),
    "reinforce": ({}, lambda inputs, r_T, a_T: a_T),
    "gpg": ({}, lambda inputs, r_T, a_T: a_T),
    "sft": ({}, lambda inputs, r_T, a_T: torch.ones_like(a_T)),
    "cispo": (CLIP, lambda inputs, r_T, a_T: r_T.clamp(1 - LOW, 1 + HIGH) * a_T),
    "sapo": ({}, sapo),
    "topr": ({"negative_low": 0.9, "negative_high": 1.1}, topr),
    "dppo_tv": (CLIP, dppo_tv),
    "dppo_kl": (CLIP, dppo_kl),
    "dro": ({"dro_beta": 0.3}, lambda inputs, r_T, a_T: a_T - 0.3 * r_T.log()),
}


def minus_gradient(loss: Tensor, inputs: LossInput) -> Tensor:
    (gradient_T,) = torch.autograd.grad(loss, inputs.policy_logprobs_T)
    return -gradient_T


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_a_loss_over_rollouts_has_the_coefficient_that_its_docstring_gives(name: str) -> None:
    function, (options, expected) = POLICY_LOSSES.get(name), LOSSES[name]
    inputs = trial.loss_input()
    if selection_of(function):
        chosen_T = torch.arange(inputs.segments.num_tokens) % 7 == 0
        inputs = dataclasses.replace(inputs, selected_T=chosen_T)
    ratio_T = inputs.log_ratio_T().detach().exp()
    actual_T = minus_gradient(function(inputs, **options).loss_T.sum(), inputs)
    torch.testing.assert_close(actual_T, expected(inputs, ratio_T, inputs.advantages_T.double()).detach())


# ---- pairs ---------------------------------------------------------------------------------------------


def margins(inputs: LossInput, *, reference_free: bool = False, length_normalised: bool = False) -> Tensor:
    assert inputs.ref_logprobs_T is not None and inputs.group_N is not None and inputs.chosen_N is not None
    ratio_T = inputs.policy_logprobs_T.detach() - (0.0 if reference_free else inputs.ref_logprobs_T)
    ratio_N = inputs.segments.mean(ratio_T) if length_normalised else inputs.segments.sum(ratio_T)
    pairs = Pairs.of(inputs.group_N, inputs.chosen_N)
    return pairs.each_token(ratio_N[pairs.chosen_P] - ratio_N[pairs.rejected_P], inputs)


def dpo(inputs: LossInput) -> Tensor:
    h_T = 0.01 * margins(inputs)
    return 0.01 * (0.9 * (-h_T).sigmoid() - 0.1 * h_T.sigmoid())


def simpo(inputs: LossInput) -> Tensor:
    h_T = margins(inputs, reference_free=True, length_normalised=True)
    return 2.0 * (1.0 - 2.0 * h_T).sigmoid() / each_length(inputs)


def orpo(inputs: LossInput) -> Tensor:
    assert inputs.chosen_N is not None
    mean_N = inputs.segments.mean(inputs.policy_logprobs_T.detach())
    odds_N = mean_N.exp() / (1 - mean_N.exp())
    pairs = Pairs.of(inputs.group_N, inputs.chosen_N)
    s_T = pairs.each_token(odds_N[pairs.rejected_P] / (odds_N[pairs.rejected_P] + odds_N[pairs.chosen_P]), inputs)
    chosen_T = inputs.segments.broadcast(inputs.chosen_N.double())
    return (chosen_T + 0.5 * s_T / (1 - inputs.segments.broadcast(mean_N).exp())) / each_length(inputs)


def each_length(inputs: LossInput) -> Tensor:
    return inputs.segments.broadcast(inputs.segments.lengths_N.double())


PAIRED: list[tuple[str, dict[str, object], Callable[[LossInput], Tensor]]] = [
    ("dpo", {"beta": 0.01, "label_smoothing": 0.1}, dpo),
    (
        "dpo",
        {"beta": 0.5, "length_normalised": True},
        lambda inputs: 0.5 * (-0.5 * margins(inputs, length_normalised=True)).sigmoid() / each_length(inputs),
    ),
    ("ipo", {"beta": 0.2}, lambda inputs: 2 * (2.5 - margins(inputs))),
    ("dpo_hinge", {"beta": 0.02}, lambda inputs: 0.02 * (0.02 * margins(inputs) < 1).double()),
    ("simpo", {"beta": 2.0, "gamma": 1.0}, simpo),
    ("orpo", {"beta": 0.5}, orpo),
]


@pytest.mark.parametrize(("name", "options", "expected"), PAIRED)
def test_a_loss_over_pairs_has_the_coefficient_on_the_chosen_and_its_opposite_on_the_rejected_tokens(
    name: str, options: dict[str, object], expected: Callable[[LossInput], Tensor]
) -> None:
    inputs = trial.loss_input(pairs=True)
    assert inputs.chosen_N is not None
    loss_T = POLICY_LOSSES.get(name)(inputs, **options).loss_T
    # Each pair's loss stands on all tokens of its two responses: the mean over a response, halved, counts it once.
    actual_T = minus_gradient(inputs.segments.mean(loss_T).sum() / 2, inputs)
    sign_T = inputs.segments.broadcast(2.0 * inputs.chosen_N.double() - 1.0)
    torch.testing.assert_close(actual_T, sign_T * expected(inputs))
    assert shown(POLICY_LOSSES.get(name), options, coefficient_of).startswith("±")


def test_kto_has_its_coefficient_on_each_single_response() -> None:
    inputs = trial.loss_input(pairs=True)
    assert inputs.chosen_N is not None and inputs.ref_logprobs_T is not None and inputs.kl_N is not None
    loss_T = POLICY_LOSSES.get("kto")(inputs, beta=0.1, undesirable_weight=2.0).loss_T
    actual_T = minus_gradient(inputs.segments.mean(loss_T).sum(), inputs)
    ratio_N = inputs.segments.sum(inputs.policy_logprobs_T.detach() - inputs.ref_logprobs_T)
    s_N = (0.1 * (ratio_N - inputs.kl_N)).sigmoid()
    expected_N = torch.where(inputs.chosen_N, 1.0, -2.0) * 0.1 * s_N * (1 - s_N)
    torch.testing.assert_close(actual_T, inputs.segments.broadcast(expected_N))


def test_every_loss_and_every_kl_estimator_gives_its_coefficient_and_is_tried_here() -> None:
    assert {*LOSSES, *(name for name, *_ in PAIRED), "kto"} == set(POLICY_LOSSES)
    for function in [*map(POLICY_LOSSES.get, POLICY_LOSSES), *map(KL_ESTIMATORS.get, KL_ESTIMATORS)]:
        assert coefficient_of(function), function


# ---- KL ------------------------------------------------------------------------------------------------

D = Callable[[Tensor, Tensor], Tensor]
OF_KL: dict[str, D] = {
    "1": lambda d_T, r_T: torch.ones_like(d_T),
    "sign(log π - log π_ref)": lambda d_T, r_T: d_T.sign(),
    "log π - log π_ref": lambda d_T, r_T: d_T,
    "1 - π_ref/π, but 0 where a bound acts": lambda d_T, r_T: torch.where(torch.expm1(-d_T) + d_T > 10, 0.0, 1 - (-d_T).exp()),
    "r (log π - log π_ref)": lambda d_T, r_T: r_T * d_T,
}


@pytest.mark.parametrize("name", sorted(KL_ESTIMATORS))
def test_a_kl_estimator_has_the_coefficient_that_its_docstring_gives(name: str) -> None:
    inputs = trial.loss_input()
    assert inputs.ref_logprobs_T is not None
    d_T = inputs.policy_logprobs_T.detach() - inputs.ref_logprobs_T
    kl_T = kl_estimate(inputs.policy_logprobs_T, inputs.ref_logprobs_T, name, inputs.old_T())
    expected_T = OF_KL[coefficient_of(KL_ESTIMATORS.get(name))](d_T, inputs.log_ratio_T().detach().exp())
    torch.testing.assert_close(-minus_gradient(kl_T.sum(), inputs), expected_T)


def test_the_options_stand_in_the_coefficient_as_numbers() -> None:
    text = shown(POLICY_LOSSES.get("vanilla"), {"clip_low": 0.1, "clip_high": 0.3}, coefficient_of)
    assert text == "r A, but 0 where A > 0 and r > 1.3, or A < 0 and r < 0.9 or r > 3"
    text = shown(POLICY_LOSSES.get("dpo"), {"beta": 0.5, "length_normalised": True}, coefficient_of)
    assert text.startswith("± 0.5 (") and "divided by |y|" in text
