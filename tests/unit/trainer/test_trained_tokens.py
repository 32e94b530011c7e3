"""Which tokens are trained with what weight."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from grpo_rl.config.schema.tree import AlgorithmConfig, RolloutCorrectionConfig
from grpo_rl.data.collate import collate
from grpo_rl.episode import Episode, PlayedTurn
from grpo_rl.trainer.sampled.advantage import Advantage
from grpo_rl.trainer.sampled.trained import TrainedTokens
from grpo_rl.types import Batch, Prompt, Rollout


def make_batch(d: list[float], lengths: list[int], truncated: list[bool] | None = None, old: bool = True) -> Batch:
    """A batch in which the trainer's log-probs are the engine's plus `d`."""
    rollout_T = torch.full((sum(lengths),), -2.0)
    return Batch(
        prompt_lengths_N=torch.ones(len(lengths), dtype=torch.long),
        response_lengths_N=torch.tensor(lengths),
        group_N=torch.zeros(len(lengths), dtype=torch.long),
        token_ids_S=torch.zeros(len(lengths) + sum(lengths), dtype=torch.long),
        rewards_N=torch.zeros(len(lengths)),
        rollout_logprobs_T=rollout_T,
        old_logprobs_T=rollout_T + torch.tensor(d) if old else None,
        truncated_N=torch.tensor(truncated or [False] * len(lengths)),
    )


def trained(batch: Batch, mask_truncated: bool = False, **correction: object) -> tuple[Batch, dict[str, float]]:
    config = AlgorithmConfig(mask_truncated=mask_truncated, rollout_correction=RolloutCorrectionConfig(**correction))
    return TrainedTokens(config)(batch)


def test_without_correction_nothing_is_weighed_and_the_distance_is_left_to_the_actor() -> None:
    out, metrics = trained(make_batch([0.1, -0.3], [1, 1]))
    assert out.num_trained_tokens == 2 and out.weights_T is None and metrics == {}
    assert trained(make_batch([], [1, 1], old=False))[1] == {}
    _, measured = trained(make_batch([0.1, -0.3], [1, 1]), rollout_is="token")
    assert measured["rollout_corr/kl"] == pytest.approx(0.1, abs=1e-6)
    assert measured["rollout_corr/logprob_diff_max"] == pytest.approx(0.3, abs=1e-6)


def test_what_is_outside_the_bounds_is_not_trained() -> None:
    bounds = {"rollout_rs": ["token_k1"], "rollout_rs_threshold": [2.0]}
    out, metrics = trained(make_batch([0.0, math.log(1.9), math.log(2.1), -math.log(2.1)], [3, 1]), **bounds)
    # One prompt token, then the response: the tokens 1 to 3 of the first rollout, the sixth of all in the second.
    assert (out.positions_T.tolist(), out.trained_lengths_N.tolist()) == ([1, 2], [2, 0])
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 0.5


def test_truncated_responses_are_not_trained_and_weigh_in_no_mean() -> None:
    batch = make_batch([math.log(2.0), 5.0, 5.0, math.log(4.0)], [1, 2, 1], [False, True, False])
    out, metrics = trained(
        batch, mask_truncated=True, rollout_is="token", rollout_is_threshold=10.0, rollout_is_batch_normalize=True
    )
    assert (out.positions_T.tolist(), out.trained_lengths_N.tolist()) == ([1, 6], [1, 0, 1])
    # The mean of 2 and 4, without the truncated response.
    assert out.weights_T.tolist() == pytest.approx([2 / 3, 4 / 3])
    assert metrics["rollout/masked_fraction"] == pytest.approx(1 / 3)


def test_rejections_are_made_among_the_responses_that_were_not_truncated() -> None:
    bounds = {"rollout_rs": ["seq_mean_k1"], "rollout_rs_threshold": [1.5]}
    out, _ = trained(make_batch([0.0, 0.0, 3.0], [1, 1, 1], [False, True, False]), mask_truncated=True, **bounds)
    assert (out.positions_T.tolist(), out.trained_lengths_N.tolist()) == ([1], [1, 0, 0])


def episode(sample: int, reward: float, *, masked: bool = False) -> Rollout:
    """Two turns of two tokens with three tokens of context between them."""
    turns = (PlayedTurn(0, 2), PlayedTurn(5, 2))
    ids = [10 + sample, 11, 50, 51, 52, 20 + sample, 21]
    logprobs = np.array([-1.0, -2.0, 0.0, 0.0, 0.0, -3.0, -4.0]) - sample / 10
    return Rollout(
        Prompt("p", [1, 2], "?", "t"),
        sample,
        ids,
        logprobs,
        "stop",
        ((0, 4),),
        reward=reward,
        episode=Episode(turns),
        masked=masked,
    )


def test_a_masked_episode_counts_in_its_group_and_none_of_its_tokens_is_trained() -> None:
    batch = collate([episode(0, 1.0), episode(1, 0.0, masked=True), episode(2, 0.0)])
    batch, _ = Advantage(AlgorithmConfig(norm_adv_by_std_in_grpo=False))(batch)
    assert batch.token_advantages().tolist() == pytest.approx([*[2 / 3] * 4, *[-1 / 3] * 8])
    trained, metrics = TrainedTokens(AlgorithmConfig())(batch)
    assert trained.trained_lengths_N.tolist() == [4, 0, 4]
    assert trained.token_ids_S[trained.positions_T].tolist() == [10, 11, 20, 21, 12, 11, 22, 21]
    assert metrics == {"rollout/masked_fraction": 1 / 3, "rollout/trained_token_fraction": 2 / 3}
    assert trained.counts().num_sequences == 2
