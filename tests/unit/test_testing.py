"""`grpo_rl.testing`: the roles of a run in this process, by which users test loops and functions, and these tests too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from grpo_rl import testing
from grpo_rl.errors import ConfigError, RewardError
from grpo_rl.run_folder import Run
from grpo_rl.schedules import asynchronous, sync
from grpo_rl.types import Prompt

GRPO = "recipe=arithmetic/grpo"


def alternating(prompt: Prompt, sample: int) -> str:
    """Every other response is right."""
    return str(prompt.ground_truth) if sample % 2 == 0 else "no idea"


def test_a_loop_trains_a_model_whose_engine_gets_its_weights() -> None:
    with testing.session(GRPO) as s:
        sync.train(s)
        assert (s.step, s.version, s.engine_version) == (2, 2, 1)
        metrics = Run(s.output.run_dir.path).metrics()
        assert list(metrics.index) == [1, 2] and (metrics["rollout/logprob_diff_max"] < 1e-4).all()
        folder = s.output.run_dir.path
    assert not folder.exists() and not torch.distributed.is_initialized()


def test_answers_that_a_test_gives_have_the_rewards_that_it_expects() -> None:
    with testing.session(GRPO, answers=alternating) as s:
        for step in s.steps():
            s.sync_weights()
            rollouts = s.score(s.sample(s.next_prompts()))
            assert [rollout.reward for rollout in rollouts] == [1.0, 0.0, 1.0, 0.0] * 4
            batch = s.advantages(s.logprobs(s.batch(s.select(rollouts))))
            # The sample standard deviation of 1 0 1 0 is sqrt(1/3).
            assert batch.advantages_N.tolist() == pytest.approx([0.75**0.5, -(0.75**0.5)] * 8, rel=1e-5)
            step.log(s.update(batch))
        assert s.version == 2
