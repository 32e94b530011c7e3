"""Rollouts without a reward of their own, from scoring to the advantages of those that are left."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_rl.config.schema.tree import AlgorithmConfig
from grpo_rl.data.collate import collate
from grpo_rl.trainer.sampled.advantage import Advantage, with_baselines
from grpo_rl.trainer.sampled.trained import scored, with_reward
from grpo_rl.types import GREEDY, Prompt, Rollout


def rollout(uid: str, sample: int, reward: float | None, failure: str | None = None) -> Rollout:
    prompt = Prompt(uid, (1, 2), "?", "test")
    parts = {} if reward is None else {"rule": reward}
    cause = None if failure is None else f"{uid} is too hard"
    made = Rollout(prompt, sample, (3, 4), (-0.5, -0.5), "stop", ((1, 2),), reward=reward, reward_parts=parts, failure=failure)
    return dataclasses.replace(made, failure_cause=cause)


REWARDER: Any = SimpleNamespace(wait=lambda rollouts: rollouts)
"""Everything was scored before."""


def test_failures_are_told_in_one_line_with_kinds_and_causes_and_nothing_where_there_are_none() -> None:
    told: list[str] = []
    given = [rollout("a", 0, 1.0), rollout("a", 1, None, "reward_timeout"), rollout("b", 0, -1.0, "reward_error")]
    assert scored(REWARDER, given, told.append) == given
    assert told == ["2 of 3 rewards failed (1 reward_error, 1 reward_timeout), first: a is too hard; b is too hard"]
    scored(REWARDER, given[:1], told.append)
    assert len(told) == 1


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


def test_a_rollout_whose_greedy_response_failed_is_not_trained_and_keeps_its_reward() -> None:
    given = [
        rollout("a", 0, 1.0),
        rollout("a", GREEDY, None, "reward_timeout"),
        rollout("b", 0, 0.5),
        rollout("b", 1, None, "reward_error"),
        rollout("b", GREEDY, 0.25),
        rollout("c", 0, 1.0),
        rollout("c", GREEDY, -1.0, "reward_error"),
    ]
    joined = with_baselines(given)
    assert [(r.reward, r.failure, r.baseline) for r in joined] == [
        (1.0, "baseline_failed", None),
        (0.5, None, 0.25),
        (None, "reward_error", 0.25),
        (1.0, None, -1.0),
    ]
    assert joined[0].failure_cause == "reward_timeout: a is too hard"
    assert [(r.prompt.uid, r.sample_index) for r in with_reward(joined)] == [("b", 0), ("c", 0)]


def by_rollout(name: str, given: list[Rollout]) -> dict[tuple[str, int], list[float]]:
    """Advantages of the tokens of each rollout that is trained."""
    trained = with_reward(given)
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
    given = [rollout(uid, sample, reward, None if reward is not None else "reward_error") for uid, sample, reward in LOST]
    found = by_rollout(name, given)
    expected = {("a", 0): [high] * 2, ("a", 1): [-high] * 2, ("b", 1): [0.0, 0.0]}
    assert found == {key: pytest.approx(row, abs=1e-6) for key, row in expected.items()}
    assert found["b", 1] == [0.0, 0.0]
