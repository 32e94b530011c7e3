"""Every option of the program: key, type, range, default, meaning. The only place where any of them is defined.

Keys and meanings are verl's wherever verl has one that is right. `conf/base` is generated
from these files; `compose.py` builds these frozen classes from what was composed, `checks/` has the
rules between keys. A key that nothing reads does not exist. All classes and kinds are names of this module.
"""

# ruff: noqa: F403, F405

from __future__ import annotations

from dataclasses import dataclass, field

from grpo_rl.config.schema.algorithm import *
from grpo_rl.config.schema.data import *
from grpo_rl.config.schema.kinds import *
from grpo_rl.config.schema.model import *
from grpo_rl.config.schema.reward import *
from grpo_rl.config.schema.trainer import *


@dataclass(frozen=True, slots=True)
class Config:
    """The whole configuration, checked; what every part of the program receives."""

    data: DataConfig = field(default_factory=DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = field(default_factory=ActorRolloutRefConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    global_profiler: GlobalProfilerConfig = field(default_factory=GlobalProfilerConfig)
    ray_kwargs: RayConfig = field(default_factory=RayConfig)
