"""Fixtures of all tests of the trainer; one reward process serves them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from real_roles import WORDS, MakeRun, Record, half_right
from test_preemption import listening
from test_sync_trainer import make

from grpo_rl import testing
from grpo_rl.config.schema.tree import RewardConfig
from grpo_rl.rewards.compose import RewardFunction
from grpo_rl.rewards.runtime.runner import RewardRunner
from grpo_rl.trainer import in_flight
from grpo_rl.trainer.run import RunLoop

__all__ = ["listening", "make"]

composed = functools.cache(testing.composed)


@pytest.fixture
def make_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeRun]:
    """Makes runs in the same folder, each after the end of the one before."""
    monkeypatch.setattr(in_flight, "LOOK_S", 0.002)  # an update of the embedded model takes a few milliseconds
    with ExitStack() as stack:

        def made(*words: str, steps: int, rows: int = 6, answers: Any = half_right, **clock: int) -> tuple[RunLoop, Record]:
            stack.close()
            data = f"data.train_files=task:arithmetic?num_rows={rows}"
            settings = composed((*WORDS, data, f"trainer.total_training_steps={steps}", *words))
            run = stack.enter_context(testing.run_loop(settings, tmp_path, answers, **clock))
            return run, Record(run)

        yield made


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
