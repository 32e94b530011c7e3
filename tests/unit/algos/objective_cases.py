"""Objectives on ragged batches, for tests."""

from __future__ import annotations

import itertools
import math
from typing import Any

import ragged_batches as reference
import torch
from torch import Tensor

from grpo_rl.algos.aggregate import AGGREGATIONS
from grpo_rl.algos.losses.registered import POLICY_LOSSES, LossInput
from grpo_rl.algos.objective import Objective
from grpo_rl.algos.segments import Segments
from grpo_rl.registry import needs_of, own_options
from grpo_rl.types import Counts

SINGLE = [name for name in sorted(POLICY_LOSSES) if name != "sft" and "pairs" not in needs_of(POLICY_LOSSES.get(name))]
"""The losses that weigh each response by its advantage. Those over pairs are in test_preference.py; `sft` reads no advantage."""
COMBINATIONS = list(itertools.product(SINGLE, sorted(AGGREGATIONS)))


def own(loss_mode: str, **options: Any) -> dict[str, Any]:
    """Those of the options that the loss takes."""
    return own_options(POLICY_LOSSES.get(loss_mode), options)


def make(loss_mode: str, agg_mode: str, **settings: Any) -> Objective:
    """An objective with the options that its average cannot do without."""
    agg_options = (("loss_scale_factor", 7.0),) if agg_mode == "seq-mean-token-sum-norm" else ()
    return Objective(loss_mode, agg_mode, agg_options=agg_options, **settings)


def inputs(policy_T: Tensor, advantages_T: Tensor, lengths: Any, **columns: Tensor | None) -> LossInput:
    """The input of a loss, of responses with these lengths."""
    return LossInput(policy_T, advantages_T, Segments(torch.as_tensor(lengths, dtype=torch.long)), **columns)


def extras(objective: Objective, data: reference.Ragged) -> dict[str, Tensor]:
    """The columns that only some objectives need."""
    columns = {}
    if objective.needs_selection:
        columns["selected_T"] = torch.tensor(data.entropy) > 1.0  # goes along if responses are picked
    if objective.needs_group_tokens:
        columns["group_tokens_N"] = torch.tensor(data.group_tokens, dtype=torch.long)
    return columns


def run(objective: Objective, data: reference.Ragged, counts: Counts) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Loss, statistics, and gradient with respect to the policy's log-probs, with rewards as advantages."""
    policy_T = torch.tensor(data.policy, requires_grad=True)
    advantages = [r for r, length in zip(data.rewards, data.lengths, strict=True) for _ in range(length)]
    columns = inputs(
        policy_T,
        torch.tensor(advantages),
        data.lengths,
        old_logprobs_T=torch.tensor(data.old),
        ref_logprobs_T=torch.tensor(data.ref),
        # A function of the log-probs, so that its share of the gradient is seen too.
        entropy_T=policy_T.square() if objective.needs_entropy else None,
        **extras(objective, data),
    )
    loss, stats = objective(columns, counts)
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
