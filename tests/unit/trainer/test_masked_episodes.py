"""Episodes that are compared and not trained, and the tokens between turns, on their way to the update."""

from __future__ import annotations

import numpy as np
import pytest

from grpo_rl.config.schema.tree import AlgorithmConfig
from grpo_rl.data.collate import collate
from grpo_rl.episode import Episode, PlayedTurn
from grpo_rl.trainer.sampled.advantage import Advantage
from grpo_rl.trainer.sampled.trained import TrainedTokens
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
