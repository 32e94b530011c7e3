"""Iterations: what is trained when, on which reward, and that a run goes on from any step as if nothing had been."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_sync_trainer import Part, Policy, dataset, make_config, run_of

from grpo_rl.config.schema.trainer import IterateConfig
from grpo_rl.rewards.combined import RULE, CombinedRewarder
from grpo_rl.rewards.contract import Outcome, RewardFailure, RewardResult
from grpo_rl.rewards.runtime.runner import RewardRunner
from grpo_rl.schedules.iterate import agreement
from grpo_rl.telemetry.metrics.metrics_file import read_metrics
from grpo_rl.telemetry.rollout_log import read_rollouts
from grpo_rl.telemetry.rundir import RunDir
from grpo_rl.trainer.parts import Roles
from grpo_rl.trainer.replay import PairReplay
from grpo_rl.trainer.run import RunLoop
from grpo_rl.types import Batch, Metrics, Prompt, Rollout


class MovingReference(Part):
    """The version of the policy that it became last; its log-probs are that number."""

    file, number, value = "reference", "value", 0.0

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def become(self, actor: Any) -> None:
        self.value = float(actor.version)
        self.calls.append(f"reference <- {actor.version}")

    def logprobs(self, batch: Batch) -> Batch:
        self.calls.append("ref")
        return batch.replace(ref_logprobs_T=torch.full_like(batch.rollout_logprobs_T, self.value))


class Model(Part):
    """The trained reward model and the one that scores: of opposite opinion to the rules, more so with every update."""

    name, weight = "reward_model", 2.0
    file, number, value = "reward_model", "value", 0.0

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls
        self.batches: list[Batch] = []
        self.fails = False

    def submit(self, rollout: Rollout) -> None:
        pass

    def wait(self, rollouts: Sequence[Rollout]) -> list[Outcome]:
        if self.fails:
            return [RewardFailure("reward_model_error", "")] * len(rollouts)
        return [RewardResult(self.value + (r.text == "no idea") + 0.25 * (r.sample_index == 0)) for r in rollouts]

    def close(self) -> None:
        pass

    def update(self, batch: Batch) -> Metrics:
        assert batch.chosen_N is not None and batch.chosen_N.tolist() == [True, False] * (batch.num_rollouts // 2)
        self.calls.append(f"reward model on {batch.num_rollouts // 2}")
        self.batches.append(batch)
        self.value += 1.0
        return {"reward_model/loss": 1.0 / self.value, "reward_model/nonfinite": 0.0}

    def scores(self, batch: Batch) -> torch.Tensor:
        return torch.zeros(batch.num_rollouts)

    def export(self, folder: Path) -> None:
        pass


class Saves(Policy):
    """The policy of the other tests, whose right answers have other tokens than its wrong ones."""

    def __init__(self) -> None:
        super().__init__()
        self.advantages: list[list[float]] = []

    def generate(self, *arguments: Any, **options: Any) -> list[Rollout]:
        found = super().generate(*arguments, **options)
        for rollout in found:
            rollout.response_ids = np.asarray((2, 4 if rollout.text == "no idea" else 3), dtype=np.int32)
        return found

    def update(self, batch: Batch) -> Metrics:
        assert batch.token_advantages() is not None
        self.advantages.append([round(value, 6) for value in batch.token_advantages().tolist()])
        return super().update(batch)


@dataclasses.dataclass
class Made:
    run: RunLoop
    policy: Saves
    model: Model
    reference: MovingReference

    @property
    def rows(self) -> dict[int, dict[str, float]]:
        return {int(row["step"]): row for row in read_metrics(self.run.output.run_dir.metrics_file)}


@pytest.fixture
def make(tmp_path: Path, rewarder: RewardRunner) -> Iterator[Callable[..., Made]]:
    """A run in its folder, the same one every time."""
    run_dir = RunDir.create(tmp_path, "run")

    def made(total_steps: int, with_val: bool = False, **iterate: Any) -> Made:
        iterate = {"steps_per_iteration": 3, "reward_model_steps": 2, "replay_share": 0.5} | iterate
        config = make_config(schedule="iterate", save_freq=1, iterate=IterateConfig(**iterate))
        policy = Saves()
        model, reference = Model(policy.calls), MovingReference(policy.calls)
        both = CombinedRewarder(rewarder, [model], config.reward, models_alone=True)
        roles = Roles(policy, policy, both, reference=reference, reward_model=model if iterate["reward_model_steps"] else None)
        val = dataset("task:arithmetic?split=val&num_rows=3") if with_val else None
        run = run_of(config, run_dir, roles, total_steps, dataset("task:arithmetic?num_rows=40"), val)
        return Made(run, policy, model, reference)

    yield made
    run_dir.release()


MODEL, POLICY = ["sync", "generate 2x4"], ["sync", "generate 2x4", "old", "ref", "update"]


def test_an_iteration_refreshes_the_reference_trains_the_reward_model_and_then_the_policy(make):
    made = make(total_steps=10)
    made.run.fit()
    calls = [call for call in made.policy.calls if call != "save"]
    one = [*MODEL, "reward model on 2", *MODEL, "reward model on 2", *POLICY * 3]
    # Half of a batch is replayed as soon as there is an earlier iteration.
    two = [*MODEL, "reward model on 4", *MODEL, "reward model on 4", *POLICY * 3]
    assert calls == ["reference <- 0", *one, "reference <- 3", *two]
    assert [made.rows[step]["iterate/iteration"] for step in range(1, 11)] == [1.0] * 5 + [2.0] * 5
    assert [made.rows[step]["iterate/policy_phase"] for step in range(1, 11)] == [0.0, 0.0, 1.0, 1.0, 1.0] * 2
    assert [made.rows[step].get("reward_model/replayed_pairs") for step in (1, 2, 3, 6, 7)] == [0.0, 0.0, None, 2.0, 2.0]


def test_the_policy_is_trained_on_the_score_alone_and_the_rules_reward_is_logged_beside_it(make):
    made = make(total_steps=3)
    made.run.fit()
    # Twice the scores 2.25 3 2 3, by a model that finds better what the rules find wrong: mean 5.125, variance 3.1875 / 3.
    by_hand = [deviation / math.sqrt(3.1875 / 3) for deviation in (-0.625, 0.875, -1.125, 0.875)]
    assert made.policy.advantages[0][::2] == pytest.approx(by_hand * 2, abs=1e-5)
    row = made.rows[3]
    assert row["reward/by-rule"] == 0.5 and row["reward/reward_model"] == pytest.approx(2.5625)
    assert row["reward/mean"] == pytest.approx(2 * 2.5625), "weight * score"
    assert row["iterate/agreement"] == 0.0
    record = read_rollouts(made.run.output.run_dir.rollouts / "step_3.jsonl")[0]
    assert record["reward"] == pytest.approx(4.5) and record["reward_parts"][RULE] == 1.0


def test_the_pairs_are_the_best_and_the_worst_by_the_rules_of_which_the_earlier_samples_count(make):
    made = make(total_steps=1)
    made.run.fit()
    [batch] = made.model.batches
    assert batch.num_rollouts == 4 and batch.group_N.tolist() == [0, 0, 1, 1]
    rows = [
        json.loads(line) for line in (made.run.output.run_dir.checkpoints / "step_1" / PairReplay.file).read_text().splitlines()
    ]
    assert rows[0] == {"num_seen": 2}
    assert [[one["reward"] for one in row["rollouts"]] for row in rows[1:]] == [[1.0, 0.0]] * 2 and rows[1]["since"] == 1


def test_validation_measures_the_rules_and_shows_the_models_opinion(make):
    made = make(total_steps=1, with_val=True)
    made.run.fit()
    row = made.rows[1]
    assert row["val/arithmetic/mean@1"] == 1.0, "greedily the policy answers right"
    assert row["val/arithmetic/reward_model/mean@1"] == pytest.approx(1.25)


def saved(folder: Path) -> dict[str, Any]:
    """What a checkpoint holds, without the seconds that its step took."""
    files: dict[str, Any] = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "manifest.json"}
    state = json.loads(files["trainer.json"])
    state["unlogged"] = {key: value for key, value in state["unlogged"].items() if not key.startswith(("timing_s/", "perf/"))}
    return files | {"trainer.json": state}


@pytest.mark.parametrize("step", range(1, 10))
def test_a_run_that_goes_on_after_any_step_does_what_it_would_have_done(make, step: int):
    whole = make(total_steps=10, replay_share=0.4)
    whole.run.fit()
    checkpoints = whole.run.output.run_dir.checkpoints
    last = saved(checkpoints / "step_10")
    assert last.keys() == {"version", "reference", "reward_model", PairReplay.file, "trainer.json"}
    again = make(total_steps=10, replay_share=0.4)
    again.run.resume(checkpoints / f"step_{step}")
    again.run.fit()
    assert saved(checkpoints / "step_10") == last
    calls = [call for call in whole.policy.calls if call != "save"]
    assert calls[len(calls) - len([c for c in again.policy.calls if c not in ("save", "load")]) :] == [
        call for call in again.policy.calls if call not in ("save", "load")
    ]
    assert again.rows.keys() == set(range(1, 11))


def rollouts(rules: Sequence[float], scores: Sequence[float], per_group: int = 2) -> list[Rollout]:
    return [
        Rollout(
            Prompt(f"p{index // per_group}", (1,), "", "test"),
            index % per_group,
            (1, 2),
            (0.0, 0.0),
            "stop",
            ((0, 2),),
            reward=score,
            reward_parts={RULE: rule, "reward_model": score},
        )
        for index, (rule, score) in enumerate(zip(rules, scores, strict=True))
    ]


def test_agreement_compares_within_groups():
    # Group 1 in the right order, group 2 in the wrong one, group 3 equal, group 4 without a difference of the rules.
    found = agreement(rollouts([1, 0, 0, 1, 1, 0, 1, 1], [5.0, 4.0, 1.0, 0.0, 2.0, 2.0, 9.0, 1.0]))
    assert found["iterate/agreement"] == pytest.approx((1 + 0 + 0.5) / 3)
    assert agreement(rollouts([1, 1], [1.0, 2.0])) == {} == agreement([]), "nothing to compare"
