"""Advantage estimators that differ from token to token: values by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from advantage_cases import inputs

from grpo_rl.algos.advantages.contract import AdvantageInput
from grpo_rl.algos.advantages.per_token import gae, grpo_process, reinforce_plus_plus, remax

HALF = 0.5


def with_values(values: list[float]) -> AdvantageInput:
    """Responses of 2 and 1 tokens with outcomes 1 and 0."""
    return replace(inputs([1, 0], [2, 1], [0, 1]), values_T=torch.tensor(values))


def test_gae_by_hand() -> None:
    # first response: delta_1 = 1 - 0.25 = 0.75, delta_0 = 0 + 0.5 * 0.25 - 0.5 = -0.375;
    # A_1 = 0.75, A_0 = -0.375 + 0.25 * 0.75 = -0.1875. Second: 0 - 0.125.
    out = gae(with_values([0.5, 0.25, 0.125]), gamma=0.5, lam=0.5, whiten=False)
    assert out.advantages_T.tolist() == [-0.1875, 0.75, -0.125]
    assert out.returns_T is not None and out.returns_T.tolist() == [0.3125, 1.0, 0.0]


def test_gae_whitens_the_advantages_and_not_the_returns_by_hand() -> None:
    # gamma = lam = 1: A = reward to go - V = 1, 0, -1: mean 0, sample variance 1
    out = gae(with_values([0.0, 1.0, 1.0]))
    assert out.advantages_T.tolist() == pytest.approx([1, 0, -1], rel=1e-6)
    assert out.returns_T is not None and out.returns_T.tolist() == [1, 1, 0]


def test_gae_is_the_temporal_difference_for_lam_0_and_the_reward_to_go_minus_value_for_lam_1() -> None:
    inp = with_values([0.5, 0.25, 0.125])
    assert gae(inp, lam=0.0, whiten=False).advantages_T.tolist() == [-0.25, 0.75, -0.125]
    assert gae(inp, lam=1.0, whiten=False).advantages_T.tolist() == [0.5, 0.75, -0.125]


@pytest.mark.parametrize("bad", [{"gamma": 1.5}, {"lam": -0.1}])
def test_a_discount_outside_its_range_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="from 0 to 1"):
        gae(with_values([0.0, 0.0, 0.0]), **bad)
    with pytest.raises(ValueError, match="between 0 and 1"):
        reinforce_plus_plus(inputs([1.0], [2], [0]), gamma=1.5)


def test_reinforce_plus_plus_whitens_the_discounted_reward_to_go_by_hand() -> None:
    # to go with gamma 1/2: 0.5, 1 and 0 (mean 0.5, sample variance 0.25)
    out = reinforce_plus_plus(inputs([1, 0], [2, 1], [0, 0]), gamma=HALF)
    assert out.returns_T is not None and out.returns_T.tolist() == [0.5, 1, 0]
    assert out.advantages_T.tolist() == pytest.approx([0, 1, -1], rel=1e-6, abs=1e-12)


def test_reinforce_plus_plus_gives_exactly_zero_where_all_rewards_are_equal() -> None:
    assert reinforce_plus_plus(inputs([0.1] * 7, [1, 2, 3, 0, 4, 5, 40], [0] * 7)).advantages_T.tolist() == [0.0] * 55


def test_remax_compares_the_reward_to_go_with_the_greedy_response_by_hand() -> None:
    inp = inputs([1, 0], [2, 1], [0, 1], kl=[0.5, 0.25, 1.0], kl_coef=1.0)
    out = remax(replace(inp, baselines_N=torch.tensor([0.5, -1.0])))
    assert out.returns_T is not None and out.returns_T.tolist() == [0.25, 0.75, -1.0]
    assert out.advantages_T.tolist() == [-0.25, 0.25, 0.0]


def process(
    ends: list[int], rewards: list[float], lengths: list[int], group: list[int], std: str = "none", gamma: float = 1.0
) -> list[float]:
    inp = replace(
        inputs([0.0] * len(lengths), lengths, group),
        step_ends_K=torch.tensor(ends, dtype=torch.long),
        step_rewards_K=torch.tensor(rewards),
    )
    return grpo_process(inp, std=std, gamma=gamma).advantages_T.tolist()  # type: ignore[arg-type]


def test_process_supervision_sums_the_steps_to_come_by_hand() -> None:
    # Group 0: step rewards 1 and 0 (tokens 1 and 3 of the first response), 2 (first token of the second): mean 1.
    # Group 1: 5 and 3: mean 4. In any order; after the last step of a response there is 0.
    assert process([6, 3, 1, 8, 4], [3.0, 0.0, 1.0, 5.0, 2.0], [4, 2, 0, 3], [0, 0, 0, 1]) == [
        *(-1.0, -1.0, -1.0, -1.0),  # 0 + (-1), then the step before is over
        *(1.0, 0.0),
        *(0.0, 1.0, 1.0),  # -1 + 1, then 1
    ]


def test_a_later_step_counts_less_with_a_discount_by_steps() -> None:
    # Rewards 4, 0 and 2 of one response, mean 2: deviations 2, -2 and 0; before the first step 2 + 0.5 * (-2) + 0.25 * 0.
    assert process([1, 2, 4], [4.0, 0.0, 2.0], [6], [0], gamma=0.5) == [1.0, 1.0, -2.0, 0.0, 0.0, 0.0]
    with pytest.raises(ValueError, match=r"gamma=1\.5"):
        process([0], [1.0], [1], [0], gamma=1.5)


def test_responses_without_steps_and_batches_without_any_have_no_advantage() -> None:
    assert process([0, 1], [1.0, 0.0], [2, 3], [0, 0]) == [0.0, -0.5, 0.0, 0.0, 0.0]
    assert process([], [], [2, 1], [0, 0]) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("end", [-1, 3])
def test_a_step_that_ends_outside_the_batch_is_refused(end: int) -> None:
    with pytest.raises(ValueError, match=f"{end}.*0 to 2"):
        process([end], [1.0], [2, 1], [0, 0])
