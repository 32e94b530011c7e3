"""Properties of every loss with every average and every KL estimator: values, gradients, splits, zero signal."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import ragged_batches as reference
import torch
from advantage_cases import complete
from hypothesis import given, settings
from hypothesis import strategies as st
from objective_cases import COMBINATIONS, SINGLE, combine, extras, inputs, make, run
from torch import Tensor

from grpo_rl.algos.advantages.registered import ADVANTAGES
from grpo_rl.algos.objective import Objective

# ---- properties of every combination ---------------------------------------------------------------


@pytest.mark.parametrize(("loss_mode", "agg_mode"), COMBINATIONS)
@settings(deadline=None, max_examples=5)
@given(seed=st.integers(0, 10_000), num_parts=st.integers(2, 6))
def test_any_split_into_micro_batches_and_ranks_gives_the_same_gradient(
    loss_mode: str, agg_mode: str, seed: int, num_parts: int
) -> None:
    data = reference.ragged(seed, extremes=seed % 2 == 1)
    objective = make(loss_mode, agg_mode, entropy_coeff=0.1, kl_loss_type="k3_unbiased", kl_loss_coef=0.5)
    loss, stats, gradient_T = run(objective, data, data.counts())
    whole = data.nested(gradient_T.tolist())

    rng = random.Random(seed)
    order = list(range(len(data.lengths)))
    rng.shuffle(order)
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    for i in order:
        rng.choice(parts).append(i)
    losses, part_stats = [], []
    for part in parts:
        piece = data.select(part)
        part_loss, part_stat, part_gradient_T = run(objective, piece, data.counts())
        losses.append(part_loss.item())
        part_stats.append(part_stat)
        for i, gradient in zip(part, piece.nested(part_gradient_T.tolist()), strict=True):
            assert gradient == pytest.approx(whole[i], rel=1e-6, abs=1e-9)
    assert math.fsum(losses) == pytest.approx(loss.item(), rel=1e-9, abs=1e-9)
    together = combine(part_stats)
    assert together == pytest.approx({key: value.item() for key, value in stats.items()}, rel=1e-9, abs=1e-9)


def leaves_the_policy(objective: Objective, on_policy: bool) -> bool:
    """Return whether groups of equal rewards give no loss and no gradient at all."""
    data = reference.ragged(6)
    same = [0.1 * group for group in data.group]
    data = replace(data, rewards=same, parts=[[r, r] for r in same], steps=[[] for _ in same])
    advantages_T = ADVANTAGES.get("grpo")(complete(data)).advantages_T
    policy_T, old_T = torch.tensor(data.policy, requires_grad=True), torch.tensor(data.old)
    columns: dict[str, Tensor | None] = {**extras(objective, data)}
    if objective.needs_selection:
        columns["selected_T"] = objective.select(advantages_T, old_T, torch.Generator())
    columns["old_logprobs_T"] = None if on_policy else old_T
    loss, _ = objective(inputs(policy_T, advantages_T, data.lengths, **columns), data.counts())
    loss.backward()
    assert policy_T.grad is not None
    return loss.item() == 0 and bool((policy_T.grad == 0).all())


@pytest.mark.parametrize(("loss_mode", "agg_mode"), COMBINATIONS)
def test_groups_without_signal_leave_the_policy_exactly_where_it_is(loss_mode: str, agg_mode: str) -> None:
    assert leaves_the_policy(make(loss_mode, agg_mode), on_policy=True)
    # Only dro pulls back towards the old policy even without a signal.
    assert leaves_the_policy(make(loss_mode, agg_mode), on_policy=False) == (loss_mode != "dro")


# ---- weights ------------------------------------------------------------------------


@pytest.mark.parametrize("loss_mode", SINGLE)
def test_weights_multiply_the_policy_loss_of_each_token_and_nothing_else(loss_mode: str) -> None:
    data = reference.ragged(3)
    objective = make(loss_mode, "token-sum", kl_loss_type="k1", kl_loss_coef=1.0)
    fixed = {
        "old_logprobs_T": torch.tensor(data.old, dtype=torch.float64),
        "ref_logprobs_T": torch.tensor(data.ref, dtype=torch.float64),
        **extras(objective, data),
    }
    first = inputs(torch.tensor(data.policy, dtype=torch.float64), torch.tensor(data.values), data.lengths, **fixed)
    plain, plain_stats = objective(first, data.counts())
    weighted, stats = objective(replace(first, weights_T=torch.full((len(data.policy),), 3.0)), data.counts())
    assert stats["share/kl_loss"] == plain_stats["share/kl_loss"]
    assert stats["share/pg_loss"].item() == pytest.approx(3 * plain_stats["share/pg_loss"].item(), rel=1e-12)
    weights_T = torch.rand(len(data.policy), requires_grad=True)
    assert not objective(replace(first, weights_T=weights_T), data.counts())[0].requires_grad and plain != weighted
