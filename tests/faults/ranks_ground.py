"""Two real ranks of the actor or the critic, supervised as in a run, with batches whose outcome is known to the last bit."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import armed_ranks
import pytest
import ray
import torch
from recovery_ground import START_S, Ground
from torch import Tensor

from grpo_rl.algos.objective import Objective
from grpo_rl.cluster.processes.placement import Pool
from grpo_rl.cluster.processes.worker_sets import wait_all
from grpo_rl.cluster.recovery.out_of_memory import Cut
from grpo_rl.cluster.recovery.supervised_sets import SupervisedSet
from grpo_rl.cluster.roles.actor_role import ActorRole
from grpo_rl.cluster.roles.critic_role import CriticRole
from grpo_rl.cluster.roles.reference_role import MovingReferenceRole
from grpo_rl.cluster.roles.trained_reward_model_role import TrainedRewardModelRole
from grpo_rl.config.derived import MicroBatchRule
from grpo_rl.config.schema.tree import ActorConfig, ModelConfig, OptimConfig, RewardModelOptimConfig, RewardModelTrainConfig
from grpo_rl.types import Batch, Metrics
from grpo_rl.workers.specs import ActorSpec, CriticSpec, PolicySpec, Rank, RewardModelSpec, TrainedRewardModelSpec

VOCAB = 32
RANK_HEARTBEAT_S = 2.0
"""Niced processes that start beside others are silent for seconds."""
ONE_BY_ONE, BY_TWO = MicroBatchRule(None, 1), MicroBatchRule(None, 2)


def make_model(folder: Path) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(5)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8}
    config = Qwen3Config(**sizes, num_key_value_heads=1, vocab_size=VOCAB, max_position_embeddings=64, initializer_range=0.2)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def make_batch(seed: int) -> Batch:
    """Four prompts with two responses each: two optimizer steps, in each of which a rank has two rollouts."""
    generator = torch.Generator().manual_seed(seed)
    lengths_N = torch.randint(2, 9, (8,), generator=generator)
    num_trained = int(lengths_N.sum())
    return Batch(
        prompt_lengths_N=torch.full((8,), 3),
        response_lengths_N=lengths_N,
        group_N=torch.arange(4).repeat_interleave(2),
        token_ids_S=torch.randint(2, VOCAB, (num_trained + 24,), generator=generator),
        rewards_N=torch.zeros(8),
        rollout_logprobs_T=-2.0 * torch.ones(num_trained),
        advantages_T=torch.randn(8, generator=generator).repeat_interleave(lengths_N),
        values_T=0.1 * torch.randn(num_trained, generator=generator),
        returns_T=torch.randn(num_trained, generator=generator),
        chosen_N=torch.arange(8) % 2 == 0,
    )


@dataclass
class Scene:
    """A role over its ranks, and the state that it began with."""

    ground: Ground
    role: Any
    cut: Cut
    start: Path

    @property
    def worker_set(self) -> SupervisedSet:
        return self.role.worker_set

    def train(self, num_updates: int, fault: str = "", rank: int = 0) -> str:
        """Digest of all state after so many updates from the start, with a fault armed on one rank before the second one."""
        self.begin()
        for number in range(num_updates):
            if fault and number == 1:
                self.arm(fault, rank)
            self.role.update(make_batch(number))
        return self.digest()

    def begin(self, num_updates: int = 0) -> list[Metrics]:
        """Back to the start, and so many updates from there."""
        self.ground.lines.warnings.clear()
        self.role.load(self.start)
        return [self.role.update(make_batch(number)) for number in range(num_updates)]

    def arm(self, fault: str, rank: int) -> None:
        worker = self.worker_set.workers[rank]
        wait_all([worker], [worker.call("arm", fault)], START_S, "arm")

    def digest(self) -> str:
        """Return the digest of every rank's weights, moments, schedule and random state."""
        digest = hashlib.sha256()
        for part in self.worker_set.parts("snapshot"):
            _feed(digest, ray.get(part, timeout=60))
        return digest.hexdigest()

    @cached_property
    def undisturbed(self) -> str:
        """Return the digest after three updates that nothing disturbs."""
        digest = self.train(3)
        assert self.train(3) == digest, "the same updates give the same bits"
        assert self.train(2) != digest
        return digest


def _feed(digest: hashlib._Hash, value: object) -> None:
    if isinstance(value, dict):
        for key in sorted(value):
            digest.update(str(key).encode())
            _feed(digest, value[key])
    elif isinstance(value, Tensor):
        digest.update(value.numpy().tobytes())
    else:
        digest.update(repr(value).encode())


@contextmanager
def actor_scene(slots: Pool, folders: pytest.TempPathFactory, *, lora_rank: int = 0) -> Iterator[Scene]:
    # Two optimizer steps per update, two micro-batches each and rank.
    config = ActorConfig(ppo_mini_batch_size=2, use_kl_loss=False)
    objective = Objective.from_config(config)
    spec = ActorSpec(_policy(folders, lora_rank), objective, OptimConfig(lr=1e-2), total_optimizer_steps=100, seed=1)
    with _worker_set(slots, folders, "actor", armed_ranks.make_actor, spec) as (ground, worker_set):
        rules = {"train_rule": ONE_BY_ONE, "forward_rule": ONE_BY_ONE}
        actor = ActorRole(worker_set, config, **rules, old_logprobs="actor", objective=objective, splits=True)
        yield Scene(ground, actor, actor.train_cut, _saved(actor, folders))


@contextmanager
def critic_scene(slots: Pool, folders: pytest.TempPathFactory) -> Iterator[Scene]:
    spec = CriticSpec(_policy(folders), OptimConfig(lr=1e-2), total_optimizer_steps=100, seed=1, cliprange_value=0.5)
    with _worker_set(slots, folders, "critic", armed_ranks.make_critic, spec) as (ground, worker_set):
        critic = CriticRole(worker_set, rule=ONE_BY_ONE, mini_batch_size=2, epochs=1, splits=True)
        yield Scene(ground, critic, critic.cut, _saved(critic, folders))


@contextmanager
def reward_model_scene(slots: Pool, folders: pytest.TempPathFactory) -> Iterator[Scene]:
    scorer = RewardModelSpec(str(make_model(folders.mktemp("model"))), "float32")
    optim = RewardModelOptimConfig(lr=1e-2)
    train = RewardModelTrainConfig(optim=optim, center_coef=0.01, enable_gradient_checkpointing=False)
    spec = TrainedRewardModelSpec(scorer, train, total_optimizer_steps=100, seed=1)
    with _worker_set(slots, folders, "reward_model", armed_ranks.make_reward_model, spec) as (ground, worker_set):
        role = TrainedRewardModelRole(worker_set, rule=MicroBatchRule(None, 2), pairs=True, splits=True)
        yield Scene(ground, role, role.cut, _saved(role, folders))


@contextmanager
def reference_ranks(
    slots: Pool, folders: pytest.TempPathFactory, model: PolicySpec
) -> Iterator[tuple[Ground, MovingReferenceRole]]:
    """Two ranks of a reference that moves, with the model that an actor began with."""
    with _worker_set(slots, folders, "reference", armed_ranks.make_reference, model) as (ground, worker_set):
        yield ground, MovingReferenceRole(worker_set, rule=ONE_BY_ONE, want_hidden=False, splits=True)


def _policy(folders: pytest.TempPathFactory, lora_rank: int = 0) -> PolicySpec:
    model = make_model(folders.mktemp("model"))
    config = ModelConfig(str(model), enable_gradient_checkpointing=False, lora_rank=lora_rank)
    return PolicySpec(config, 1.0, "float32", train=True)


@contextmanager
def _worker_set(
    slots: Pool,
    folders: pytest.TempPathFactory,
    role: str,
    factory: Callable[..., Any],
    spec: Any,
) -> Iterator[tuple[Ground, SupervisedSet]]:
    ground = Ground(slots, folders.mktemp("logs"))
    try:
        supervisor = ground.supervisor(max_restarts=50, heartbeat_s=RANK_HEARTBEAT_S)
        worker_set = ground.worker_set(role, 2, supervisor, stateful=True)

        def recipe() -> list[ray.ObjectRef]:
            places = worker_set.where(START_S)
            ranks = [Rank(i, 2, "127.0.0.1", places[0][2], "cpu", 60.0) for i in range(2)]
            return worker_set.start_build(factory, [(spec, rank) for rank in ranks])

        wait_all(worker_set.workers, worker_set.begin(recipe), START_S, f"start {role}")
        worker_set.built()
        yield ground, worker_set
    finally:
        ground.close()


def _saved(role: Any, folders: pytest.TempPathFactory) -> Path:
    start = folders.mktemp("start")
    role.save(start)
    return start
