"""The whole objective: configuration, values by hand, options, and the formula it prints."""

from __future__ import annotations

import math
import pickle
import re
from dataclasses import replace
from typing import Any

import pytest
import ragged_batches as reference
import torch
from objective_cases import inputs, run

from grpo_rl.algos.advantages.registered import ADVANTAGES
from grpo_rl.algos.aggregate import AGGREGATIONS
from grpo_rl.algos.correction import Rejection, RolloutCorrection
from grpo_rl.algos.kl import KL_ESTIMATORS
from grpo_rl.algos.losses.registered import POLICY_LOSSES
from grpo_rl.algos.objective import Objective
from grpo_rl.config.schema.tree import ActorConfig, PolicyLossConfig
from grpo_rl.errors import ConfigError
from grpo_rl.registry import formula_of
from grpo_rl.types import Counts

# ---- configuration ---------------------------------------------------------------------------------


def test_the_clip_ratio_holds_for_every_side_that_is_not_given() -> None:
    objective = Objective.from_config(ActorConfig(clip_ratio=0.1, clip_ratio_high=0.28))
    assert dict(objective.loss_options) == {"clip_low": 0.1, "clip_high": 0.28}
    objective = Objective.from_config(ActorConfig(clip_ratio_low=0.3, clip_ratio_c=5.0))
    assert dict(objective.loss_options) == {"clip_low": 0.3, "clip_c": 5.0}


def test_what_the_caller_has_to_supply_follows_from_the_terms() -> None:
    full = Objective.from_config(ActorConfig(kl_loss_type="full", entropy_coeff=0.01))
    assert (full.needs_ref, full.needs_entropy, full.needs_full_kl) == (True, True, True)
    none = Objective.from_config(ActorConfig(use_kl_loss=False))
    assert (none.needs_ref, none.needs_entropy, none.needs_full_kl) == (False, False, False)
    with pytest.raises(AssertionError, match="ref_logprobs_T"):
        Objective(kl_loss_type="k3")(inputs(torch.zeros(1), torch.zeros(1), [1]), Counts(1, 1, 1))


@pytest.mark.parametrize(
    "actor",
    [
        ActorConfig(policy_loss=PolicyLossConfig(loss_mode="vanila")),
        ActorConfig(loss_agg_mode="token_mean"),
    ],
)
def test_unknown_names_are_refused_when_the_objective_is_built(actor: ActorConfig) -> None:
    with pytest.raises(ConfigError, match="Did you mean"):
        Objective.from_config(actor)


# ---- values ----------------------------------------------------------------------------------------


def test_all_three_terms_by_hand() -> None:
    # Two responses of 1 and 2 tokens; ratio 1, so the policy term is -A; k1 of each token is d.
    policy_T = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    objective = Objective(loss_agg_mode="seq-mean-token-mean", entropy_coeff=0.5, kl_loss_type="k1", kl_loss_coef=0.25)
    columns = inputs(
        policy_T,
        torch.tensor([2.0, -1.0, -1.0]),
        [1, 2],
        ref_logprobs_T=torch.tensor([-2.0, -2.0, -5.0]),
        entropy_T=torch.tensor([1.0, 0.5, 0.5]),
    )
    loss, stats = objective(columns, Counts(num_tokens=3, num_sequences=2, num_groups=1))
    # pg (-2 + 1) / 2 = -0.5; H (1 + 0.5) / 2 = 0.75; KL (1 + (0 + 2) / 2) / 2 = 1
    assert {name: value.item() for name, value in stats.items()} == {
        "share/pg_loss": -0.5,
        "share/entropy_loss": 0.75,
        "share/kl_loss": 1.0,
        "share/loss": -0.625,
        "sum/entropy": 2.0,
        "sum/pg_clipfrac": 0.0,
        "sum/pg_clipfrac_lower": 0.0,
        "sum/ppo_kl": 0.0,
        "max/ratio_max": 1.0,
    }
    assert loss.item() == -0.625
    loss.backward()
    assert policy_T.grad is not None
    # -A / (2 length) + 0.25 / (2 length)
    assert policy_T.grad.tolist() == [-1 + 0.125, 0.25 + 0.0625, 0.25 + 0.0625]


# ---- options ----------------------------------------------------------------------------------------


def test_options_reach_the_loss_the_choice_of_tokens_and_the_formula() -> None:
    sapo = Objective("sapo", loss_options=(("tau_pos", 2.0),))
    assert sapo.formula().splitlines()[1] == ("pg   = -A sigmoid(τ (r - 1)) 4/τ; r = π / π_old; τ = 2 where A > 0, else 1.05")
    data = reference.ragged(1)
    assert run(sapo, data, data.counts())[0] != run(Objective("sapo"), data, data.counts())[0]
    every = Objective("kl_cov", loss_options=(("kl_cov_ratio", 1.0),))
    advantages_T, logprobs_T = torch.tensor([2.0, 0.0, -1.0, -1.0]), torch.tensor([-1.0, -2.0, -3.0, -4.0])
    assert every.select(advantages_T, logprobs_T, torch.Generator()).tolist() == [True, False, True, True]
    assert Objective("kl_cov").select(advantages_T, logprobs_T, torch.Generator()).tolist() == [True, False, False, False]
    # Of the last three, means -2/3 and -3: shares 2/3, 0 and 1/3.
    assert Objective("kl_cov").select(advantages_T[1:], logprobs_T[1:], torch.Generator()).tolist() == [True, False, False]
    assert pickle.loads(pickle.dumps(every)) == every and hash(every) == hash(pickle.loads(pickle.dumps(every)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss_mode": "sapo", "loss_options": (("tau_poss", 1.0),)}, "no option tau_poss. Did you mean tau_pos?"),
        (
            {"loss_mode": "clip_cov", "loss_options": (("clip_c", 1.0),)},
            "clip_cov' has no option clip_c. Did you mean clip_low?",
        ),
        ({"loss_mode": "kl_cov", "loss_options": (("kl_cov_ratio", "a"),)}, "kl_cov_ratio='a' is not of the type"),
        ({"loss_mode": "kl_cov", "loss_options": (("ppo_kl_coef", True),)}, "ppo_kl_coef=True is not of the type"),
        ({"loss_agg_mode": "token-mean", "agg_options": (("loss_scale_factor", 1.0),)}, "has no option loss_scale_factor"),
        ({"loss_agg_mode": "seq-mean-token-sum-norm"}, "needs loss_scale_factor"),
    ],
)
def test_options_that_nothing_takes_are_refused_when_the_objective_is_built(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        Objective(**settings)


def test_a_steered_entropy_coefficient_comes_with_every_call() -> None:
    objective = Objective(adaptive_entropy=True)
    assert objective.needs_entropy and objective.formula().splitlines()[0] == "loss = avg(pg) - (adaptive entropy_coeff)·avg(H)"
    one = inputs(torch.zeros(1), torch.zeros(1), [1], entropy_T=torch.tensor([2.0]))
    loss, _ = objective(one, Counts(1, 1, 1), entropy_coeff=0.25)
    assert loss.item() == -0.5
    with pytest.raises(AssertionError, match="entropy_coeff"):
        objective(one, Counts(1, 1, 1))


# ---- the formula -----------------------------------------------------------------------------------


def test_the_formula_states_every_term_with_its_numbers_and_denominators() -> None:
    text = Objective.from_config(ActorConfig(entropy_coeff=0.01, clip_ratio_high=0.28)).formula()
    assert text.splitlines() == [
        "loss = avg(pg) - 0.01·avg(H) + 0.001·avg(KL)",
        "pg   = max(-A r, -A clip(r, 0.8, 1.28)), at most -3 A where A < 0; r = π / π_old",
        "H    = -Σ_v π_v log π_v",
        "KL   = min(e^x - x - 1, 10); x = clamp(log π_ref - log π, -20, 20)  [low_var_kl]",
        "avg  = 1/num_tokens Σ_tokens, counted over the whole mini-batch  [token-mean]",
    ]


def test_every_registered_function_has_a_formula() -> None:
    for registry in (ADVANTAGES, POLICY_LOSSES, AGGREGATIONS, KL_ESTIMATORS):
        for name in registry:
            function = registry.get(name)
            assert formula_of(function) != function.__name__, f"{registry.kind} {name} has no `Formula:` in its docstring"


# ---- the policy against the engine, in bypass mode -----------------------------------------------------


def bypassed(loss_mode: str, **settings: Any) -> Objective:
    actor = ActorConfig(use_kl_loss=False, policy_loss=PolicyLossConfig(loss_mode=loss_mode))
    return Objective.from_config(actor, correction=RolloutCorrection(bypass_mode=True, **settings))


def test_with_bypass_the_weights_are_those_of_the_policy_that_is_trained_against_the_engine() -> None:
    old_T, policy_T = torch.tensor([-1.0, -2.0, -1.0]), torch.tensor([-1.5, -0.5, -1.1], requires_grad=True)
    batch, counts = replace(inputs(policy_T, torch.tensor([1.0, 1.0, -1.0]), [2, 1]), old_logprobs_T=old_T), Counts(3, 2, 2)
    weighed = bypassed("reinforce", rollout_is="token", rollout_is_threshold=2.0)
    loss, _ = weighed(batch, counts)
    # Ratios to the engine: e^-0.5, e^1.5 (cut to 2) and e^-0.1; the gradient is -w A over the tokens of the mini-batch.
    weights = torch.tensor([math.exp(-0.5), 2.0, math.exp(-0.1)])
    expected = -weights * torch.tensor([1.0, 1.0, -1.0])
    torch.testing.assert_close(torch.autograd.grad(loss, policy_T)[0], expected / 3)
    # A rejected token is in no gradient and stays in the denominator.
    rejecting = bypassed("reinforce", rollout_rs=(Rejection("token_k1", 0.5, 2.0),))
    gradient = torch.autograd.grad(rejecting(batch, counts)[0], policy_T)[0]
    torch.testing.assert_close(gradient, torch.tensor([-1.0, 0.0, 1.0]) / 3)


def test_with_bypass_a_loss_with_a_ratio_is_only_weighed_by_that() -> None:
    assert bypassed("vanilla", rollout_is="token", rollout_is_threshold=2.0).correction is None
    rejecting = bypassed(
        "vanilla", rollout_is="token", rollout_is_threshold=2.0, rollout_rs=(Rejection("seq_max_k2", None, 0.5),)
    )
    assert rejecting.correction is not None and rejecting.correction.rollout_is is None
    assert Objective.from_config(ActorConfig(), correction=RolloutCorrection("token", 2.0)).correction is None
