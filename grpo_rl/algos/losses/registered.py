"""Policy losses, registered by their modules' import: one loss per trained token, averaged in `aggregate.py`.

A loss takes a `LossInput` and its options as keywords with defaults, computes in float64, because log-probs
of -30 leave a float32 ratio few digits, and returns a `TokenLoss`.
"""

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
