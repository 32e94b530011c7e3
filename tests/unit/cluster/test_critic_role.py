"""The critic's role over a worker group that runs in this process: mini-batches, metrics, and its place in a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_rl.cluster.processes.worker_group import WorkerGroup
from grpo_rl.cluster.roles.trained_roles import CriticRole
from grpo_rl.cluster.start_roles import critic_spec
from grpo_rl.config.compose import compose
from grpo_rl.config.derived import Machine, MicroBatchRule
from grpo_rl.errors import CheckpointError
from grpo_rl.plan.decisions import decide
from grpo_rl.types import Batch
from grpo_rl.workers.specs import OptimizerStep, PolicySpec, Update

CPU = Machine(num_gpus=0, num_cpus=2, device="cpu")


class Ranks(WorkerGroup):
    """The part of a worker group that CriticRole needs; it records each rank's calls."""

    def __init__(self, size: int) -> None:
        self.size, self.role = size, "critic"
        self.steps: list[Sequence[OptimizerStep]] = []
        self.calls: list[tuple[str, Any]] = []
        self.tokens: list[list[int]] = []
        """Trained tokens of each step, by rank."""

    def store(self, values: Sequence[Batch]) -> Sequence[Batch]:
        return values

    def __len__(self) -> int:
        return self.size

    def call(self, method: str, *args: Any) -> list[Any]:
        self.calls.append((method, args))
        return [{"weights": (1, "digest")}] * self.size

    def call_each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        return [getattr(self, method)(*args) for args in arguments]

    def update(self, share: Batch, update: Update) -> list[dict[str, float]]:
        batch = update.complete(share)
        assert batch.values_T.shape == batch.returns_T.shape == batch.rollout_logprobs_T.shape
        self.steps.append(update.steps)
        parts = [[batch.select(list(rows)) for rows in step.micro_batches] for step in update.steps]
        self.tokens.append([sum(part.num_trained_tokens for part in step) for step in parts])
        return [{"share/vf_loss": 0.5, "sum/vf_clipfrac": 3.0, "same/lr": 0.1} for _ in update.steps]


def make_batch(**columns: torch.Tensor) -> Batch:
    """Three groups of two; five, four and six tokens."""
    responses = torch.tensor([2, 3, 1, 3, 4, 2])
    return Batch(
        prompt_lengths_N=torch.ones(6, dtype=torch.long),
        response_lengths_N=responses,
        group_N=torch.tensor([0, 0, 1, 1, 2, 2]),
        token_ids_S=torch.arange(21),
        rewards_N=torch.zeros(6),
        rollout_logprobs_T=torch.arange(15, dtype=torch.float32),
        **columns,
    )


def critic(ranks: Ranks, size: int = 1, epochs: int = 1) -> CriticRole:
    return CriticRole(ranks, rule=MicroBatchRule(None, 1), mini_batch_size=size, epochs=epochs)


def test_an_update_makes_mini_batches_of_whole_groups_in_every_pass_with_global_counts():
    ranks = Ranks(2)
    batch = make_batch(values_T=torch.zeros(15), returns_T=torch.ones(15))
    metrics = critic(ranks, size=2, epochs=2).update(batch)
    tokens = [[step.counts.num_tokens for step in steps] for steps in ranks.steps]
    assert tokens == [[9, 6, 9, 6]] * 2
    assert [sum(step) for step in zip(*ranks.tokens, strict=True)] == [9, 6, 9, 6]
    # Two ranks: shares add up; counts are divided by the tokens of their step, and steps are averaged.
    assert metrics["critic/vf_loss"] == 1.0
    assert metrics["critic/vf_clipfrac"] == pytest.approx((6 / 9 + 6 / 6) / 2)
    assert metrics["critic/lr"] == 0.1


def test_tokens_that_are_not_trained_count_nowhere():
    keep = torch.tensor([True, False] * 7 + [True])
    values, returns = torch.arange(15.0), torch.arange(15.0)
    values[~keep] = 1000.0
    ranks = Ranks(1)
    metrics = critic(ranks, size=3).update(make_batch(values_T=values, returns_T=returns).keep(keep))
    assert ranks.steps[0][0].counts.num_tokens == 8
    assert metrics["critic/vf_explained_var"] == 1.0
    assert metrics["critic/values/mean"] == metrics["critic/returns/mean"] == 7.0


def test_its_state_lies_in_a_folder_of_its_own_and_is_missed_where_there_is_none(tmp_path: Path):
    ranks = Ranks(1)
    with pytest.raises(CheckpointError, match="has no critic"):
        critic(ranks).load(tmp_path)
    critic(ranks).save(tmp_path)
    critic(ranks).load(tmp_path)
    assert (tmp_path / "critic").is_dir()
    assert ranks.calls == [("save", (str(tmp_path / "critic"), False)), ("load", (str(tmp_path / "critic"),))]


def test_the_critic_starts_from_the_actors_model_unless_it_has_its_own():
    words = [
        "recipe=arithmetic/ppo",
        "trainer.total_training_steps=10",
        "actor_rollout_ref.model.override_config={attention_dropout: 0.1}",
    ]
    config = compose(words).config
    actor = PolicySpec(config.actor_rollout_ref.model, temperature=1.0, dtype="auto")
    spec = critic_spec(decide(config, CPU), actor)
    assert (spec.model.model.path, spec.model.model.override_config) == (actor.model.path, {"attention_dropout": 0.1})
    assert spec.model.train
    config = compose([*words, "critic.model.path=/other", "critic.ppo_epochs=3", "critic.ppo_mini_batch_size=32"]).config
    spec = critic_spec(decide(config, CPU), actor)
    assert (spec.model.model.path, spec.model.model.override_config) == ("/other", {})
    assert spec.total_optimizer_steps == 10 * 2 * 3
