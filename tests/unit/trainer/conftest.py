"""Fixtures of all tests of the trainer; one reward process serves them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from test_preemption import listening
from test_sync_trainer import make

from grpo_rl.config.schema.tree import RewardConfig
from grpo_rl.rewards.compose import RewardFunction
from grpo_rl.rewards.runtime.runner import RewardRunner

__all__ = ["listening", "make"]


@pytest.fixture(scope="session")
def reward_process() -> Iterator[RewardRunner]:
    runner = RewardRunner(RewardFunction.from_config(RewardConfig()), RewardConfig(num_workers=1))
    yield runner
    runner.close()


@pytest.fixture
def rewarder(reward_process: RewardRunner) -> Iterator[RewardRunner]:
    """The arithmetic task's reward, without anything that an earlier test submitted and gave up."""
    yield reward_process
    reward_process._jobs.clear()
