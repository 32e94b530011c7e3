"""From scored rollouts to what is trained: failures, metrics, advantages with and without the KL in the reward, masks and weights."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from grpo_rl.config.schema.tree import AlgorithmConfig, KlControlConfig, RolloutCorrectionConfig
from grpo_rl.data.collate import collate
from grpo_rl.errors import ConfigError, DivergedError
from grpo_rl.trainer.metrics import rollout_metrics
from grpo_rl.trainer.sampled.trained import Advantage, scored, trained_tokens, with_baselines, with_reward
from grpo_rl.types import GREEDY, Batch, Episode, PlayedTurn, Prompt, Rollout


def rollout(uid: str, sample: int, reward: float | None, failure: str | None = None, **more: Any) -> Rollout:
    parts = {} if reward is None else {"rule": reward}
    cause = None if failure is None else f"{uid} is too hard"
    sampled = Rollout(Prompt(uid, (1, 2), "?", "test"), sample, (3, 4), (-0.5, -0.5), "stop", ((1, 2),), reward=reward)
    return dataclasses.replace(sampled, **{"reward_parts": parts, "failure": failure, "failure_cause": cause} | more)


def make_batch(rewards: list[float], lengths: list[int], groups: list[int] | None = None, **columns: torch.Tensor) -> Batch:
    return Batch(
        prompt_lengths_N=torch.ones(len(lengths), dtype=torch.long),
        response_lengths_N=torch.tensor(lengths),
        group_N=torch.tensor(groups or [0] * len(lengths)),
        token_ids_S=torch.zeros(len(lengths) + sum(lengths), dtype=torch.long),
        rewards_N=torch.tensor(rewards),
        rollout_logprobs_T=torch.zeros(sum(lengths)),
        **columns,
    )


# ---- failures ------------------------------------------------------------------------------------------------


REWARDER: Any = SimpleNamespace(wait=lambda rollouts: rollouts)
"""Everything was scored before."""


def test_failures_are_told_in_one_line_with_kinds_and_causes_and_nothing_where_there_are_none() -> None:
    warnings: list[str] = []
    rollouts = [rollout("a", 0, 1.0), rollout("a", 1, None, "reward_timeout"), rollout("b", 0, -1.0, "reward_error")]
    assert scored(REWARDER, rollouts, warnings.append) == rollouts
    assert warnings == ["2 of 3 rewards failed (1 reward_error, 1 reward_timeout), first: a is too hard; b is too hard"]
    scored(REWARDER, rollouts[:1], warnings.append)
    assert len(warnings) == 1


def test_each_rollout_gets_the_reward_of_the_greedy_response_to_its_own_prompt() -> None:
    rollouts = [
        rollout("b", 0, 1.0),
        rollout("b", GREEDY, 0.5),
        rollout("a", GREEDY, -1.0),
        rollout("a", 1, 0.0),
        rollout("a", 0, 2.0),
    ]
    joined = with_baselines(rollouts)
    assert joined == [rollouts[0], rollouts[3], rollouts[4]]
    assert [rollout.baseline for rollout in joined] == [0.5, -1.0, -1.0]


def test_a_rollout_whose_greedy_response_failed_is_not_trained_and_keeps_its_reward() -> None:
    rollouts = [
        rollout("a", 0, 1.0),
        rollout("a", GREEDY, None, "reward_timeout"),
        rollout("b", 0, 0.5),
        rollout("b", 1, None, "reward_error"),
        rollout("b", GREEDY, 0.25),
        rollout("c", 0, 1.0),
        rollout("c", GREEDY, -1.0, "reward_error"),
    ]
    joined = with_baselines(rollouts)
    assert [(r.reward, r.failure, r.baseline) for r in joined] == [
        (1.0, "baseline_failed", None),
        (0.5, None, 0.25),
        (None, "reward_error", 0.25),
        (1.0, None, -1.0),
    ]
    assert joined[0].failure_cause == "reward_timeout: a is too hard"
    assert [(r.prompt.uid, r.sample_index) for r in with_reward(joined)] == [("b", 0), ("c", 0)]


def by_rollout(name: str, rollouts: list[Rollout]) -> dict[tuple[str, int], list[float]]:
    """Advantages of the tokens of each rollout that is trained."""
    trained = with_reward(rollouts)
    batch, _ = Advantage(AlgorithmConfig(adv_estimator=name), {"rule": 1.0})(collate(trained))
    assert batch.token_advantages() is not None
    rows = batch.token_advantages().reshape(-1, 2).tolist()
    return {(r.prompt.uid, r.sample_index): row for r, row in zip(trained, rows, strict=True)}


LOST = [("a", 0, 1.0), ("a", 1, 0.0), ("a", 2, None), ("b", 0, None), ("b", 1, 1.0), ("c", 0, None), ("c", 1, None)]
"""Groups of three, two and two, of which two, one and nothing are left."""


@pytest.mark.parametrize(("name", "high"), [("grpo", 0.5 / (0.5**0.5 + 1e-6)), ("rloo", 1.0), ("dr_grpo", 0.5)])
def test_what_is_left_of_a_group_is_compared_with_itself_and_one_that_is_left_alone_with_nothing(
    name: str, high: float
) -> None:
    # Mean 1/2, sample deviation sqrt(1/2), the other's reward 1 away: no dropped reward counts as a 0 in any of them.
    rollouts = [rollout(uid, sample, reward, None if reward is not None else "reward_error") for uid, sample, reward in LOST]
    advantages = by_rollout(name, rollouts)
    expected = {("a", 0): [high] * 2, ("a", 1): [-high] * 2, ("b", 1): [0.0, 0.0]}
    assert advantages == {key: pytest.approx(row, abs=1e-6) for key, row in expected.items()}
    assert advantages["b", 1] == [0.0, 0.0]


# ---- metrics -------------------------------------------------------------------------------------------------


def test_rewards_their_parts_and_cut_off_responses_are_averaged():
    metrics = rollout_metrics(
        [
            rollout("u", 0, 1.0, reward_parts={"right": 1.0, "form": 0.5}),
            rollout("u", 0, 0.0, reward_parts={"right": 0.0}, finish_reason="length"),
            rollout("u", 0, 0.5, reward_parts={"right": 0.5, "answer": 17.0}, finish_reason="length"),
        ]
    )
    assert metrics == pytest.approx(
        {
            "reward/mean": 0.5,
            "reward/max": 1.0,
            "reward/min": 0.0,
            "response_length/clip_ratio": 2 / 3,
            "reward/right": 0.5,
            "reward/form": 0.5,
            # Distances 1/2, 1/2 and 0 from the mean, all three counted.
            "reward/std": (1 / 6) ** 0.5,
            "reward/right/std": (1 / 6) ** 0.5,
            "reward/form/std": 0.0,
            "reward/timeouts": 0.0,
            "reward/errors": 0.0,
            "reward/invalid": 0.0,
            "reward/dropped": 0.0,
        }
    )


def test_failed_rewards_are_counted_by_kind_and_are_in_no_mean():
    failures = [
        (1.0, None),
        *[(None, f"reward_{kind}") for kind in ("timeout", "timeout", "error", "invalid")],
        (0.5, "baseline_failed"),
    ]
    metrics = rollout_metrics([rollout("u", 0, *failure) for failure in failures])
    assert metrics["reward/mean"] == 0.75
    counts = {name: metrics[f"reward/{name}"] for name in ("timeouts", "errors", "invalid", "dropped", "failed_baselines")}
    assert counts == {"timeouts": 2.0, "errors": 1.0, "invalid": 1.0, "dropped": 5.0, "failed_baselines": 1.0}


# ---- advantages ----------------------------------------------------------------------------------------------


def test_group_advantages_stand_on_every_token_and_are_summed_up():
    batch = make_batch([1.0, 0.0, 0.5, 0.5], [2, 1, 1, 3], [0, 0, 1, 1])
    out, metrics = Advantage(AlgorithmConfig())(batch)
    high = 0.5 / (0.5**0.5 + 1e-6)  # two rewards 1 and 0: mean 1/2, sample standard deviation sqrt(1/2)
    assert out.token_advantages().tolist() == pytest.approx([high, high, -high, 0, 0, 0, 0])
    assert metrics == pytest.approx({"advantage/zero_group_fraction": 0.5, "advantage/abs_mean": 3 * high / 7})
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
    coefficients = [advantage(batch)[1]["actor/reward_kl_penalty_coeff"] for _ in range(3)]
    # KL 0.3 is three times the target: the error is cut at 0.2; times 2 rollouts of 10: 4 % more each time.
    assert coefficients == pytest.approx([0.5, 0.52, 0.5408])


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


# ---- tokens and weights ----------------------------------------------------------------------------------------


def away(d: list[float], lengths: list[int], truncated: list[bool] | None = None, old: bool = True) -> Batch:
    """A batch in which the trainer's log-probs are the engine's plus `d`."""
    truncated_N = torch.tensor(truncated or [False] * len(lengths))
    batch = make_batch([0.0] * len(lengths), lengths, truncated_N=truncated_N)
    return batch.replace(old_logprobs_T=torch.tensor(d) if old else None)


def trained(batch: Batch, mask_truncated: bool = False, **correction: object) -> tuple[Batch, dict[str, float]]:
    config = AlgorithmConfig(mask_truncated=mask_truncated, rollout_correction=RolloutCorrectionConfig(**correction))
    return trained_tokens(batch, config)


def test_without_correction_nothing_is_weighed_and_the_distance_is_left_to_the_actor() -> None:
    out, metrics = trained(away([0.1, -0.3], [1, 1]))
    assert out.num_trained_tokens == 2 and out.weights_T is None and metrics == {}
    assert trained(away([], [1, 1], old=False))[1] == {}
    _, measured = trained(away([0.1, -0.3], [1, 1]), rollout_is="token")
    assert measured["rollout_corr/kl"] == pytest.approx(0.1, abs=1e-6)
    assert measured["rollout_corr/logprob_diff_max"] == pytest.approx(0.3, abs=1e-6)


def test_what_is_outside_the_bounds_is_not_trained() -> None:
    bounds = {"rollout_rs": ["token_k1"], "rollout_rs_threshold": [2.0]}
    out, metrics = trained(away([0.0, math.log(1.9), math.log(2.1), -math.log(2.1)], [3, 1]), **bounds)
    # One prompt token, then the response: the tokens 1 to 3 of the first rollout, the sixth of all in the second.
    assert (out.positions_T.tolist(), out.trained_lengths_N.tolist()) == ([1, 2], [2, 0])
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 0.5


def test_truncated_responses_are_not_trained_and_weigh_in_no_mean() -> None:
    batch = away([math.log(2.0), 5.0, 5.0, math.log(4.0)], [1, 2, 1], [False, True, False])
    out, metrics = trained(
        batch, mask_truncated=True, rollout_is="token", rollout_is_threshold=10.0, rollout_is_batch_normalize=True
    )
    assert (out.positions_T.tolist(), out.trained_lengths_N.tolist()) == ([1, 6], [1, 0, 1])
    # The mean of 2 and 4, without the truncated response.
    assert out.weights_T.tolist() == pytest.approx([2 / 3, 4 / 3])
    assert metrics["rollout/masked_fraction"] == pytest.approx(1 / 3)


def test_rejections_are_made_among_the_responses_that_were_not_truncated() -> None:
    bounds = {"rollout_rs": ["seq_mean_k1"], "rollout_rs_threshold": [1.5]}
    out, _ = trained(away([0.0, 0.0, 3.0], [1, 1, 1], [False, True, False]), mask_truncated=True, **bounds)
    assert (out.positions_T.tolist(), out.trained_lengths_N.tolist()) == ([1], [1, 0, 0])


def episode(sample: int, reward: float, *, masked: bool = False) -> Rollout:
    """Two turns of two tokens with three tokens of context between them."""
    turns = (PlayedTurn(0, 2), PlayedTurn(5, 2))
    ids = [10 + sample, 11, 50, 51, 52, 20 + sample, 21]
    logprobs = np.array([-1.0, -2.0, 0.0, 0.0, 0.0, -3.0, -4.0]) - sample / 10
    return rollout(
        "p",
        sample,
        reward,
        response_ids=ids,
        rollout_logprobs=logprobs,
        versions=((0, 4),),
        episode=Episode(turns),
        masked=masked,
    )


def test_a_masked_episode_counts_in_its_group_and_none_of_its_tokens_is_trained() -> None:
    batch = collate([episode(0, 1.0), episode(1, 0.0, masked=True), episode(2, 0.0)])
    batch, _ = Advantage(AlgorithmConfig(norm_adv_by_std_in_grpo=False))(batch)
    assert batch.token_advantages().tolist() == pytest.approx([*[2 / 3] * 4, *[-1 / 3] * 8])
    trained, metrics = trained_tokens(batch, AlgorithmConfig())
    assert trained.trained_lengths_N.tolist() == [4, 0, 4]
    assert trained.token_ids_S[trained.positions_T].tolist() == [10, 11, 20, 21, 12, 11, 22, 21]
    assert metrics == {"rollout/masked_fraction": 1 / 3, "rollout/trained_token_fraction": 2 / 3}
    assert trained.counts().num_sequences == 2
