"""Episodes that are compared and not trained, and the tokens between turns, on their way to the update."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from grpo_rl.config.schema.tree import AlgorithmConfig
from grpo_rl.data.collate import collate
from grpo_rl.episode import Episode, PlayedTurn
from grpo_rl.telemetry.rollouts.rollout_log import token_record
from grpo_rl.trainer.metrics import token_values
from grpo_rl.trainer.sampled.advantage import Advantage
from grpo_rl.trainer.sampled.trained_tokens import TrainedTokens
from grpo_rl.types import Prompt, Rollout


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


def test_values_of_tokens_lie_at_the_places_of_the_turns_that_are_trained() -> None:
    rollouts = [episode(0, 1.0), episode(1, 0.0, masked=True), episode(2, 0.0)]
    batch, _ = Advantage(AlgorithmConfig(norm_adv_by_std_in_grpo=False))(collate(rollouts))
    trained, _ = TrainedTokens(AlgorithmConfig())(batch)
    advantages_T = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.5, 0.5])
    trained = trained.replace(shown_N=torch.tensor([0, 1, 2]), advantages_T=advantages_T, advantages_N=None)
    seen = token_values(rollouts, trained, {0: torch.tensor([-1.0, -2.5, -3.0, -3.5])})
    first, masked, last = (token_record(one, seen["p", one.sample_index]) for one in rollouts)
    assert first["token_ratios"] == [1.0, round(math.exp(-0.5), 4), None, None, None, 1.0, round(math.exp(0.5), 4)]
    assert first["token_advantages"] == pytest.approx([0.1, 0.2, None, None, None, 0.3, 0.4])
    assert not {"token_ratios", "token_advantages"} & masked.keys(), "nothing was trained"
    assert not {"token_ratios", "token_advantages"} & last.keys(), "no rank has seen it, and all tokens have one advantage"
