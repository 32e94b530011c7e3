"""Rollouts of advantage 0: which losses give them no gradient, and which rollouts are left out of the backward pass."""

from __future__ import annotations

import pytest
import torch

from grpo_rl.algos.losses.contract import LossInput, TokenLoss
from grpo_rl.algos.losses.registered import POLICY_LOSSES
from grpo_rl.algos.objective import Objective
from grpo_rl.algos.trial import silent_without_advantage
from grpo_rl.registry import needs
from grpo_rl.types import Batch

# sft trains every token alike, dro and kl_cov have terms of the ratio without the advantage, the others compare pairs.
NEVER_SILENT = {"sft", "dro", "kl_cov", "dpo", "dpo_hinge", "ipo", "simpo"}
LENGTHS_N = torch.tensor([2, 3, 0, 1])
ADVANTAGES_T = torch.tensor([0.0, 0.0, 0.0, 1.0, 0.0, 0.0])


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_losses_that_are_silent_without_an_advantage(name):
    assert silent_without_advantage(POLICY_LOSSES.get(name), {}) == (name not in NEVER_SILENT)


def test_a_loss_with_a_term_far_from_the_old_policy_is_not_silent():
    def fenced(inputs: LossInput) -> TokenLoss:
        far_T = (inputs.log_ratio_T().abs() - 8.0).clamp(min=0.0)
        return TokenLoss(-inputs.advantages_T * inputs.policy_logprobs_T + 0.1 * far_T)

    @needs("entropy")
    def curious(inputs: LossInput) -> TokenLoss:
        return TokenLoss(-inputs.advantages_T * inputs.policy_logprobs_T + 0.0 * inputs.column("entropy_T"))

    assert not silent_without_advantage(fenced, {})
    assert not silent_without_advantage(curious, {})
    assert silent_without_advantage(POLICY_LOSSES.get("vanilla"), {"clip_low": 0.4})


def test_only_rollouts_whose_advantages_are_all_0_are_silent():
    batch = Batch(LENGTHS_N, LENGTHS_N, LENGTHS_N, LENGTHS_N, LENGTHS_N, advantages_T=ADVANTAGES_T)
    assert batch.zero_advantage().tolist() == [True, False, True, True]
    assert Objective().skips_zero_advantage


@pytest.mark.parametrize(
    "objective",
    [
        Objective(entropy_coeff=0.01),
        Objective(adaptive_entropy=True),
        Objective(kl_loss_type="low_var_kl", kl_loss_coef=0.1),
        Objective("kl_cov", loss_options=(("kl_cov_ratio", 0.1),)),
        Objective("sft"),
    ],
    ids=["entropy", "adaptive entropy", "kl", "kl_cov", "sft"],
)
def test_other_terms_read_every_rollout(objective):
    assert not objective.skips_zero_advantage
