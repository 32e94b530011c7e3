"""Advantage estimators: values by hand."""

from __future__ import annotations

import math
import random
from dataclasses import replace

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
from grpo_rl.algos.advantages.per_token import Steps, episode_and_turn, gae, gigpo, grpo_process, reinforce_plus_plus, remax
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


def test_responses_without_steps_and_batches_without_any_have_no_advantage() -> None:
    assert process([0, 1], [1.0, 0.0], [2, 3], [0, 0]) == [0.0, -0.5, 0.0, 0.0, 0.0]
    assert process([], [], [2, 1], [0, 0]) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("end", [-1, 3])
def test_a_step_that_ends_outside_the_batch_is_refused(end: int) -> None:
    with pytest.raises(ValueError, match=f"{end}.*0 to 2"):
        process([end], [1.0], [2, 1], [0, 0])


# ---- turns in equal states ------------------------------------------------------------------------------------

Turns = list[tuple[int, float, int]]
"""The turns of an episode: tokens, reward, state."""


def episodes(turns: list[Turns], group: list[int], order: list[int] | None = None) -> AdvantageInput:
    """Return the input of episodes whose reward is the sum of their turns' rewards, the steps in any order."""
    ends, start = [], 0
    for episode in turns:
        for length, _, _ in episode:
            start += length
            ends.append(start - 1)
    steps = [(reward, state) for episode in turns for _, reward, state in episode]
    order = list(range(len(ends))) if order is None else order
    lengths = [sum(length for length, _, _ in episode) for episode in turns]
    return replace(
        inputs([sum(reward for _, reward, _ in episode) for episode in turns], lengths, group),
        step_ends_K=torch.tensor([ends[i] for i in order], dtype=torch.long),
        step_rewards_K=torch.tensor([steps[i][0] for i in order], dtype=torch.float32),
        step_states_K=torch.tensor([steps[i][1] for i in order], dtype=torch.long),
    )


def test_turns_in_the_same_state_are_compared_by_what_they_lead_to_by_hand() -> None:
    # Both begin in state 7. The first is back there after a turn and then gains 1; the second gains 0. Episodes: 1 and 0.
    # With gamma 1/2 the turns in state 7 lead to 0.5, 1 and 0 (mean 0.5); nobody else is in state 8.
    inp = episodes([[(2, 0.0, 7), (1, 1.0, 7)], [(1, 0.0, 7), (2, 0.0, 8)]], [0, 0])
    assert gigpo(inp, gamma=HALF).advantages_T.tolist() == [0.5, 0.5, 1.0, -1.0, -0.5, -0.5]
    assert gigpo(inp, gamma=HALF, step_advantage_w=4.0).advantages_T.tolist() == [0.5, 0.5, 2.5, -2.5, -0.5, -0.5]
    divided = gigpo(inp, gamma=HALF, mode="mean_std_norm", epsilon=0.5).advantages_T.tolist()
    # 0.5 / (sqrt(0.5) + 0.5) for the episodes, 0.5 / (0.5 + 0.5) for the turns
    episode = 0.5 / (HALF**0.5 + 0.5)
    assert divided == pytest.approx([episode, episode, episode + 0.5, -episode - 0.5, -episode, -episode], rel=1e-6)
    # The same state of another prompt is another one.
    assert gigpo(replace(inp, group_N=torch.tensor([0, 1])), gamma=0.0).advantages_T.tolist() == [-0.5, -0.5, 0.5, 0, 0, 0]
    with pytest.raises(ValueError, match="mode='std'"):
        gigpo(inp, mode="std")  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mode", ["mean_norm", "mean_std_norm"])
def test_gigpo_equals_a_loop_over_every_turn(seed: int, mode: str) -> None:
    rng = random.Random(seed)
    turns = [
        [(rng.randrange(1, 5), rng.choice([0.0, 0.0, 0.25, -1.0]), rng.randrange(4)) for _ in range(rng.randrange(7))]
        for _ in range(40)
    ]
    group = [rng.randrange(5) for _ in turns]
    number = sum(map(len, turns))
    inp, gamma, weight = episodes(turns, group, rng.sample(range(number), number)), 0.9, 0.7

    def deviations(values: list[float]) -> list[float]:
        mean = sum(values) / len(values)
        std = (sum((value - mean) ** 2 for value in values) / max(1, len(values) - 1)) ** 0.5
        return [(value - mean) / (std + 1e-6) if mode == "mean_std_norm" else value - mean for value in values]

    to_come = [[sum(r * gamma**k for k, (_, r, _) in enumerate(one[t:])) for t in range(len(one))] for one in turns]
    whole, expected_N, expected_K = [sum(r for _, r, _ in one) for one in turns], [], []
    for i, one in enumerate(turns):
        peers = [j for j, other in enumerate(group) if other == group[i]]
        expected_N.append(deviations([whole[j] for j in peers])[peers.index(i)])
        for t, (_, _, state) in enumerate(one):
            alike = [(j, s) for j in peers for s, turn in enumerate(turns[j]) if turn[2] == state]
            expected_K.append(deviations([to_come[j][s] for j, s in alike])[alike.index((i, t))])
    episode_N, turn_K = episode_and_turn(inp, Steps(inp, gamma), mode, 1e-6)
    assert episode_N.dtype == turn_K.dtype == torch.float64
    assert (episode_N - torch.tensor(expected_N, dtype=torch.float64)).abs().max() < 1e-10
    assert (turn_K - torch.tensor(expected_K, dtype=torch.float64)).abs().max() < 1e-10
    of_turns = iter(expected_K)
    tokens = [expected_N[i] + weight * a for i, one in enumerate(turns) for n, _, _ in one for a in [next(of_turns)] * n]
    out = gigpo(inp, gamma=gamma, step_advantage_w=weight, mode=mode)  # type: ignore[arg-type]
    assert out.advantages_T.tolist() == pytest.approx(tokens, rel=1e-6, abs=1e-9)
