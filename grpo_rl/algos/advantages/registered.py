"""Advantage estimators, registered by their modules' import: rewards of a batch in, one advantage per trained
token out.

An estimator takes an `AdvantageInput` and its options as keywords with defaults, computes in float64, and
returns an `AdvantageOutput` in float32.
"""

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
