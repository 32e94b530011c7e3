"""Advantage estimators: values by hand, the plain-Python reference, and properties of every registered one."""

from __future__ import annotations

import math
import random

import algos_reference as reference
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpo_rl.algos.advantages import ADVANTAGES, AdvantageInput, grpo, token_rewards
from grpo_rl.algos.segments import Segments

ALL = sorted(ADVANTAGES)


def inputs(
    rewards: list[float], lengths: list[int], group: list[int], kl: list[float] | None = None, kl_coef: float = 0.0
) -> AdvantageInput:
    rewards_N, lengths_N = torch.tensor(rewards, dtype=torch.float32), torch.tensor(lengths)
    kl_T = None if kl is None else torch.tensor(kl)
    return AdvantageInput(token_rewards(rewards_N, lengths_N, kl_T, kl_coef), lengths_N, torch.tensor(group), rewards_N)


def per_rollout(advantages_T: Tensor, lengths: list[int]) -> list[float]:
    """The advantage of each response, which must be the same on all its tokens."""
    values = []
    for tokens_T in advantages_T.split(lengths):
        assert (tokens_T == tokens_T[0]).all()
        values.append(tokens_T[0].item())
    return values


def test_token_rewards_put_the_outcome_on_the_last_token_and_charge_kl_on_every_one() -> None:
    rewards_N, lengths_N = torch.tensor([1.0, 9.0, -2.0]), torch.tensor([3, 0, 1])
    assert token_rewards(rewards_N, lengths_N).tolist() == [0, 0, 1, -2]
    kl_T = torch.tensor([1.0, 2.0, 4.0, 8.0])
    assert token_rewards(rewards_N, lengths_N, kl_T, kl_coef=0.5).tolist() == [-0.5, -1, -1, -6]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_a_number_is_refused_with_its_rollout(bad: float) -> None:
    with pytest.raises(ValueError, match=r"rollouts \[1\].*not finite"):
        token_rewards(torch.tensor([1.0, bad]), torch.tensor([1, 1]))


def test_grpo_of_two_right_and_two_wrong_answers_by_hand() -> None:
    # mean 1/2, sample variance (4 * 1/4) / 3 = 1/3
    advantages_T = grpo(inputs([1, 0, 1, 0], [2, 1, 1, 1], [4, 4, 4, 4]))
    a = 0.5 / (math.sqrt(1 / 3) + 1e-6)
    assert advantages_T.tolist() == pytest.approx([a, a, -a, a, -a], rel=1e-6)
    assert advantages_T.dtype == torch.float32


def test_grpo_without_the_standard_deviation_is_the_distance_to_the_mean() -> None:
    advantages_T = grpo(inputs([1, 0, 0, 3], [1, 1, 2, 1], [0, 0, 0, 0]), norm_by_std=False)
    assert advantages_T.tolist() == [0, -1, -1, -1, 2]


def test_groups_may_be_interleaved_and_differ_in_size() -> None:
    # group 7: 0, 3, 6 (mean 3); group 2: 1, 2 (mean 1.5); group 5 alone
    advantages_T = grpo(inputs([0, 1, 3, 2, 6, 4], [1] * 6, [7, 2, 7, 2, 7, 5]), norm_by_std=False)
    assert advantages_T.tolist() == [-3, -0.5, 0, 0.5, 3, 0]


def test_the_reward_of_an_empty_response_counts_in_its_group() -> None:
    advantages_T = grpo(inputs([1, 4, 1], [1, 0, 2], [0, 0, 0]), norm_by_std=False)
    assert advantages_T.tolist() == [-1, -1, -1]


def test_kl_in_the_reward_lowers_the_score_before_the_group_is_compared() -> None:
    # scores 1 - 0.5 * (1 + 3) = -1 and 1 - 0.5 * 2 = 0
    advantages_T = grpo(inputs([1, 1], [2, 1], [0, 0], kl=[1.0, 3.0, 2.0], kl_coef=0.5), norm_by_std=False)
    assert advantages_T.tolist() == [-0.5, -0.5, 0.5]


@pytest.mark.parametrize("norm_by_std", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_grpo_agrees_with_the_plain_python_reference(seed: int, norm_by_std: bool) -> None:
    data = reference.ragged(seed, num_rollouts=20)
    kl = [abs(p - r) for p, r in zip(data.policy, data.ref, strict=True)]
    inp = inputs(data.rewards, data.lengths, data.group, kl, kl_coef=0.01)
    expected = reference.grpo(data.nested(inp.token_rewards_T.tolist()), data.rewards, data.group, norm_by_std)
    expected_flat = [value for response in expected for value in response]
    assert grpo(inp, norm_by_std=norm_by_std).tolist() == pytest.approx(expected_flat, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("name", ALL)
@settings(deadline=None, max_examples=40)
@given(
    reward=st.floats(-1e6, 1e6, width=32),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    length=st.integers(1, 3),
)
def test_groups_of_equal_rewards_and_groups_of_one_give_exactly_zero(
    name: str, reward: float, sizes: list[int], length: int
) -> None:
    group = [g for g, size in enumerate(sizes) for _ in range(size)]
    rewards = [reward * (g + 1) if size > 1 else reward for g, size in enumerate(sizes) for _ in range(size)]
    advantages_T = ADVANTAGES.get(name)(inputs(rewards, [length] * len(group), group))
    assert len(advantages_T) == length * len(group)
    assert (advantages_T == 0).all()


def test_eight_rewards_of_one_tenth_give_exactly_zero_in_float64_too() -> None:
    # 0.1 is no binary fraction: in float64 the mean of 6 of them is not 0.1.
    rewards_N = torch.full((6,), 0.1, dtype=torch.float64)
    assert sum(rewards_N.tolist()) / 6 != 0.1
    lengths_N = torch.tensor([0, 0, 0, 0, 0, 1])
    inp = AdvantageInput(torch.tensor([0.1], dtype=torch.float64), lengths_N, torch.zeros(6, dtype=torch.long), rewards_N)
    assert grpo(inp).tolist() == [0.0]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("seed", range(3))
def test_permuting_the_rollouts_permutes_the_advantages(name: str, seed: int) -> None:
    data = reference.ragged(seed)
    order = list(range(len(data.lengths)))
    random.Random(seed).shuffle(order)
    permuted = data.select(order)
    estimator = ADVANTAGES.get(name)
    before = data.nested(estimator(inputs(data.rewards, data.lengths, data.group)).tolist())
    after = permuted.nested(estimator(inputs(permuted.rewards, permuted.lengths, permuted.group)).tolist())
    for position, i in enumerate(order):
        assert after[position] == pytest.approx(before[i], rel=1e-6)


@pytest.mark.parametrize("norm_by_std", [True, False])
def test_a_constant_added_to_a_group_changes_nothing_and_a_factor_only_the_plain_form(norm_by_std: bool) -> None:
    data = reference.ragged(1)
    rewards = [round(reward * 8) / 8 for reward in data.rewards]  # exact in float32 after the shift, too
    shift = {g: 16.0 * k for k, g in enumerate(sorted(set(data.group)))}
    shifted = [reward + shift[g] for reward, g in zip(rewards, data.group, strict=True)]
    scaled = [4.0 * reward for reward in rewards]

    def advantages(values: list[float]) -> Tensor:
        return grpo(inputs(values, data.lengths, data.group), norm_by_std=norm_by_std)

    base_T = advantages(rewards)
    assert base_T.abs().max() > 0.5
    torch.testing.assert_close(advantages(shifted), base_T, rtol=1e-6, atol=1e-7)
    expected_T = base_T if norm_by_std else 4.0 * base_T
    torch.testing.assert_close(advantages(scaled), expected_T, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ALL)
def test_a_batch_of_empty_responses_has_no_advantages(name: str) -> None:
    assert ADVANTAGES.get(name)(inputs([1.0, 0.0], [0, 0], [0, 0])).tolist() == []


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.floats(-1e9, 1e9, width=32)), min_size=1, max_size=10))
def test_grpo_is_finite_centred_and_has_unit_spread_in_every_group(rows: list[tuple[int, int, float]]) -> None:
    group, lengths, rewards = (list(column) for column in zip(*rows, strict=True))
    advantages_T = grpo(inputs(rewards, [length + 1 for length in lengths], group))
    assert torch.isfinite(advantages_T).all()
    values = per_rollout(advantages_T, [length + 1 for length in lengths])
    for g in set(group):
        members = [value for value, h in zip(values, group, strict=True) if h == g]
        assert sum(members) == pytest.approx(0, abs=1e-4)
        spread = sum(value**2 for value in members) / max(len(members) - 1, 1)
        assert spread <= 1 + 1e-5


def test_scores_sum_the_token_rewards_and_keep_the_outcome_of_empty_responses() -> None:
    inp = inputs([1.0, 5.0], [2, 0], [0, 0], kl=[0.5, 0.25], kl_coef=1.0)
    assert inp.scores_N().tolist() == [0.25, 5.0]
    assert Segments(inp.lengths_N).num_tokens == 2
