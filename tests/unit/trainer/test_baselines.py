"""Greedy responses as what the sampled ones are compared with."""

from __future__ import annotations

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
