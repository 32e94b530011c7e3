"""Actor ranks that die or freeze in an update: made anew, and bit by bit where the undisturbed ones are."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import armed_actor
import pytest
import ray
import torch
from recovery_ground import START_S, Ground, is_alive, ray_with_slots
from torch import Tensor

from grpo_rl.algos.objective import Objective
from grpo_rl.cluster.groups import wait_all
from grpo_rl.cluster.roles import ActorGroup
from grpo_rl.config.derived import MicroBatchRule
from grpo_rl.config.schema import ActorConfig, ModelConfig, OptimConfig
from grpo_rl.errors import ClusterError
from grpo_rl.types import Batch
from grpo_rl.workers.actor import ActorSpec
from grpo_rl.workers.policy import PolicySpec, Rank

# The goal is 30 s, most of it imports; Ray's processes are niced, and beside other work they take several times as long.
BACK_IN_TRAINING_S = 120.0
VOCAB = 32


def make_model(folder: Path) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(5)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8}
    config = Qwen3Config(**sizes, num_key_value_heads=1, vocab_size=VOCAB, max_position_embeddings=64, initializer_range=0.2)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def make_batch(seed: int) -> Batch:
    """Four prompts with two responses each."""
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
    )


@dataclass
class Scene:
    ground: Ground
    actor: ActorGroup
    start: Path

    def train(self, num_updates: int, fault: str = "", rank: int = 0) -> str:
        """Digest of all state after so many updates from the start, with a fault armed on one rank before the second one."""
        self.actor.load(self.start)
        for number in range(num_updates):
            if fault and number == 1:
                worker = self.actor.group.workers[rank]
                wait_all([worker], [worker.call("arm", fault)], START_S, "arm")
            self.actor.update(make_batch(number))
        return self.digest()

    def digest(self) -> str:
        """Of every rank's weights, moments, schedule and random state."""
        digest = hashlib.sha256()
        for part in self.actor.group.parts("snapshot"):
            _feed(digest, ray.get(part, timeout=60))
        return digest.hexdigest()


def _feed(digest: hashlib._Hash, value: object) -> None:
    if isinstance(value, dict):
        for key in sorted(value):
            digest.update(str(key).encode())
            _feed(digest, value[key])
    elif isinstance(value, Tensor):
        digest.update(value.numpy().tobytes())
    else:
        digest.update(repr(value).encode())


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    model = make_model(tmp_path_factory.mktemp("model"))
    with ray_with_slots(2) as slots:
        ground = Ground(slots, tmp_path_factory.mktemp("logs"))
        try:
            # Two optimizer steps per update, two micro-batches each and rank.
            config = ActorConfig(ppo_mini_batch_size=2, use_kl_loss=False)
            objective = Objective.from_config(config)
            policy = PolicySpec(ModelConfig(str(model), enable_gradient_checkpointing=False), 1.0, "float32", train=True)
            spec = ActorSpec(policy, objective, OptimConfig(lr=1e-2), total_optimizer_steps=100, seed=1)
            group = ground.group("actor", 2, ground.supervisor(max_restarts=50), stateful=True)

            def recipe() -> list[ray.ObjectRef]:
                places = group.where(START_S)
                ranks = [Rank(i, 2, "127.0.0.1", places[0][2], "cpu", 60.0) for i in range(2)]
                return group.start_build(armed_actor.make_actor, [(spec, rank) for rank in ranks])

            wait_all(group.workers, group.begin(recipe), START_S, "start actor")
            group.built()
            rule = MicroBatchRule(None, 1)
            actor = ActorGroup(group, config, train_rule=rule, forward_rule=rule, always_old=True, objective=objective)
            start = tmp_path_factory.mktemp("start")
            actor.save(start)
            yield Scene(ground, actor, start)
        finally:
            ground.close()


@pytest.fixture(scope="module")
def undisturbed(scene: Scene) -> str:
    digest = scene.train(3)
    assert scene.train(3) == digest, "the same updates give the same bits"
    assert scene.train(2) != digest
    return digest


PLACES = [
    ("actor.update.start:kill9", 0),
    ("actor.update.mid_backward:kill9@micro_batch=1", 1),
    ("actor.update.before_optimizer:kill9@n=2", 0),
    ("actor.update.after_optimizer:kill9", 1),
    ("actor.update.mid_backward:stop", 0),
]


@pytest.mark.parametrize(("fault", "rank"), PLACES)
def test_a_rank_lost_in_an_update_leaves_no_trace_in_the_state(scene, undisturbed, fault, rank):
    scene.ground.lines.warnings.clear()
    pids = [worker.pid for worker in scene.actor.group.workers]
    began = time.monotonic()
    assert scene.train(3, fault, rank) == undisturbed
    (noticed, failed), (back, line) = scene.ground.lines.warnings
    assert failed.startswith("recovery: actor failed: ") and line.startswith("recovery: actor is back after ")
    assert back - noticed < BACK_IN_TRAINING_S
    assert not any(is_alive(pid) for pid in pids), "survivors are ended, too"
    print(f"MEASURED {fault} rank {rank}: noticed {noticed - began:.2f} s after the start, back {back - noticed:.2f} s later")


def test_without_a_copy_in_memory_the_checkpoint_and_the_updates_since_give_the_same_state(scene, undisturbed, tmp_path):
    keeper = scene.actor.group.keeper
    keeper.in_memory = False
    try:
        scene.actor.load(scene.start)
        scene.actor.update(make_batch(0))
        scene.actor.save(tmp_path)
        scene.actor.committed(tmp_path)
        scene.actor.update(make_batch(1))
        assert keeper.num_updates == 1
        worker = scene.actor.group.workers[0]
        wait_all([worker], [worker.call("arm", "actor.update.after_optimizer:kill9")], START_S, "arm")
        scene.actor.update(make_batch(2))
    finally:
        keeper.in_memory = True
    assert scene.digest() == undisturbed
    assert "1 updates made again" in scene.ground.lines.warnings[-1][1]


def test_a_group_whose_restarts_are_switched_off_says_what_failed(scene):
    group = scene.actor.group
    group.is_restarted = False
    try:
        with pytest.raises(ClusterError, match=r"actor.update failed on actor\d: the process died"):
            scene.train(2, "actor.update.start:kill9")
    finally:
        group.is_restarted = True
    # What is left of the group is ended and made anew by the next call, with the state it had before.
    scene.actor.update(make_batch(0))
