"""Policy losses: one loss per trained token. Averaging stays apart, in `aggregate.py`.

A loss takes (policy_logprobs_T, old_logprobs_T, advantages_T, segments) and the clip bounds as keywords, and
returns the loss per token, with gradient, and detached statistics per token. A statistic whose name ends in
`_max` is reported as the largest value, all others as the mean over trained tokens. Losses compute in
float64, because log-probs of -30 and more leave a float32 ratio few digits, and return it. Register one with
`@POLICY_LOSSES.register("name")`. Importing this module makes all of them known.
"""

from __future__ import annotations

from grpo_rl.algos.losses import clip, covariance, score
from grpo_rl.algos.losses.contract import POLICY_LOSSES, PolicyLoss, Selection, selected_by, selection_of

__all__ = [
    "POLICY_LOSSES",
    "PolicyLoss",
    "Selection",
    "clip",
    "covariance",
    "score",
    "selected_by",
    "selection_of",
]
