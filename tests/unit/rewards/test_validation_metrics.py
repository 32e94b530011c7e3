import dataclasses

import pytest

from grpo_rl.rewards.validation_metrics import majority, validation_metrics
from grpo_rl.telemetry.metrics.validation import validation_keys
from grpo_rl.types import Prompt, Rollout


def rollout(uid, reward, source="s", length=1, **parts):
    ids = (1,) * length
    return Rollout(
        Prompt(uid, (1,), "", source), 0, ids, (0.0,) * length, "stop", ((1, len(ids)),), reward=reward, reward_parts=parts
    )


def test_mean_and_best_are_taken_per_prompt_and_then_averaged():
    metrics = validation_metrics(
        [rollout("a", 1.0), rollout("a", 0.0), rollout("b", 0.5, length=3), rollout("b", 0.0)],
        n=2,
    )
    assert metrics["val/s/mean@2"] == pytest.approx((0.5 + 0.25) / 2)
    assert metrics["val/s/best@2"] == pytest.approx((1.0 + 0.5) / 2)
    assert metrics["val/s/response_length"] == pytest.approx(6 / 4)


def test_accuracy_is_reported_where_the_reward_gives_one_and_the_reward_beside_it():
    metrics = validation_metrics([rollout("a", 0.2, acc=0.0), rollout("b", 1.2, acc=1.0)], n=1)
    assert metrics["val/s/mean@1"] == 0.5
    assert metrics["val/s/reward"] == pytest.approx(0.7)


@pytest.mark.parametrize(
    ("votes", "expected"),
    [
        ([(1, 7), (1, 7), (0, 8)], 1.0),
        ([(1, 7), (0, 8), (0, 8)], 0.0),
        ([(1, 7), (0, 8)], 0.5),
        ([(1, 7), (0, None), (0, None)], 1.0),
        ([(1, 7), (0, 8), (0, 9)], pytest.approx(1 / 3)),
    ],
)
def test_the_majority_vote_counts_answers_and_shares_ties(votes, expected):
    assert majority(votes) == majority(votes[::-1]) == expected


def test_a_prompt_with_another_number_of_responses_or_without_reward_is_refused():
    with pytest.raises(ValueError, match="prompt a has 1 responses, expected n=2"):
        validation_metrics([rollout("a", 1.0)], n=2)
    with pytest.raises(ValueError, match="has no reward"):
        validation_metrics([rollout("a", None)], n=1)


def test_a_failed_reward_counts_as_0_whatever_it_was_given_and_is_counted():
    failed = dataclasses.replace(rollout("a", None), failure="reward_timeout")
    valued = dataclasses.replace(rollout("b", 5.0), failure="reward_error")
    metrics = validation_metrics([rollout("a", 1.0), failed, valued, rollout("b", 1.0)], n=2)
    assert (metrics["val/s/mean@2"], metrics["val/s/reward"], metrics["val/s/reward_failures"]) == (0.5, 0.5, 2.0)
    assert metrics["val/s/best@2"] == 1.0


def test_every_function_has_a_mean_of_its_own():
    parts = {"rule": 1.0, "rule/acc": 1.0, "acc": 1.0, "rule/answer": 7.0, "answer": 7.0, "format": 0.5}
    failed = dataclasses.replace(rollout("b", None, "x/y"), failure="reward_timeout")
    metrics = validation_metrics([rollout("a", 1.1, "x/y", **parts), failed], n=1)
    assert (metrics["val/x/y/rule/mean@1"], metrics["val/x/y/format/mean@1"]) == (0.5, 0.25)
    assert [key for key in metrics if "/mean@" in key] == [f"val/x/y/{name}mean@1" for name in ("rule/", "format/", "")]
    assert validation_keys(metrics) == ["val/x/y/mean@1"]
