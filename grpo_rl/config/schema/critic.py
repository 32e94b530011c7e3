"""Options of the critic: `critic.*`."""

from __future__ import annotations

from dataclasses import dataclass, field

from grpo_rl.config.schema.kinds import Count, Devices, LearningRate, Positive, Prompts, Rollouts, Tokens
from grpo_rl.config.schema.model import FsdpConfig, OptimConfig, ProfilerConfig


@dataclass(frozen=True, slots=True)
class CriticModelConfig:
    path: str = ""
    """Folder of the causal LM whose body the critic starts from, with the actor's vocabulary; empty: the actor's model."""
    enable_gradient_checkpointing: bool = True
    """Recompute activations in the backward pass: less memory, about 30 % more work."""
    enable_activation_offload: bool = False
    """GPU: as actor_rollout_ref.model.enable_activation_offload."""


@dataclass(frozen=True, slots=True)
class CriticOptimConfig(OptimConfig):
    lr: LearningRate = 1e-5
    """Peak learning rate."""


@dataclass(frozen=True, slots=True)
class CriticConfig:
    enable: bool | None = None
    """True for a critic, false for none (refused where it contradicts the estimator); null: as adv_estimator needs."""
    model: CriticModelConfig = field(default_factory=CriticModelConfig)
    optim: CriticOptimConfig = field(default_factory=CriticOptimConfig)
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)
    ppo_mini_batch_size: Prompts | None = None
    """Prompts per optimizer step, over all ranks; null: as actor_rollout_ref.actor.ppo_mini_batch_size."""
    ppo_epochs: Count | None = None
    """Passes over the rollouts of one training step; null: as actor_rollout_ref.actor.ppo_epochs."""
    ppo_micro_batch_size_per_gpu: Rollouts | None = None
    """Rollouts per forward/backward pass on one rank. Changes memory and speed, never the gradient."""
    use_dynamic_bsz: bool | None = None
    """Cut micro-batches by tokens; null: as the actor, unless one of the sizes here is given."""
    ppo_max_token_len_per_gpu: Tokens | None = None
    """Most tokens, prompts included, in one micro-batch of one rank; null: as actor_rollout_ref.actor.ppo_max_token_len_per_gpu."""
    ulysses_sequence_parallel_size: Devices = 1
    """Ranks that compute each micro-batch together; as actor_rollout_ref.actor.ulysses_sequence_parallel_size."""
    cliprange_value: Positive = 0.5
    """Farthest that a value may move from what it was before the update, in the value loss."""
