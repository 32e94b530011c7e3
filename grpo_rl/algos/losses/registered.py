"""Policy losses: one loss per trained token. Averaging stays apart, in `aggregate.py`.

A loss takes a `LossInput` and its own options as keywords with defaults, computes in float64, because log-probs of -30
and more leave a float32 ratio few digits, and returns a `TokenLoss`. Register one with `@POLICY_LOSSES.register("name")`,
and say with `@needs(...)` what it asks of the run, with `@by_advantage` that advantage 0 means no gradient. Importing this module makes all of them known.
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
