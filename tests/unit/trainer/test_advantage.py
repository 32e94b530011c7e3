"""The way from rewards to advantages, with and without the KL in the reward."""

from __future__ import annotations

import pytest
import torch

from grpo_rl.config.schema.tree import AlgorithmConfig, KlControlConfig
from grpo_rl.errors import ConfigError, DivergedError
from grpo_rl.trainer.sampled.advantage import Advantage
from grpo_rl.types import Batch


def make_batch(rewards: list[float], lengths: list[int], groups: list[int], **columns: torch.Tensor) -> Batch:
    return Batch(
        prompt_lengths_N=torch.ones(len(lengths), dtype=torch.long),
        response_lengths_N=torch.tensor(lengths),
        group_N=torch.tensor(groups),
        token_ids_S=torch.zeros(len(lengths) + sum(lengths), dtype=torch.long),
        rewards_N=torch.tensor(rewards),
        rollout_logprobs_T=torch.zeros(sum(lengths)),
        **columns,
    )


def test_group_advantages_stand_on_every_token_and_are_summed_up():
    batch = make_batch([1.0, 0.0, 0.5, 0.5], [2, 1, 1, 3], [0, 0, 1, 1])
    out, metrics = Advantage(AlgorithmConfig())(batch)
    one = 0.5 / (0.5**0.5 + 1e-6)  # two rewards 1 and 0: mean 1/2, sample standard deviation sqrt(1/2)
    assert out.token_advantages().tolist() == pytest.approx([one, one, -one, 0, 0, 0, 0])
    assert metrics == pytest.approx({"advantage/zero_group_fraction": 0.5, "advantage/abs_mean": 3 * one / 7})
    assert batch.advantages_T is None


def test_an_estimator_with_a_critic_and_without_returns_is_refused(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from grpo_rl.algos.advantages.registered import AdvantageOutput, needs\n"
        "@needs('values')\ndef mine(inp):\n    return AdvantageOutput(inp.values_T)\n"
    )
    with pytest.raises(ConfigError, match="gives no returns_T"):
        Advantage(AlgorithmConfig(adv_estimator=f"{file}:mine"))(make_batch([1.0], [2], [0], values_T=torch.zeros(2)))


@pytest.mark.parametrize(("column", "name"), [("ref", "the reference's"), ("rollout", "the engine's"), ("old", "the old")])
@pytest.mark.parametrize("value", [float("-inf"), float("nan")])
def test_log_probs_that_are_not_finite_are_named_with_their_rollout(column, name, value):
    logprobs_T = torch.tensor([-1.0, -1.0, value])
    batch = make_batch([1.0, 0.0], [2, 1], [0, 0]).replace(**{f"{column}_logprobs_T": logprobs_T})
    with pytest.raises(DivergedError, match=rf"{name} log-probs are not finite at 1 of 3 tokens.* in rollouts \[1\] of 2"):
        Advantage(AlgorithmConfig())(batch)


def test_steps_are_counted_from_their_own_responses_beginning():
    steps = {"num_steps_N": [2, 0, 1], "step_ends_K": [0, 2, 1], "step_rewards_K": [1.0, 0.0, 0.5]}
    columns = {name: torch.tensor(values) for name, values in steps.items()}
    batch = make_batch([1.0, 0.0, 0.0], [3, 2, 3], [0, 0, 0], **columns)
    out, _ = Advantage(AlgorithmConfig(adv_estimator="grpo_process"))(batch)
    # Step rewards 1, 0 and 1/2: mean 1/2, sample standard deviation 1/2.
    assert out.token_advantages().tolist() == pytest.approx([0.0, -1.0, -1.0, 0.0, 0.0, 0.0, 0.0, 0.0], abs=1e-5)


def test_turns_are_compared_with_those_in_their_state_and_the_share_that_has_such_is_logged():
    steps = {"num_steps_N": [2, 1], "step_ends_K": [0, 2, 1], "step_rewards_K": [0.0, 1.0, 0.0], "step_states_K": [7, 8, 7]}
    columns = {name: torch.tensor(values) for name, values in steps.items()}
    batch = make_batch([1.0, 0.0], [3, 2], [0, 0], **columns)
    config = AlgorithmConfig(adv_estimator="gigpo", gamma=0.5, adv_options={"step_advantage_w": 2.0})
    out, metrics = Advantage(config)(batch)
    # Episodes: 1 and 0. The turns in state 7 lead to 0.5 and 0.
    assert out.token_advantages().tolist() == [1.0, 0.5, 0.5, -1.0, -1.0]
    assert metrics["advantage/shared_state_fraction"] == pytest.approx(2 / 3)


# ---- KL in the reward --------------------------------------------------------------------------------

# Two responses of two tokens and one; old - ref is 0.2, 0.4 on the first and -0.3 on the second.
WITH_KL = {"old_logprobs_T": torch.tensor([-1.0, -1.0, -1.0]), "ref_logprobs_T": torch.tensor([-1.2, -1.4, -0.7])}


def kl_config(**control: object) -> AlgorithmConfig:
    return AlgorithmConfig(norm_adv_by_std_in_grpo=False, use_kl_in_reward=True, kl_ctrl=KlControlConfig(**control))


def test_the_kl_is_taken_off_the_reward_of_each_token():
    out, metrics = Advantage(kl_config(kl_coef=0.5))(make_batch([1.0, 0.0], [2, 1], [0, 0], **WITH_KL))
    # Scores: 1 - 0.5 * 0.6 = 0.7 and 0 + 0.5 * 0.3 = 0.15; their mean is 0.425.
    assert out.token_advantages().tolist() == pytest.approx([0.275, 0.275, -0.275])
    # Mean per response, then over responses: (0.3 - 0.3) / 2.
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.5


def test_the_adaptive_coefficient_is_used_first_and_steered_after():
    columns = WITH_KL | {"ref_logprobs_T": torch.tensor([-1.2, -1.4, -1.3])}
    batch = make_batch([1.0, 0.0], [2, 1], [0, 0], **columns)
    advantage = Advantage(kl_config(type="adaptive", kl_coef=0.5, target_kl=0.1, horizon=10))
    seen = [advantage(batch)[1]["actor/reward_kl_penalty_coeff"] for _ in range(3)]
    # KL 0.3 is three times the target: the error is cut at 0.2; times 2 rollouts of 10: 4 % more each time.
    assert seen == pytest.approx([0.5, 0.52, 0.5408])


# ---- other estimators --------------------------------------------------------------------------------


def test_parts_of_the_reward_are_weighed_by_their_factors():
    parts = torch.tensor([[1.0, 0.0], [0.0, 10.0]])
    batch = make_batch([1.0, 1.0], [1, 1], [0, 0], reward_parts_NP=parts)
    estimate = Advantage(AlgorithmConfig(adv_estimator="gdpo"), {"answer": 1.0, "length": 0.25})
    assert estimate.parts == ("answer", "length")
    out, _ = estimate(batch)
    # Each part by itself is ± sqrt(1/2) whatever its size: 3/4 of it remains, and is brought to unit spread.
    assert out.token_advantages().tolist() == pytest.approx([0.5**0.5, -(0.5**0.5)], rel=1e-4)
    assert Advantage(AlgorithmConfig(), {"answer": 1.0}).parts == ()
    named = Advantage(AlgorithmConfig(adv_estimator="gdpo", reward_parts=["acc", "format"]), {"compute_score": 1.0})
    assert named.parts == ("acc", "format") and "weights" not in named.options


TURNS = {
    "num_steps_N": torch.tensor([2, 1]),
    "step_ends_K": torch.tensor([0, 2, 1]),
    "step_rewards_K": torch.tensor([1.0, 2.0, 4.0]),
}


def test_the_rewards_of_turns_lie_where_their_turns_end_for_estimators_that_follow_them_from_token_to_token():
    batch = make_batch([3.0, 4.0], [3, 2], [0, 1], values_T=torch.zeros(5), **TURNS)
    config = AlgorithmConfig(adv_estimator="gae", gamma=0.5, adv_options={"whiten": False})
    out, _ = Advantage(config, of_turns=True)(batch)
    assert out.token_advantages().tolist() == [1.0 + 0.25 * 2, 0.5 * 2, 2.0, 2.0, 4.0]
    # Without episodes the steps are another reward's, and the outcome is at the end.
    out, _ = Advantage(config)(batch)
    assert out.token_advantages().tolist() == [0.75, 1.5, 3.0, 2.0, 4.0]
