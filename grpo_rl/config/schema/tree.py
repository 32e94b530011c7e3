"""Every option of the program: key, type, range, default, meaning. The only place where any of them is defined.

Keys and meanings are verl's wherever verl has one that is right. `docs/configuration.md` is generated
from these files; `compose.py` builds these frozen classes from what Hydra composed, `checks/` has the
rules between keys. A key that nothing reads does not exist.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from grpo_rl.config.schema.algorithm import (
    AlgorithmConfig,
    FilterGroupsConfig,
    KlControlConfig,
    RejectionConfig,
    RolloutCorrectionConfig,
)
from grpo_rl.config.schema.data import (
    CustomClsConfig,
    DataConfig,
)
from grpo_rl.config.schema.kinds import (
    Count,
    CountOrOff,
    CountOrZero,
    Fraction,
    NonNegative,
    Positive,
    Range,
    RejectionMode,
)
from grpo_rl.config.schema.model import (
    ActorConfig,
    ActorRolloutRefConfig,
    AdaptiveEntropyConfig,
    CheckpointConfig,
    CriticConfig,
    CriticModelConfig,
    CriticOptimConfig,
    EnvironmentConfig,
    FsdpConfig,
    ModelConfig,
    MultiTurnConfig,
    OptimConfig,
    PolicyLossConfig,
    ProfilerConfig,
    RefConfig,
    RefFsdpConfig,
    RolloutConfig,
    TruncationConfig,
    ValSamplingConfig,
    WeightSyncConfig,
)
from grpo_rl.config.schema.reward import (
    CustomRewardConfig,
    JudgeConfig,
    OverlongBufferConfig,
    RewardConfig,
    RewardModelConfig,
    RewardModelOptimConfig,
    RewardModelTrainConfig,
)
from grpo_rl.config.schema.trainer import (
    GlobalProfilerConfig,
    ProfilerToolsConfig,
    RayConfig,
    RayInitConfig,
    TrainerConfig,
)

__all__ = [
    "ActorConfig",
    "ActorRolloutRefConfig",
    "AdaptiveEntropyConfig",
    "AlgorithmConfig",
    "CheckpointConfig",
    "Config",
    "Count",
    "CountOrOff",
    "CountOrZero",
    "CriticConfig",
    "CriticModelConfig",
    "CriticOptimConfig",
    "CustomClsConfig",
    "CustomRewardConfig",
    "DataConfig",
    "EnvironmentConfig",
    "FilterGroupsConfig",
    "Fraction",
    "FsdpConfig",
    "GlobalProfilerConfig",
    "JudgeConfig",
    "KlControlConfig",
    "ModelConfig",
    "MultiTurnConfig",
    "NonNegative",
    "OptimConfig",
    "OverlongBufferConfig",
    "PolicyLossConfig",
    "Positive",
    "ProfilerConfig",
    "ProfilerToolsConfig",
    "Range",
    "RayConfig",
    "RayInitConfig",
    "RefConfig",
    "RefFsdpConfig",
    "RejectionConfig",
    "RejectionMode",
    "RewardConfig",
    "RewardModelConfig",
    "RewardModelOptimConfig",
    "RewardModelTrainConfig",
    "RolloutConfig",
    "RolloutCorrectionConfig",
    "TrainerConfig",
    "TruncationConfig",
    "ValSamplingConfig",
    "WeightSyncConfig",
]


@dataclass(frozen=True, slots=True)
class Config:
    """The whole configuration, checked; what every part of the program receives."""

    data: DataConfig = field(default_factory=DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = field(default_factory=ActorRolloutRefConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    global_profiler: GlobalProfilerConfig = field(default_factory=GlobalProfilerConfig)
    ray_kwargs: RayConfig = field(default_factory=RayConfig)
