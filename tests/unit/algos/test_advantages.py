"""Advantage estimators that compare responses: values by hand."""

from __future__ import annotations

import math

import pytest
import torch
from advantage_cases import inputs

from grpo_rl.algos.advantages.contract import AdvantageInput, token_rewards
from grpo_rl.algos.advantages.group_relative import (
    dr_grpo,
    gdpo,
    gpg,
    grpo,
    grpo_passk,
    opo,
    reinforce_plus_plus_baseline,
    rft,
)
from grpo_rl.algos.segments import Segments


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
    advantages_T = grpo(inputs([1, 0, 1, 0], [2, 1, 1, 1], [4, 4, 4, 4])).advantages_T
    a = 0.5 / (math.sqrt(1 / 3) + 1e-6)
    assert advantages_T.tolist() == pytest.approx([a, a, -a, a, -a], rel=1e-6)
    assert advantages_T.dtype == torch.float32


def test_the_standard_deviation_may_be_that_of_the_batch_by_hand() -> None:
    inp = inputs([1, 3, 5, 5], [1, 1, 1, 1], [0, 0, 1, 1])
    # deviations -1, 1, 0, 0: sample variance 2/3; rewards with mean 3.5: (6.25 + 0.25 + 2.25 + 2.25) / 3 = 11/3
    a = 1 / (math.sqrt(2 / 3) + 1e-6)
    assert grpo(inp, std="batch").advantages_T.tolist() == pytest.approx([-a, a, 0, 0], rel=1e-6)
    b = 1 / (math.sqrt(11 / 3) + 1e-6)
    assert grpo(inp, std="batch_rewards").advantages_T.tolist() == pytest.approx([-b, b, 0, 0], rel=1e-6)


def test_the_reward_of_an_empty_response_counts_in_its_group() -> None:
    assert dr_grpo(inputs([1, 4, 1], [1, 0, 2], [0, 0, 0])).advantages_T.tolist() == [-1, -1, -1]


def test_kl_in_the_reward_lowers_the_score_before_the_group_is_compared() -> None:
    # scores 1 - 0.5 * (1 + 3) = -1 and 1 - 0.5 * 2 = 0
    inp = inputs([1, 1], [2, 1], [0, 0], kl=[1.0, 3.0, 2.0], kl_coef=0.5)
    assert dr_grpo(inp).advantages_T.tolist() == [-0.5, -0.5, 0.5]


def test_opo_weighs_the_baseline_by_length_by_hand() -> None:
    # (3 * 1 + 1 * 0) / 4 = 0.75, and an empty response weighs nothing
    assert opo(inputs([1, 0, 9], [3, 1, 0], [0, 0, 0])).advantages_T.tolist() == [0.25, 0.25, 0.25, -0.75]


def test_gpg_makes_up_for_groups_without_signal_by_hand() -> None:
    # 6 rollouts, 2 of them in a group that differs: alpha = 3
    inp = inputs([1, 0, 1, 1, 0, 0], [1] * 6, [0, 0, 1, 1, 2, 2])
    assert gpg(inp).advantages_T.tolist() == [1.5, -1.5, 0, 0, 0, 0]


def test_passk_rewards_only_the_lead_of_the_best_response_by_hand() -> None:
    inp = inputs([1, 4, 2, 7, 7, 0], [1, 1, 2, 1, 1, 1], [0, 0, 0, 1, 1, 1])
    assert grpo_passk(inp, std="none").advantages_T.tolist() == [0, 2, 0, 0, 0, 0, 0]
    # 1, 4, 2: mean 7/3, sample variance (16 + 25 + 1) / 9 / 2 = 7/3
    assert grpo_passk(inp).advantages_T[1].item() == pytest.approx(2 / (math.sqrt(7 / 3) + 1e-6), rel=1e-6)


def test_gdpo_lets_a_small_reward_count_as_much_as_a_large_one_by_hand() -> None:
    base = inputs([0, 0], [1, 2], [0, 0])
    parts_NP = torch.tensor([[100.0, 0.0], [0.0, 0.5]])
    inp = AdvantageInput(base.token_rewards_T, base.lengths_N, base.group_N, base.rewards_N, reward_parts_NP=parts_NP)
    # Two members a, b lie (a - b) / 2 from their mean and have a spread of |a - b| / sqrt(2): each part gives +-1/sqrt(2).
    # 2/sqrt(2) - 1/sqrt(2) on either side, then divided by the spread of the two, which is 1
    one = 1 / math.sqrt(2)
    assert gdpo(inp, weights=[2.0, 1.0]).advantages_T.tolist() == pytest.approx([one, -one, -one], rel=1e-5)
    assert gdpo(inp, weights=[1.0, 2.0]).advantages_T.tolist() == pytest.approx([-one, one, one], rel=1e-5)
    with pytest.raises(ValueError, match="3 weights for 2 parts"):
        gdpo(inp, weights=[1.0, 1.0, 1.0])


def test_reinforce_plus_plus_baseline_whitens_over_tokens_by_hand() -> None:
    # distances 1, 1, 1, -1 over four tokens: mean 1/2, sample variance (3/4 + 9/4) / 3 = 1
    advantages_T = reinforce_plus_plus_baseline(inputs([2, 0], [3, 1], [0, 0])).advantages_T
    assert advantages_T.tolist() == pytest.approx([0.5, 0.5, 0.5, -1.5], rel=1e-6)


def test_eight_rewards_of_one_tenth_give_exactly_zero_in_float64_too() -> None:
    # 0.1 is no binary fraction: in float64 the mean of 6 of them is not 0.1.
    rewards_N = torch.full((6,), 0.1, dtype=torch.float64)
    assert sum(rewards_N.tolist()) / 6 != 0.1
    lengths_N = torch.tensor([0, 0, 0, 0, 0, 1])
    inp = AdvantageInput(torch.tensor([0.1], dtype=torch.float64), lengths_N, torch.zeros(6, dtype=torch.long), rewards_N)
    assert grpo(inp).advantages_T.tolist() == [0.0]


def test_scores_sum_the_token_rewards_and_keep_the_outcome_of_empty_responses() -> None:
    inp = inputs([1.0, 5.0], [2, 0], [0, 0], kl=[0.5, 0.25], kl_coef=1.0)
    assert inp.scores_N().tolist() == [0.25, 5.0]
    assert Segments(inp.lengths_N).num_tokens == 2


@pytest.mark.parametrize(("options", "expected"), [({}, [1.0, 0.0, 1.0, 0.0]), ({"threshold": 0.5}, [1.0, 1.0, 1.0, 0.0])])
def test_rft_learns_what_is_good_enough_and_leaves_the_others_alone(options: dict[str, float], expected: list[float]) -> None:
    lengths = [2, 1, 3, 2]
    out = rft(inputs([1.0, 0.5, 1.5, -1.0], lengths, [0, 0, 1, 1]), **options)
    assert out.advantages_T.tolist() == torch.tensor(expected).repeat_interleave(torch.tensor(lengths)).tolist()
