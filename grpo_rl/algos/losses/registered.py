"""Policy losses, registered by import. They compute in float64: a float32 ratio of -30 has few digits."""

from __future__ import annotations

from grpo_rl.algos.losses import clip, covariance, preference, score
from grpo_rl.algos.losses.contract import (
    POLICY_LOSSES,
    LossInput,
    PolicyLoss,
    Selection,
    TokenLoss,
    by_advantage,
    selected_by,
    selection_of,
)
from grpo_rl.registry import needs

__all__ = [
    "POLICY_LOSSES",
    "LossInput",
    "PolicyLoss",
    "Selection",
    "TokenLoss",
    "by_advantage",
    "clip",
    "covariance",
    "needs",
    "preference",
    "score",
    "selected_by",
    "selection_of",
]
