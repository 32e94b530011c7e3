"""Rules and models as one reward."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from grpo_rl.config.schema.tree import RewardConfig
from grpo_rl.errors import RewardError
from grpo_rl.rewards.combined import CombinedRewarder
from grpo_rl.rewards.contract import Outcome, RewardFailure, RewardResult
from grpo_rl.types import Prompt, Rollout

BROKEN = 9


def rollout(sample: int) -> Rollout:
    return Rollout(Prompt("p", (1,), "", "test"), sample, (1, 2), (0.0, 0.0), "stop", ((0, 2),))


class Rules:
    """2 * the sample's number, as two rules would give it."""

    def __init__(self) -> None:
        self.factors = {"length": 2.0}
        self.submitted: list[int] = []

    def submit(self, item: Rollout) -> None:
        self.submitted.append(item.sample_index)

    def wait(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        for item in rollouts:
            if item.sample_index == BROKEN:
                item.reward, item.failure, item.failure_cause = None, "reward_error", "by zero"
                continue
            item.reward, item.reward_parts, item.steps = 2.0 * item.sample_index, {"length": float(item.sample_index)}, None
        return list(rollouts)


class Model:
    """Says what it was told to, by the sample's number."""

    def __init__(self, name: str, weight: float, results: dict[int, Outcome]) -> None:
        self.name, self.weight, self.results = name, weight, results
        self.submitted: list[int] = []
        self.closed = threading.Event()

    def submit(self, item: Rollout) -> None:
        self.submitted.append(item.sample_index)

    def wait(self, rollouts: Sequence[Rollout]) -> list[Outcome]:
        return [self.results[item.sample_index] for item in rollouts]

    def close(self) -> None:
        self.closed.set()


def test_the_reward_is_the_rules_plus_each_weight_times_its_models_score():
    scorer = Model("reward_model", 0.5, {0: RewardResult(3.0), 1: RewardResult(-1.0)})
    judge = Model("judge", 0.1, {0: RewardResult(10.0, values={"words": 7.0}), 1: RewardResult(5.0)})
    rewarder = CombinedRewarder(Rules(), [scorer, judge], RewardConfig())
    assert rewarder.factors == {"length": 2.0, "reward_model": 0.5, "judge": 0.1}
    first, second = rewarder.wait([rollout(0), rollout(1)])
    assert first.reward == pytest.approx(0.0 + 1.5 + 1.0) and second.reward == pytest.approx(2.0 - 0.5 + 0.5)
    assert first.reward_parts == {"length": 0.0, "reward_model": 3.0, "judge": 10.0, "judge/words": 7.0}
    # What groups are chosen by is added up from the parts.
    assert sum(rewarder.factors[name] * first.reward_parts[name] for name in rewarder.factors) == pytest.approx(first.reward)


def test_steps_of_a_model_get_its_weight():
    model = Model("reward_model", 0.5, {0: RewardResult(1.0, steps=((0, 3.0), (1, -1.0)))})
    (item,) = CombinedRewarder(Rules(), [model], RewardConfig()).wait([rollout(0)])
    assert item.steps == ((0, 1.5), (1, -0.5)) and item.reward == 0.5


def test_everything_starts_when_a_response_ends():
    rules, model = Rules(), Model("judge", 1.0, {})
    rewarder = CombinedRewarder(rules, [model], RewardConfig())
    rewarder.submit(rollout(3))
    assert (rules.submitted, model.submitted) == ([3], [3])
    rewarder.close()
    assert model.closed.is_set()


FAILED = RewardFailure("judge_timeout", "too slow")


def failing(**settings: object) -> CombinedRewarder:
    """A judge that answers for sample 0 only; the rules break at sample 9."""
    results = {0: RewardResult(1.0), 1: FAILED, BROKEN: RewardResult(1.0)}
    return CombinedRewarder(
        Rules(),
        [Model("judge", 1.0, results), Model("later", 1.0, dict.fromkeys(results, RewardResult(5.0)))],
        RewardConfig(**settings),
    )


def test_a_failure_is_dropped_with_its_kind_and_cause_and_never_scored_0():
    good, failed, broken = failing().wait([rollout(0), rollout(1), rollout(BROKEN)])
    assert (good.failure, good.reward) == (None, 6.0)
    assert (failed.failure, failed.reward, failed.reward_parts) == ("judge_timeout", None, {})
    assert failed.failure_cause == "judge for prompt p, sample 1: too slow"
    # What the rules could not score no model makes good.
    assert (broken.failure, broken.failure_cause, broken.reward) == ("reward_error", "by zero", None)


def test_a_failure_stops_the_run_where_it_shall_and_always_when_all_failed():
    with pytest.raises(RewardError, match=r"1 of 2 rewards failed \(1 judge_timeout\).*sample 1: too slow.*on_failure=stop"):
        failing(on_failure="stop").wait([rollout(0), rollout(1)])
    with pytest.raises(RewardError, match="no response has a reward: 1 of 1"):
        failing(on_failure="value", failure_value=0.0).wait([rollout(1)])


def test_with_models_alone_the_rules_reward_is_a_part_that_counts_nothing():
    scorer = Model("reward_model", 0.5, {0: RewardResult(3.0), 1: RewardResult(-1.0), BROKEN: RewardResult(7.0)})
    rewarder = CombinedRewarder(Rules(), [scorer], RewardConfig(), models_alone=True)
    first, second, broken = rewarder.wait([rollout(0), rollout(1), rollout(BROKEN)])
    assert (first.reward, second.reward) == (1.5, -0.5) and rewarder.factors == {"by-rule": 0.0, "reward_model": 0.5}
    assert second.reward_parts == {"length": 1.0, "by-rule": 2.0, "reward_model": -1.0}
    assert (broken.reward, broken.failure) == (None, "reward_error"), "a response without a label is none"


def test_a_score_of_a_model_that_takes_the_sum_beyond_float32_fails_its_rollout_and_no_other():
    model = Model("judge", 2.0, {0: RewardResult(1.0), 1: RewardResult(3e38)})
    rollouts = [rollout(0), rollout(1)]
    CombinedRewarder(Rules(), [model], RewardConfig()).wait(rollouts)
    assert (rollouts[0].reward, rollouts[0].failure) == (2.0, None)
    assert (rollouts[1].reward, rollouts[1].failure) == (None, "reward_invalid")
    assert "sample 1: the sum of all rewards is 6e+38, beyond float32" in str(rollouts[1].failure_cause)
