"""The whole objective: configuration, values, statistics, and the properties every combination must have."""

from __future__ import annotations

import itertools
import math
import pickle
import random
import re
from dataclasses import replace
from typing import Any

import algos_reference as reference
import algos_reference_losses as reference_losses
import pytest
import torch
from advantage_cases import complete
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpo_rl.algos.advantages import ADVANTAGES, needs_of
from grpo_rl.algos.aggregate import AGGREGATIONS, count
from grpo_rl.algos.correction import kept_lengths
from grpo_rl.algos.formula import formula_of
from grpo_rl.algos.kl import KL_ESTIMATORS
from grpo_rl.algos.objective import Objective
from grpo_rl.algos.policy_losses import POLICY_LOSSES
from grpo_rl.config.schema import ActorConfig, PolicyLossConfig
from grpo_rl.errors import ConfigError
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


# ---- configuration ---------------------------------------------------------------------------------


def test_the_default_configuration_is_grpo_with_k3_in_the_loss() -> None:
    objective = Objective.from_config(ActorConfig())
    assert objective == Objective(kl_loss_type="low_var_kl", kl_loss_coef=0.001)
    assert (objective.loss_mode, objective.loss_agg_mode) == ("vanilla", "token-mean")
    assert (objective.clip_low, objective.clip_high, objective.clip_c) == (0.2, 0.2, 3.0)
    assert (objective.needs_ref, objective.needs_entropy, objective.needs_full_kl) == (True, False, False)


def test_the_clip_ratio_holds_for_every_side_that_is_not_given() -> None:
    objective = Objective.from_config(ActorConfig(clip_ratio=0.1, clip_ratio_high=0.28))
    assert (objective.clip_low, objective.clip_high) == (0.1, 0.28)
    objective = Objective.from_config(ActorConfig(clip_ratio_low=0.3, clip_ratio_c=5.0))
    assert (objective.clip_low, objective.clip_high, objective.clip_c) == (0.3, 0.2, 5.0)


def test_what_the_caller_has_to_supply_follows_from_the_terms() -> None:
    full = Objective.from_config(ActorConfig(kl_loss_type="full", entropy_coeff=0.01))
    assert (full.needs_ref, full.needs_entropy, full.needs_full_kl) == (True, True, True)
    none = Objective.from_config(ActorConfig(use_kl_loss=False))
    assert (none.needs_ref, none.needs_entropy, none.needs_full_kl) == (False, False, False)
    with pytest.raises(AssertionError, match="ref_logprobs_T"):
        Objective(kl_loss_type="k3")(
            policy_logprobs_T=torch.zeros(1),
            advantages_T=torch.zeros(1),
            lengths_N=torch.tensor([1]),
            counts=Counts(1, 1, 1),
        )


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


def test_an_objective_travels_between_processes() -> None:
    objective = Objective.from_config(ActorConfig(entropy_coeff=0.5))
    assert pickle.loads(pickle.dumps(objective)) == objective


# ---- values ----------------------------------------------------------------------------------------


def test_all_three_terms_by_hand() -> None:
    # Two responses of 1 and 2 tokens; ratio 1, so the policy term is -A; k1 of each token is d.
    policy_T = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    loss, stats = Objective(loss_agg_mode="seq-mean-token-mean", entropy_coeff=0.5, kl_loss_type="k1", kl_loss_coef=0.25)(
        policy_logprobs_T=policy_T,
        advantages_T=torch.tensor([2.0, -1.0, -1.0]),
        lengths_N=torch.tensor([1, 2]),
        counts=Counts(num_tokens=3, num_sequences=2, num_groups=1),
        ref_logprobs_T=torch.tensor([-2.0, -2.0, -5.0]),
        entropy_T=torch.tensor([1.0, 0.5, 0.5]),
    )
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


@pytest.mark.parametrize(("loss_mode", "agg_mode", "kl_type"), TERMS)
@pytest.mark.parametrize("extremes", [False, True])
def test_every_combination_agrees_with_the_plain_python_reference(
    loss_mode: str, agg_mode: str, kl_type: str, extremes: bool
) -> None:
    data = reference.ragged(13, num_rollouts=16, extremes=extremes)
    objective = make(loss_mode, agg_mode, clip_high=0.3, entropy_coeff=0.01, kl_loss_type=kl_type, kl_loss_coef=0.1)
    loss, _, gradient_T = run(objective, data, data.counts())

    advantages = [r for r, length in zip(data.rewards, data.lengths, strict=True) for _ in range(length)]
    pg = reference_losses.policy_loss(loss_mode, data, advantages, 0.2, 0.3, 3.0)
    columns = zip(data.policy, data.ref, data.old, strict=True)
    kl = [math.exp(p) if kl_type == "full" else reference.kl(kl_type, p, r, o) for p, r, o in columns]

    def average(values: list[float]) -> float:
        return reference.average(agg_mode, data.nested(values), data.group_tokens, data.group, FACTOR)

    terms = [(1.0, average(pg)), (-0.01, average([p * p for p in data.policy])), (0.1, average(kl))]
    size = sum(abs(weight * value) for weight, value in terms)
    assert abs(loss.item() - math.fsum(weight * value for weight, value in terms)) <= 1e-6 * size
    assert torch.isfinite(gradient_T).all()


@pytest.mark.parametrize(("loss_mode", "agg_mode", "kl_type"), SMOOTH)
def test_gradients_of_every_combination_are_those_of_finite_differences(loss_mode: str, agg_mode: str, kl_type: str) -> None:
    data = reference.ragged(5, num_rollouts=5)
    objective = make(loss_mode, agg_mode, entropy_coeff=0.1, kl_loss_type=kl_type, kl_loss_coef=0.5)
    fixed = {
        "advantages_T": torch.tensor(data.policy, dtype=torch.float64).sin(),
        "lengths_N": torch.tensor(data.lengths),
        "old_logprobs_T": torch.tensor(data.old, dtype=torch.float64),
        "ref_logprobs_T": torch.tensor(data.ref, dtype=torch.float64),
        **extras(objective, data),
    }

    def loss(policy_T: Tensor) -> Tensor:
        return objective(
            policy_logprobs_T=policy_T,
            counts=data.counts(),
            entropy_T=policy_T.square(),
            full_kl_T=policy_T.exp(),
            **fixed,
        )[0]

    assert torch.autograd.gradcheck(loss, torch.tensor(data.policy, dtype=torch.float64, requires_grad=True))


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


@pytest.mark.parametrize(("loss_mode", "agg_mode"), COMBINATIONS)
def test_the_order_of_rollouts_does_not_matter(loss_mode: str, agg_mode: str) -> None:
    data = reference.ragged(2)
    order = list(range(len(data.lengths)))
    random.Random(0).shuffle(order)
    objective = make(loss_mode, agg_mode, kl_loss_type="k3", kl_loss_coef=0.5)
    permuted = data.select(order)
    loss, _, gradient_T = run(objective, data, data.counts())
    permuted_loss, _, permuted_gradient_T = run(objective, permuted, data.counts())
    assert permuted_loss.item() == pytest.approx(loss.item(), rel=1e-12)
    before, after = data.nested(gradient_T.tolist()), permuted.nested(permuted_gradient_T.tolist())
    assert after == [before[i] for i in order]


@pytest.mark.parametrize(("loss_mode", "agg_mode"), COMBINATIONS)
def test_on_policy_the_gradient_is_that_of_reinforce(loss_mode: str, agg_mode: str) -> None:
    data = reference.ragged(4)
    data = replace(data, entropy=[0.0 for _ in data.entropy])  # no token is chosen for other treatment
    _, stats, gradient_T = run(make(loss_mode, agg_mode), data, data.counts(), on_policy=True)
    counts = data.counts()
    expected = []
    for reward, length, tokens in zip(data.rewards, data.lengths, data.group_tokens, strict=True):
        weight = {
            "token-mean": 1 / counts.num_tokens,
            "token-sum": 1.0,
            "seq-mean-token-sum": 1 / counts.num_sequences,
            "seq-mean-token-sum-norm": 1 / counts.num_sequences / FACTOR,
            "seq-mean-token-mean": 1 / counts.num_sequences / max(length, 1),
            "prompt-mean": 1 / counts.num_groups / max(tokens, 1),
        }[agg_mode]
        expected += [-reward * weight] * length
    assert gradient_T.tolist() == pytest.approx(expected, rel=1e-6)
    assert stats["sum/ppo_kl"] == 0


def test_on_policy_the_ratio_is_exactly_one_for_any_log_prob() -> None:
    data = reference.ragged(4, extremes=True)
    _, stats, _ = run(Objective(), data, data.counts(), on_policy=True)
    assert stats["max/ratio_max"] == 1.0
    assert stats["sum/pg_clipfrac"] == stats["sum/pg_clipfrac_lower"] == 0


def leaves_the_policy(objective: Objective, estimator: str, on_policy: bool) -> bool:
    """Whether groups of equal rewards give no loss and no gradient at all."""
    data = reference.ragged(6)
    same = [0.1 * group for group in data.group]
    data = replace(data, rewards=same, parts=[[r, r] for r in same], steps=[[] for _ in same])
    advantages_T = ADVANTAGES.get(estimator)(complete(data)).advantages_T
    policy_T, old_T = torch.tensor(data.policy, requires_grad=True), torch.tensor(data.old)
    columns = extras(objective, data)
    if objective.needs_selection:
        columns["selected_T"] = objective.select(advantages_T, old_T, torch.Generator())
    loss, _ = objective(
        policy_logprobs_T=policy_T,
        advantages_T=advantages_T,
        lengths_N=torch.tensor(data.lengths),
        counts=data.counts(),
        old_logprobs_T=None if on_policy else old_T,
        **columns,
    )
    loss.backward()
    assert policy_T.grad is not None
    return loss.item() == 0 and bool((policy_T.grad == 0).all())


@pytest.mark.parametrize(("loss_mode", "agg_mode"), COMBINATIONS)
def test_groups_without_signal_leave_the_policy_exactly_where_it_is(loss_mode: str, agg_mode: str) -> None:
    assert leaves_the_policy(make(loss_mode, agg_mode), "grpo", on_policy=True)
    # Only dro pulls back towards the old policy even without a signal.
    assert leaves_the_policy(make(loss_mode, agg_mode), "grpo", on_policy=False) == (loss_mode != "dro")


@pytest.mark.parametrize("estimator", [name for name in ADVANTAGES if needs_of(ADVANTAGES.get(name)).group])
def test_every_group_estimator_leaves_the_policy_where_it_is_without_signal(estimator: str) -> None:
    assert leaves_the_policy(Objective(), estimator, on_policy=False)


@pytest.mark.parametrize(("loss_mode", "agg_mode", "kl_type"), TERMS)
@pytest.mark.parametrize("lengths", [[], [0, 0], [1], [0, 1, 0]])
def test_tiny_micro_batches_give_finite_numbers(loss_mode: str, agg_mode: str, kl_type: str, lengths: list[int]) -> None:
    n, t = len(lengths), sum(lengths)
    columns = {"policy": [-100.0] * t, "old": [-1.0] * t, "ref": [-1.0] * t}
    columns |= {name: [2.0] * t for name in ("entropy", "full_kl", "values")}
    rollouts = {"rewards": [1.0] * n, "baselines": [0.0] * n, "parts": [[]] * n, "steps": [[]] * n, "group_tokens": [t] * n}
    data = reference.Ragged(lengths=lengths, group=[0] * n, **columns, **rollouts)
    objective = make(loss_mode, agg_mode, entropy_coeff=0.1, kl_loss_type=kl_type, kl_loss_coef=0.1)
    loss, stats, gradient_T = run(objective, data, data.counts())
    assert torch.isfinite(loss) and torch.isfinite(gradient_T).all()
    assert all(value.shape == () and value.dtype == torch.float64 and torch.isfinite(value) for value in stats.values())
    if not t:
        assert loss == 0


# ---- weights, rejected tokens, options ---------------------------------------------------------------


@pytest.mark.parametrize(("loss_mode", "agg_mode"), COMBINATIONS)
def test_rejected_tokens_leave_the_loss_and_every_denominator(loss_mode: str, agg_mode: str) -> None:
    """Training kept tokens alone is training a batch that never had the others."""
    data = reference.ragged(8, num_rollouts=10)
    keep = [i % 3 != 0 for i in range(len(data.policy))]
    keep_T, lengths_N, group_N = torch.tensor(keep), torch.tensor(data.lengths), torch.tensor(data.group)
    kept_N = kept_lengths(keep_T, lengths_N)
    tokens = {name: [x for x, k in zip(getattr(data, name), keep, strict=True) if k] for name in reference.TOKEN_COLUMNS}
    group_tokens = [sum(int(n) for n, h in zip(kept_N, data.group, strict=True) if h == g) for g in data.group]
    thinned = replace(data, lengths=kept_N.tolist(), group_tokens=group_tokens, **tokens)
    objective = make(loss_mode, agg_mode, kl_loss_type="k3", kl_loss_coef=0.5)
    expected, expected_stats, expected_gradient_T = run(objective, thinned, thinned.counts())

    policy_T = torch.tensor(data.policy, requires_grad=True)
    columns = extras(objective, replace(data, group_tokens=group_tokens))
    loss, stats = objective(
        policy_logprobs_T=policy_T,
        advantages_T=torch.tensor(data.rewards)[torch.repeat_interleave(lengths_N)],
        lengths_N=lengths_N,
        counts=count(kept_N, group_N),
        old_logprobs_T=torch.tensor(data.old),
        ref_logprobs_T=torch.tensor(data.ref),
        keep_T=keep_T,
        **columns,
    )
    loss.backward()
    assert policy_T.grad is not None
    assert torch.equal(loss.detach(), expected) and stats == expected_stats
    assert torch.equal(policy_T.grad[keep_T], expected_gradient_T) and not policy_T.grad[~keep_T].any()


@pytest.mark.parametrize("loss_mode", sorted(POLICY_LOSSES))
def test_weights_multiply_the_policy_loss_of_each_token_and_nothing_else(loss_mode: str) -> None:
    data = reference.ragged(3)
    objective = make(loss_mode, "token-sum", kl_loss_type="k1", kl_loss_coef=1.0)
    fixed = {
        "policy_logprobs_T": torch.tensor(data.policy, dtype=torch.float64),
        "advantages_T": torch.tensor(data.values),
        "lengths_N": torch.tensor(data.lengths),
        "counts": data.counts(),
        "old_logprobs_T": torch.tensor(data.old, dtype=torch.float64),
        "ref_logprobs_T": torch.tensor(data.ref, dtype=torch.float64),
        **extras(objective, data),
    }
    plain, plain_stats = objective(**fixed)
    weighted, stats = objective(**fixed, weights_T=torch.full((len(data.policy),), 3.0))
    assert stats["share/kl_loss"] == plain_stats["share/kl_loss"]
    assert stats["share/pg_loss"].item() == pytest.approx(3 * plain_stats["share/pg_loss"].item(), rel=1e-12)
    weights_T = torch.rand(len(data.policy), requires_grad=True)
    assert not objective(**fixed, weights_T=weights_T)[0].requires_grad and plain != weighted


def test_options_reach_the_loss_the_choice_of_tokens_and_the_formula() -> None:
    sapo = Objective("sapo", loss_options=(("tau_pos", 2.0),))
    assert sapo.formula().splitlines()[1] == ("pg   = -A sigmoid(τ (r - 1)) 4/τ; r = π / π_old; τ = 2 where A > 0, else 1.05")
    data = reference.ragged(1)
    assert run(sapo, data, data.counts())[0] != run(Objective("sapo"), data, data.counts())[0]
    every = Objective("kl_cov", loss_options=(("kl_cov_ratio", 1.0),))
    advantages_T, logprobs_T = torch.tensor([2.0, 0.0, -1.0, -1.0]), torch.tensor([-1.0, -2.0, -3.0, -4.0])
    assert every.select(advantages_T, logprobs_T, torch.Generator()).tolist() == [True, False, True, True]
    assert Objective("kl_cov").select(advantages_T, logprobs_T, torch.Generator()).tolist() == [True, False, False, False]
    assert pickle.loads(pickle.dumps(every)) == every and hash(every) == hash(pickle.loads(pickle.dumps(every)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss_mode": "sapo", "loss_options": (("tau_poss", 1.0),)}, "no option tau_poss. Did you mean tau_pos?"),
        ({"loss_mode": "vanilla", "loss_options": (("clip_low", 1.0),)}, "vanilla' has no option clip_low. It takes none"),
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
    one = {"policy_logprobs_T": torch.zeros(1), "advantages_T": torch.zeros(1), "lengths_N": torch.tensor([1])}
    loss, _ = objective(**one, counts=Counts(1, 1, 1), entropy_T=torch.tensor([2.0]), entropy_coeff=0.25)
    assert loss.item() == -0.5
    with pytest.raises(AssertionError, match="entropy_coeff"):
        objective(**one, counts=Counts(1, 1, 1), entropy_T=torch.tensor([2.0]))


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


def test_the_formula_leaves_out_what_the_objective_does_not_have() -> None:
    text = Objective(loss_mode="reinforce", loss_agg_mode="seq-mean-token-mean").formula()
    assert text.splitlines() == [
        "loss = avg(pg)",
        "pg   = -A log π",
        "avg  = 1/num_sequences Σ_responses 1/length Σ_tokens, counted over the whole mini-batch  [seq-mean-token-mean]",
    ]
    assert "Σ_v π_v (log π_v - log π_ref,v)" in replace(Objective(), kl_loss_type="full").formula()


def test_every_registered_function_has_a_formula() -> None:
    for registry in (ADVANTAGES, POLICY_LOSSES, AGGREGATIONS, KL_ESTIMATORS):
        for name in registry:
            function = registry.get(name)
            assert formula_of(function) != function.__name__, f"{registry.kind} {name} has no `Formula:` in its docstring"


def test_a_function_without_a_formula_is_shown_by_its_name() -> None:
    def my_loss() -> None:
        """My loss."""

    assert formula_of(my_loss) == "my_loss"
