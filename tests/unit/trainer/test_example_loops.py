"""The loops among the examples train a real model in this process (`grpo_rl.testing`)."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from pathlib import Path

import grpo_rl
from grpo_rl import testing
from grpo_rl.run_folder import Run
from grpo_rl.schedules import sync
from grpo_rl.trainer.session import Session
from grpo_rl.types import Prompt

sys.path.append(str(Path(grpo_rl.__file__).parents[1] / "examples"))

import dynamic_sampling
import on_policy_distillation
import rejection_sampling
import two_policies

ROWS = "data.train_files=task:arithmetic?num_rows=64"


def half_solved(prompt: Prompt, sample: int) -> str:
    """Every other response to a row with an odd number is right, and every response to the others."""
    is_right = sample % 2 == 0 or int(prompt.uid.rpartition("r")[2]) % 2 == 0
    return str(prompt.ground_truth) if is_right else "no idea"


def test_dynamic_sampling_fills_a_batch_with_groups_that_have_a_signal() -> None:
    with testing.session("recipe=arithmetic/grpo", ROWS, answers=half_solved) as s:
        dynamic_sampling.train(s)
        assert s.version == 2
        run = Run(s.output.run_dir.path)
        for step in (1, 2):
            trained = run.rollouts(step).dropna(subset=["advantage"])
            assert trained["uid"].nunique() == 4 and (trained["advantage"] != 0).all()


def test_rejection_sampling_learns_the_right_answers_alone() -> None:
    with testing.session("recipe=arithmetic/grpo", ROWS, answers=half_solved) as s:
        rejection_sampling.train(s)
        metrics = Run(s.output.run_dir.path).metrics()
        assert s.version == 2 and metrics["rejection/kept_fraction"].between(0.5, 1.0).all()
        assert (metrics["actor/grad_norm"] > 0).all()


def test_on_policy_distillation_is_the_recipe_of_its_name() -> None:
    losses = []
    for train in (sync.train, on_policy_distillation.train):
        with testing.session("recipe=teacher/on_policy", ROWS) as s:
            train(s)
            metrics = Run(s.output.run_dir.path).metrics()
            losses.append(metrics[["actor/loss", "actor/grad_norm"]].values.tolist())
    assert losses[0] == losses[1] and len(losses[0]) == 2


def test_of_two_policies_each_is_rewarded_for_what_comes_closer_than_the_others_answer(tmp_path: Path) -> None:
    def near(prompt: Prompt, sample: int) -> str:
        return str(prompt.ground_truth) if sample == 0 else "9999"

    def player(name: str, answers: testing.Answers) -> AbstractContextManager[Session]:
        words = (two_policies.GAME[0], ROWS, f"trainer.experiment_name={name}")
        return testing.session(*words, answers=answers, folder=tmp_path)

    with player("first", near) as first, player("second", lambda *_: "1") as second:
        two_policies.train(first, second)
        assert (first.version, second.version) == (2, 2)
        for mine, other in zip(first.sampled, second.sampled, strict=True):
            assert mine.prompt.text == other.prompt.text
            distances = [abs(int(rollout.text) - int(rollout.prompt.ground_truth)) for rollout in (mine, other)]
            assert (mine.reward, other.reward) == (distances[0] < distances[1], distances[1] < distances[0])
        assert {rollout.reward for rollout in first.sampled} == {0.0, 1.0}
