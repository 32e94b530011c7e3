"""The quality with which a policy has learnt rows, as the training's own loss measures it."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from typing import Any

import torch

from grpo_rl.algos.aggregate import group_tokens
from grpo_rl.algos.losses.contract import LossInput
from grpo_rl.algos.objective import Objective
from grpo_rl.algos.segments import Segments
from grpo_rl.columns import values
from grpo_rl.data.row_set import TrainingSet
from grpo_rl.protocols import Actor
from grpo_rl.trainer.rows.reference_rows import ReferenceRows
from grpo_rl.types import Batch, Counts, Metrics

LARGEST_EXPONENT = 700.0
"""e to this is near the largest float."""


MEASURES = {"reward_accuracy": "accuracy", "reward_margin": "margin"}
"""Statistics of losses over pairs that are logged beside the loss, with their names there."""


def named_measures(part: str, measured: Metrics, objective: Objective) -> Metrics:
    """Return the loss of rows, and what it means: a perplexity, or how the policy orders pairs, as metrics `part/...`."""
    found = {f"{part}/loss": measured["pg_loss"]}
    if objective.loss_mode == "sft":
        found[f"{part}/perplexity"] = perplexity(measured["pg_loss"])
    if objective.needs_pairs:
        found |= {f"{part}/{name}": measured[stat] for stat, name in MEASURES.items() if stat in measured}
    return found


def perplexity(loss: float) -> float:
    """Return e to the mean loss of a token."""
    return math.exp(min(loss, LARGEST_EXPONENT))


def measure(
    actor: Actor, data: TrainingSet[Any], objective: Objective, batch_size: int, reference: ReferenceRows | None = None
) -> Metrics:
    """Return the policy loss `pg_loss` of all validation rows, and its averaged statistics, as one batch of them all has them."""
    # The other terms of the objective are no part of how well the rows are learnt.
    objective = dataclasses.replace(objective, entropy_coeff=0.0, adaptive_entropy=False, kl_loss_type=None, kl_options=())
    parts = [list(range(start, min(start + batch_size, len(data)))) for start in range(0, len(data), batch_size)]
    each = [data.batch(rows).counts() for rows in parts]
    counts = Counts(*(sum(column) for column in zip(*(dataclasses.astuple(part) for part in each), strict=True)))
    totals: dict[str, float] = defaultdict(float)
    for rows in parts:
        batch = data.batch(rows)
        batch = batch if reference is None else reference.fill("val", rows, batch)
        _, stats = objective(loss_input(batch, actor.logprobs(batch)), counts)
        for name, value in stats.items():
            totals[name] += float(value)
    return {
        name.partition("/")[2]: value / counts.num_tokens if name.startswith("sum/") else value
        for name, value in totals.items()
        if not name.startswith("max/")
    }


def loss_input(batch: Batch, policy_logprobs_T: torch.Tensor) -> LossInput:
    """Return a whole batch as its loss reads it."""
    advantages_T = torch.ones(batch.num_trained_tokens) if batch.advantages_T is None else batch.advantages_T
    return LossInput(
        policy_logprobs_T,
        advantages_T,
        Segments(batch.trained_lengths_N),
        ref_logprobs_T=None if batch.ref_logprobs_T is None else values(batch.ref_logprobs_T),
        group_N=batch.group_N,
        chosen_N=batch.chosen_N,
        group_tokens_N=group_tokens(batch.trained_lengths_N, batch.group_N),
    )
