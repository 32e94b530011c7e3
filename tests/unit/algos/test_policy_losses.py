"""Policy losses per token: values by hand, the plain-Python reference, gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from objective_cases import SINGLE, inputs, own

from grpo_rl.algos.losses.covariance import between_bounds, covariances, largest
from grpo_rl.algos.losses.registered import POLICY_LOSSES, selection_of

ALL = SINGLE
CLIP = {"clip_low": 0.2, "clip_high": 0.28, "clip_c": 3.0}


def chosen_tokens(name: str, selected: list[bool]) -> dict[str, Any]:
    """The chosen tokens where the loss takes them."""
    return {} if selection_of(POLICY_LOSSES.get(name)) is None else {"selected_T": torch.tensor(selected)}


def call(
    name: str, policy_T: torch.Tensor, old_T: torch.Tensor, advantages_T: torch.Tensor, lengths: Any, **columns: Any
) -> Any:
    """The loss with those of the bounds that it takes."""
    return POLICY_LOSSES.get(name)(
        inputs(policy_T, advantages_T, lengths, old_logprobs_T=old_T, **columns), **own(name, **CLIP)
    )


def one_token(
    name: str, ratio: float, advantage: float, old: float = -1.0, selected: bool = False
) -> tuple[float, float, dict[str, float]]:
    """Loss, gradient with respect to the log-prob, and statistics of a single token."""
    policy_T = torch.tensor([math.log(ratio) + old], dtype=torch.float64, requires_grad=True)
    old_T = torch.tensor([old], dtype=torch.float64)
    loss_T, stats = call(name, policy_T, old_T, torch.tensor([advantage]), [1], **chosen_tokens(name, [selected]))
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


def test_clip_cov_takes_the_chosen_tokens_out_and_clips_the_others() -> None:
    assert one_token("clip_cov", 1.1, 2.0, selected=True)[:2] == (0.0, 0.0)
    assert one_token("clip_cov", 1.1, 2.0)[:2] == (pytest.approx(-2.2), pytest.approx(-2.2))
    assert one_token("clip_cov", 1.5, 2.0)[:2] == (pytest.approx(-2.56), 0.0)


def test_kl_cov_charges_the_chosen_tokens_for_moving_and_clips_none() -> None:
    assert one_token("kl_cov", 1.5, 2.0)[:2] == (pytest.approx(-3.0), pytest.approx(-3.0))
    assert one_token("kl_cov", 1.5, 2.0, selected=True)[:2] == (pytest.approx(-3.0 + 0.1 * math.log(1.5)), pytest.approx(-2.9))
    assert one_token("kl_cov", 0.5, 2.0, selected=True)[1] == pytest.approx(-1.1)
    assert one_token("kl_cov", 1.0, 2.0, selected=True)[1] == pytest.approx(-2.0)  # on-policy it is REINFORCE's


ADVANTAGES_OF_FOUR, LOGPROBS_OF_FOUR = torch.tensor([2.0, 2.0, -2.0, -2.0]), torch.tensor([-1.0, -3.0, -3.0, -5.0])


def test_covariances_by_hand() -> None:
    # means 0 and -3
    assert covariances(ADVANTAGES_OF_FOUR, LOGPROBS_OF_FOUR).tolist() == [4, 0, 0, 4]


def test_kl_cov_chooses_the_largest_positive_covariances_with_their_ties() -> None:
    generator = torch.Generator()
    assert largest(ADVANTAGES_OF_FOUR, LOGPROBS_OF_FOUR, generator).tolist() == [True, False, False, True]
    assert largest(ADVANTAGES_OF_FOUR, LOGPROBS_OF_FOUR, generator, kl_cov_ratio=1.0).tolist() == [True, False, False, True]
    # Advantages that are all equal covary with nothing.
    assert not largest(torch.ones(4), LOGPROBS_OF_FOUR, generator).any()
    # 1% of 1,000 tokens
    advantages_T, logprobs_T = torch.randn(2, 1000, generator=torch.Generator().manual_seed(0))
    chosen_T = largest(advantages_T, logprobs_T, generator, kl_cov_ratio=0.01)
    covariance_T = covariances(advantages_T, logprobs_T)
    assert chosen_T.sum() == 10 and covariance_T[chosen_T].min() > covariance_T[~chosen_T].max()


def test_clip_cov_chooses_at_random_between_its_bounds_and_again_the_same_by_seed() -> None:
    advantages_T, logprobs_T = torch.randn(2, 10_000, generator=torch.Generator().manual_seed(0)) * 2

    def choose(seed: int) -> torch.Tensor:
        return between_bounds(advantages_T, logprobs_T, torch.Generator().manual_seed(seed), clip_cov_ratio=0.005)

    covariance_T = covariances(advantages_T, logprobs_T)
    chosen_T = choose(1)
    assert chosen_T.sum() == 50
    assert covariance_T[chosen_T].min() > 1 and covariance_T[chosen_T].max() < 5
    assert torch.equal(choose(1), chosen_T) and not torch.equal(choose(2), chosen_T)
    assert not between_bounds(torch.ones(9), logprobs_T[:9], torch.Generator()).any()


def two_responses(name: str, advantages: list[float]) -> tuple[list[float], list[float], dict[str, list[float]]]:
    """Losses, gradients and statistics for ratios (1.4, 0.9) and (0.5)."""
    old_T = torch.tensor([-1.0, -2.0, -1.0], dtype=torch.float64)
    policy_T = (old_T + torch.tensor([1.4, 0.9, 0.5]).double().log()).requires_grad_()
    loss_T, stats = call(name, policy_T, old_T, torch.tensor(advantages), [2, 0, 1])
    loss_T.sum().backward()
    assert policy_T.grad is not None
    return loss_T.tolist(), policy_T.grad.tolist(), {key: value.tolist() for key, value in stats.items()}


def test_gspo_clips_whole_responses_by_hand() -> None:
    s = math.sqrt(1.4 * 0.9)  # 1.1225: inside, although 1.4 alone is not
    losses, gradients, stats = two_responses("gspo", [2.0, 2.0, -1.0])
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
    chosen = chosen_tokens(name, [advantage > 0])
    loss_T, stats = call(name, policy_T, old_T, torch.tensor([advantage]), [1], **chosen)
    loss_T.sum().backward()
    assert policy_T.grad is not None
    for value in (loss_T, policy_T.grad, *stats.values()):
        assert torch.isfinite(value).all()
    assert not any(value.requires_grad for value in stats.values())
