"""Greedy responses as what the sampled ones are compared with."""

from __future__ import annotations

import pytest

from grpo_rl.trainer.metrics import rollout_metrics
from grpo_rl.trainer.sampled.advantage import with_baselines
from grpo_rl.types import GREEDY, Prompt, Rollout


def rollout(uid: str, sample: int, reward: float, text: str = "same text") -> Rollout:
    return Rollout(Prompt(uid, (1,), text, "test"), sample, (2,), (-0.1,), "stop", ((1, 1),), reward=reward)


def test_each_rollout_gets_the_reward_of_the_greedy_response_to_its_own_prompt() -> None:
    given = [
        rollout("b", 0, 1.0),
        rollout("b", GREEDY, 0.5),
        rollout("a", GREEDY, -1.0),
        rollout("a", 1, 0.0),
        rollout("a", 0, 2.0),
    ]
    joined = with_baselines(given)
    assert joined == [given[0], given[3], given[4]]
    assert [each.baseline for each in joined] == [0.5, -1.0, -1.0]


def test_greedy_responses_count_in_one_metric_alone_once_per_prompt() -> None:
    metrics = rollout_metrics(
        with_baselines(
            [
                rollout("a", 0, 1.0),
                rollout("a", 1, 0.0),
                rollout("a", GREEDY, 9.0),
                rollout("b", 0, 0.5),
                rollout("b", GREEDY, 3.0),
            ]
        )
    )
    assert metrics["reward/greedy_baseline_mean"] == 6.0
    assert (metrics["reward/mean"], metrics["reward/max"]) == (0.5, 1.0)


def test_a_prompt_that_alone_has_no_greedy_response_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt b has no greedy response"):
        with_baselines([rollout("a", 0, 1.0), rollout("a", GREEDY, 1.0), rollout("b", 0, 0.0)])
