"""Policy losses per token: values by hand, the plain-Python reference, gradients."""

from __future__ import annotations

import math

import algos_reference as reference
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_rl.algos.policy_losses import POLICY_LOSSES
from grpo_rl.algos.segments import Segments

ALL = sorted(POLICY_LOSSES)
CLIP = {"clip_low": 0.2, "clip_high": 0.28, "clip_c": 3.0}


def one_token(name: str, ratio: float, advantage: float) -> tuple[float, float, dict[str, float]]:
    """Loss, gradient with respect to the log-prob, and statistics of a single token."""
    policy_T = torch.tensor([math.log(ratio) - 1.0], dtype=torch.float64, requires_grad=True)
    old_T = torch.tensor([-1.0], dtype=torch.float64)
    segments = Segments(torch.tensor([1]))
    loss_T, stats = POLICY_LOSSES.get(name)(policy_T, old_T, torch.tensor([advantage]), segments, **CLIP)
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


def test_the_ratio_keeps_its_digits_where_a_float32_difference_would_not() -> None:
    policy_T, old_T = torch.tensor([-0.1]), torch.tensor([-15.3])
    _, stats = POLICY_LOSSES.get("vanilla")(policy_T, old_T, torch.ones(1), Segments(torch.tensor([1])), **CLIP)
    assert stats["ratio_max"].item() == pytest.approx(math.exp(policy_T.item() - old_T.item()), rel=1e-12)


def test_reinforce_by_hand() -> None:
    value, slope, _ = one_token("reinforce", ratio=math.exp(-1), advantage=3.0)
    assert (value, slope) == (6.0, -3.0)  # log-prob -2


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight", "clipped"),
    [(1.0, 2.0, 1.0, 0), (5.0, 2.0, 1.28, 1), (5.0, -2.0, 1.28, 1), (0.1, 2.0, 0.8, 1)],
)
def test_cispo_weighs_reinforce_by_the_clipped_ratio(ratio: float, advantage: float, weight: float, clipped: int) -> None:
    value, slope, stats = one_token("cispo", ratio, advantage)
    assert value == pytest.approx(-weight * advantage * (math.log(ratio) - 1.0))
    assert slope == pytest.approx(-weight * advantage)
    assert stats["pg_clipfrac"] == clipped


@pytest.mark.parametrize(("ratio", "advantage", "tau"), [(1.0, 2.0, 1.0), (3.0, 2.0, 1.0), (0.5, -1.0, 1.05)])
def test_sapo_by_hand(ratio: float, advantage: float, tau: float) -> None:
    value, slope, _ = one_token("sapo", ratio, advantage)
    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
    assert value == pytest.approx(-advantage * gate * 4 / tau)
    assert slope == pytest.approx(-advantage * 4 * gate * (1 - gate) * ratio)


def two_responses(name: str, advantages: list[float]) -> tuple[list[float], list[float], dict[str, list[float]]]:
    """Losses, gradients and statistics for ratios (1.4, 0.9) and (0.5)."""
    old_T = torch.tensor([-1.0, -2.0, -1.0], dtype=torch.float64)
    policy_T = (old_T + torch.tensor([1.4, 0.9, 0.5]).double().log()).requires_grad_()
    segments = Segments(torch.tensor([2, 0, 1]))
    loss_T, stats = POLICY_LOSSES.get(name)(policy_T, old_T, torch.tensor(advantages), segments, **CLIP)
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


def test_gspo_token_gives_each_token_the_gradient_of_its_own_advantage() -> None:
    s = math.sqrt(1.4 * 0.9)
    assert two_responses("gspo_token", [2.0, 1.0, 0.0])[1] == pytest.approx([-2 * s, -s, 0.0], rel=1e-6)
    assert two_responses("gspo", [2.0, 1.0, 0.0])[1] == pytest.approx([-1.5 * s, -1.5 * s, 0.0], rel=1e-6)


def test_geo_mean_clips_log_ratios_on_the_paying_side_by_hand() -> None:
    losses, gradients, stats = two_responses("geo_mean", [2.0, 2.0, -1.0])
    first = math.exp((0.28 + math.log(0.9)) / 2)  # log 1.4 = 0.336 is cut to 0.28
    assert losses == pytest.approx([-2 * first, -2 * first, math.exp(-0.2)], rel=1e-6)
    assert gradients == pytest.approx([0.0, -2 * first, 0.0], rel=1e-6)
    assert stats["pg_clipfrac"] == [1, 0, 1]


def test_reinforce_with_advantage_one_is_cross_entropy() -> None:
    logits_TV = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    labels_T = torch.tensor([0, 3, 6, 2, 2])
    logprobs_T = logits_TV.log_softmax(-1).gather(1, labels_T[:, None])[:, 0]
    segments = Segments(torch.tensor([5]))
    loss_T, _ = POLICY_LOSSES.get("reinforce")(logprobs_T, logprobs_T, torch.ones(5), segments, **CLIP)
    expected_T = torch.nn.functional.cross_entropy(logits_TV, labels_T, reduction="none")
    torch.testing.assert_close(loss_T.float(), expected_T)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("extremes", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_every_loss_agrees_with_the_plain_python_reference(name: str, extremes: bool, seed: int) -> None:
    data = reference.ragged(seed, num_rollouts=20, extremes=extremes)
    advantages = [data.rewards[i % len(data.rewards)] for i in range(len(data.policy))]
    loss_T, stats = POLICY_LOSSES.get(name)(
        reference.as_float32(data.policy),
        reference.as_float32(data.old),
        reference.as_float32(advantages),
        Segments(torch.tensor(data.lengths)),
        **CLIP,
    )
    expected = reference.policy_loss(name, data, advantages, CLIP["clip_low"], CLIP["clip_high"], CLIP["clip_c"])
    assert loss_T.tolist() == pytest.approx(expected, rel=1e-6)
    assert all(len(value_T) == len(expected) and torch.isfinite(value_T).all() for value_T in stats.values())


@pytest.mark.parametrize("name", ALL)
@settings(deadline=None, max_examples=60)
@given(log_ratio=st.floats(-100, 100), advantage=st.floats(-1e3, 1e3))
def test_losses_and_gradients_are_finite_for_any_ratio(name: str, log_ratio: float, advantage: float) -> None:
    old_T = torch.tensor([-50.0])
    policy_T = torch.tensor([-50.0 + log_ratio], requires_grad=True)
    segments = Segments(torch.tensor([1]))
    loss_T, stats = POLICY_LOSSES.get(name)(policy_T, old_T, torch.tensor([advantage]), segments, **CLIP)
    loss_T.sum().backward()
    assert policy_T.grad is not None
    for value in (loss_T, policy_T.grad, *stats.values()):
        assert torch.isfinite(value).all()
    assert not any(value.requires_grad for value in stats.values())


@pytest.mark.parametrize("name", sorted(set(ALL) - reference.STOPS_GRADIENTS))
def test_gradients_of_every_loss_are_those_of_finite_differences(name: str) -> None:
    generator = torch.Generator().manual_seed(5)
    old_T = -torch.rand(12, generator=generator, dtype=torch.float64) - 0.5
    policy_T = (old_T + 0.4 * torch.randn(12, generator=generator, dtype=torch.float64)).requires_grad_()
    advantages_T = torch.randn(12, generator=generator, dtype=torch.float64)
    segments = Segments(torch.tensor([5, 0, 1, 6]))
    assert torch.autograd.gradcheck(lambda p: POLICY_LOSSES.get(name)(p, old_T, advantages_T, segments, **CLIP)[0], policy_T)
