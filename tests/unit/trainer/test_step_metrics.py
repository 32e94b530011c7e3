"""The logged metrics of rollouts, batches and phases."""

from __future__ import annotations

import dataclasses
import itertools
import time

import pytest
import torch

from grpo_rl.trainer.metrics import Timer, batch_metrics, rollout_metrics
from grpo_rl.types import Batch, FinishReason, Prompt, Rollout


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


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes on by one second whenever it is read."""
    clock = itertools.count(100.0)
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))


def test_lengths_and_throughput_count_prompts_and_responses(ticking):
    batch = Batch(
        prompt_lengths_N=torch.tensor([4, 2]),
        response_lengths_N=torch.tensor([3, 0]),
        group_N=torch.tensor([0, 0]),
        token_ids_S=torch.zeros(9, dtype=torch.long),
        rewards_N=torch.zeros(2),
        rollout_logprobs_T=torch.zeros(3),
    )
    timer = Timer()
    for phase in ("gen", "update_actor"):
        with timer(phase):
            pass
    assert batch_metrics(batch, timer) == {
        "response_length/mean": 1.5,
        "response_length/max": 3.0,
        "response_length/min": 0.0,
        "prompt_length/mean": 3.0,
        "prompt_length/max": 4.0,
        "perf/total_num_tokens": 9.0,
        "perf/tokens_per_s": 4.5,
    }
