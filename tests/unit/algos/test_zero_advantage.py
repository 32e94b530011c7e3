"""Zero-advantage rollouts: which losses give them no gradient, and which are left out of the backward pass."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from grpo_rl.algos.losses.contract import scales_with_advantage
from grpo_rl.algos.losses.registered import POLICY_LOSSES
from grpo_rl.algos.objective import Objective
from grpo_rl.algos.trial import LENGTHS_N, loss_input
from grpo_rl.registry import needs_of
from grpo_rl.types import Batch

# sft trains every token alike, dro and kl_cov have terms of the ratio without the advantage, the others compare pairs.
OTHERS = {"sft", "dro", "kl_cov", "dpo", "dpo_hinge", "ipo", "simpo", "orpo", "kto"}
ZERO_T = torch.isin(torch.arange(len(LENGTHS_N)), torch.tensor([1, 4])).repeat_interleave(LENGTHS_N)


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_a_loss_that_declares_it_gives_a_response_without_advantage_no_gradient(name: str) -> None:
    """With ratios of 1, as they are in the batch, and far beyond every clip range; with all tokens chosen or none."""
    loss = POLICY_LOSSES.get(name)
    assert scales_with_advantage(loss) == (name not in OTHERS)
    plain = loss_input(pairs=True) if "pairs" in needs_of(loss) else loss_input()
    found = []
    for factor in (0.0, 1.0, 12.0):
        for chosen in (False, True):
            policy_T = plain.policy_logprobs_T.detach().clone().requires_grad_()
            inputs = replace(
                plain,
                policy_logprobs_T=policy_T,
                advantages_T=plain.advantages_T.masked_fill(ZERO_T[: len(policy_T)], 0.0)
                if name not in OTHERS
                else plain.advantages_T * 0.0,
                old_logprobs_T=policy_T.detach() + factor * (plain.old_T() - plain.policy_logprobs_T).detach(),
                selected_T=torch.full((len(policy_T),), chosen),
            )
            loss_T = loss(inputs).loss_T
            (gradient_T,) = torch.autograd.grad((loss_T * torch.linspace(0.5, 2.0, len(loss_T))).sum(), policy_T)
            found.append(bool((gradient_T[ZERO_T] != 0).any()) if name not in OTHERS else bool((gradient_T != 0).any()))
    assert any(found) == (name in OTHERS)


def test_only_rollouts_whose_advantages_are_all_0_are_left_out() -> None:
    lengths_N = torch.tensor([2, 3, 0, 1])
    batch = Batch(lengths_N, lengths_N, lengths_N, lengths_N, lengths_N)
    by_token = batch.replace(advantages_T=torch.tensor([0.0, 0.0, 0.0, 1.0, 0.0, 0.0]))
    assert by_token.zero_advantage().tolist() == [True, False, True, True]
    assert batch.replace(advantages_N=torch.tensor([0.0, -1.0, 2.0, 0.0])).zero_advantage().tolist() == [
        True,
        False,
        False,
        True,
    ]
    assert batch.zero_advantage() is None, "demonstrations have no advantages"


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
def test_other_terms_read_every_rollout(objective: Objective) -> None:
    assert Objective().skips_zero_advantage and not objective.skips_zero_advantage
