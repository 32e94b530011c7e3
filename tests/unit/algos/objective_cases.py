"""Objectives on ragged batches, for tests."""

from __future__ import annotations

import itertools
import math
from typing import Any

import algos_reference as reference
import algos_reference_losses as reference_losses
import torch
from torch import Tensor

from grpo_rl.algos.aggregate import AGGREGATIONS
from grpo_rl.algos.kl import KL_ESTIMATORS
from grpo_rl.algos.losses.registered import POLICY_LOSSES
from grpo_rl.algos.objective import Objective
from grpo_rl.types import Counts

COMBINATIONS = list(itertools.product(sorted(POLICY_LOSSES), sorted(AGGREGATIONS)))
KL_TYPES = [*sorted(KL_ESTIMATORS), "full"]
TERMS = [(loss, agg, "k2") for loss, agg in COMBINATIONS] + [("vanilla", "token-mean", kl) for kl in KL_TYPES]
"""Every loss with every average, and every KL estimator once: the terms only add up."""
SMOOTH = [(loss, agg, kl) for loss, agg, kl in TERMS if loss not in reference_losses.STOPS_GRADIENTS and not kl.endswith("+")]
FACTOR = 7.0


def make(loss_mode: str, agg_mode: str, **settings: Any) -> Objective:
    """An objective with the options that its average cannot do without."""
    options = (("loss_scale_factor", FACTOR),) if agg_mode == "seq-mean-token-sum-norm" else ()
    return Objective(loss_mode, agg_mode, agg_options=options, **settings)


def extras(objective: Objective, data: reference.Ragged) -> dict[str, Tensor]:
    """The columns that only some objectives need."""
    columns = {}
    if objective.needs_selection:
        columns["selected_T"] = torch.tensor(reference_losses.selected(data), dtype=torch.bool)
    if objective.needs_group_tokens:
        columns["group_tokens_N"] = torch.tensor(data.group_tokens, dtype=torch.long)
    return columns


def run(
    objective: Objective, data: reference.Ragged, counts: Counts, dtype: torch.dtype = torch.float32, on_policy: bool = False
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Loss, statistics, and gradient with respect to the policy's log-probs, with rewards as advantages."""
    policy_T = torch.tensor(data.policy, dtype=dtype, requires_grad=True)
    advantages = [r for r, length in zip(data.rewards, data.lengths, strict=True) for _ in range(length)]
    loss, stats = objective(
        policy_logprobs_T=policy_T,
        advantages_T=torch.tensor(advantages, dtype=dtype),
        lengths_N=torch.tensor(data.lengths, dtype=torch.long),
        counts=counts,
        old_logprobs_T=None if on_policy else torch.tensor(data.old, dtype=dtype),
        ref_logprobs_T=torch.tensor(data.ref, dtype=dtype),
        # Functions of the log-probs, so that their share of the gradient is seen too.
        entropy_T=policy_T.square() if objective.needs_entropy else None,
        full_kl_T=policy_T.exp() if objective.needs_full_kl else None,
        **extras(objective, data),
    )
    loss.backward()
    assert policy_T.grad is not None
    return loss.detach(), stats, policy_T.grad


def combine(parts: list[dict[str, Tensor]]) -> dict[str, float]:
    """Statistics of micro-batches put together as their prefixes say."""
    combined: dict[str, float] = {}
    for key in parts[0]:
        values = [part[key].item() for part in parts]
        combined[key] = max(values) if key.startswith("max/") else math.fsum(values)
    return combined
