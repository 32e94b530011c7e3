"""Advantage estimators, registered by import. They compute in float64 and return float32."""

from __future__ import annotations

from grpo_rl.algos.advantages import group_relative, per_token
from grpo_rl.algos.advantages.contract import (
    ADVANTAGES,
    AdvantageEstimator,
    AdvantageInput,
    AdvantageOutput,
    reads_token_rewards,
    token_rewards,
)
from grpo_rl.registry import needs

__all__ = [
    "ADVANTAGES",
    "AdvantageEstimator",
    "AdvantageInput",
    "AdvantageOutput",
    "group_relative",
    "needs",
    "per_token",
    "reads_token_rewards",
    "token_rewards",
]
