"""The logged metrics of rollouts, batches and phases."""

from __future__ import annotations

import dataclasses

import pytest

from grpo_rl.trainer.metrics import rollout_metrics
from grpo_rl.types import FinishReason, Prompt, Rollout


def rollout(reward: float | None, finish: FinishReason = "stop", **parts: float) -> Rollout:
    return Rollout(
        Prompt("u", (1,), "?", "test"), 0, (2, 3), (-0.5, -0.5), finish, ((1, 2),), reward=reward, reward_parts=parts
    )


def test_rewards_their_parts_and_cut_off_responses_are_averaged():
    metrics = rollout_metrics(
        [rollout(1.0, right=1.0, form=0.5), rollout(0.0, "length", right=0.0), rollout(0.5, "length", right=0.5, answer=17.0)]
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


def failed(kind: str, reward: float | None = None) -> Rollout:
    return dataclasses.replace(rollout(reward), failure=kind, failure_cause="because")


def test_failed_rewards_are_counted_by_kind_and_are_in_no_mean():
    rollouts = [
        rollout(1.0),
        failed("reward_timeout"),
        failed("reward_timeout"),
        failed("reward_error"),
        failed("reward_invalid"),
    ]
    metrics = rollout_metrics([*rollouts, failed("baseline_failed", 0.5)])
    assert metrics["reward/mean"] == 0.75
    counts = {name: metrics[f"reward/{name}"] for name in ("timeouts", "errors", "invalid", "dropped", "failed_baselines")}
    assert counts == {"timeouts": 2.0, "errors": 1.0, "invalid": 1.0, "dropped": 5.0, "failed_baselines": 1.0}
