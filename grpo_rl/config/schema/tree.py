"""Every option: key, type, range, default, meaning; no option is defined elsewhere, or without a reader.

Keys and meanings are verl's wherever verl has one that is right. `conf/base` is generated from these files.
All classes and kinds are names of this module.
"""

# ruff: noqa: F403, F405

from __future__ import annotations

from grpo_rl.config.schema.algorithm import *
from grpo_rl.config.schema.data import *
from grpo_rl.config.schema.kinds import *
from grpo_rl.config.schema.model import *
from grpo_rl.config.schema.reward import *
from grpo_rl.config.schema.trainer import *


@frozen
class Config:
    data: DataConfig = field(DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = field(ActorRolloutRefConfig)
    critic: CriticConfig = field(CriticConfig, part="critic")
    algorithm: AlgorithmConfig = field(AlgorithmConfig)
    reward: RewardConfig = field(RewardConfig, part="sampling")
    distillation: DistillationConfig = field(DistillationConfig, needs="distillation.enabled=true")
    trainer: TrainerConfig = field(TrainerConfig)
    global_profiler: GlobalProfilerConfig = field(GlobalProfilerConfig)
    ray_kwargs: RayConfig = field(RayConfig)

    @property
    def model(self) -> ModelConfig:
        """The policy's: verl has one group for its model, actor, rollout and reference."""
        return self.actor_rollout_ref.model

    @property
    def actor(self) -> ActorConfig:
        return self.actor_rollout_ref.actor

    @property
    def rollout(self) -> RolloutConfig:
        return self.actor_rollout_ref.rollout

    @property
    def ref(self) -> RefConfig:
        return self.actor_rollout_ref.ref
