"""Losses over pairs: values worked out by hand, gradients against a plain version, and what must not change them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from compositions import compose
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpo_rl.algos import trial
from grpo_rl.algos.aggregate import group_tokens
from grpo_rl.algos.losses.preference import Pairs
from grpo_rl.algos.losses.registered import POLICY_LOSSES, LossInput
from grpo_rl.algos.objective import Objective
from grpo_rl.algos.segments import Segments
from grpo_rl.config.derived import Machine
from grpo_rl.config.function_options import PAIR_AVERAGES
from grpo_rl.errors import ConfigError
from grpo_rl.plan.make import make_plan
from grpo_rl.types import Counts

CASES: list[tuple[str, dict[str, Any]]] = [
    ("dpo", {}),
    ("dpo", {"beta": 0.5, "label_smoothing": 0.2}),
    ("dpo", {"beta": 2.0, "reference_free": True}),
    ("dpo", {"beta": 5.0, "length_normalised": True}),
    ("ipo", {"beta": 0.3}),
    ("ipo", {"beta": 1.0, "length_normalised": True}),
    ("dpo_hinge", {"beta": 0.2}),
    ("dpo_hinge", {"beta": 0.05, "reference_free": True, "length_normalised": True}),
    ("simpo", {}),
    ("simpo", {"beta": 2.5, "gamma": 0.3}),
    ("orpo", {"beta": 0.5}),
    ("kto", {"beta": 0.5, "undesirable_weight": 1.5}),
]


def pair(policy: list[list[float]], ref: list[list[float]], chosen: list[bool]) -> LossInput:
    """Responses with these log-probs per token; two after another are a pair."""
    lengths_N = torch.tensor([len(tokens) for tokens in policy])
    group_N = torch.arange(len(policy)) // 2
    flat_T, ref_T = (torch.tensor(list(itertools.chain(*rows)), dtype=torch.float64) for rows in (policy, ref))
    return LossInput(
        policy_logprobs_T=flat_T.requires_grad_(),
        advantages_T=torch.ones(len(flat_T)),
        segments=Segments(lengths_N),
        ref_logprobs_T=ref_T,
        group_N=group_N,
        chosen_N=torch.tensor(chosen),
        group_tokens_N=group_tokens(lengths_N, group_N),
    )


def total(name: str, inputs: LossInput, **options: Any) -> tuple[Tensor, dict[str, float]]:
    objective = Objective(name, "seq-mean-token-mean", loss_options=tuple(options.items()))
    assert inputs.group_N is not None
    loss, stats = objective(inputs, Counts.of(inputs.segments.lengths_N, inputs.group_N))
    return loss, {key: value.item() for key, value in stats.items()}


# log π: chosen -3 in 2 tokens, rejected -4 in 4 tokens; log π_ref: chosen -4, rejected -2.
# Log-ratios +1 and -2, so the margin h is 3; per token 0.5 and -0.5, so 1; without the reference -3 + 4 = 1, per token -0.5.
BY_HAND = pair([[-1.0, -2.0], [-1.0, -1.0, -1.5, -0.5]], [[-2.0, -2.0], [-0.5, -0.5, -0.5, -0.5]], [True, False])


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize(
    ("name", "options", "loss"),
    [
        ("dpo", {}, 0.5543552444685271),  # -log sigmoid(0.3)
        ("dpo", {"beta": 1.0}, 0.04858735157374206),  # -log sigmoid(3) = log(1 + e^-3)
        ("dpo", {"beta": 1.0, "label_smoothing": 0.1}, 0.9 * 0.04858735157374206 + 0.1 * 3.04858735157374206),
        ("dpo", {"beta": 1.0, "reference_free": True}, 0.31326168751822286),  # -log sigmoid(1)
        ("dpo", {"beta": 1.0, "length_normalised": True}, 0.31326168751822286),
        ("dpo", {"beta": 2.0, "reference_free": True, "length_normalised": True}, 1.3132616875182228),  # -log sigmoid(-1)
        ("ipo", {}, 4.0),  # (3 - 5)²
        ("ipo", {"beta": 0.25, "length_normalised": True}, 1.0),  # (1 - 2)²
        ("ipo", {"beta": 0.25, "reference_free": True}, 1.0),
        ("dpo_hinge", {}, 0.7),
        ("dpo_hinge", {"beta": 0.5}, 0.0),
        ("dpo_hinge", {"beta": 0.5, "reference_free": True}, 0.5),
        ("simpo", {}, 2.1269280110429727),  # means -1.5 and -1: -log sigmoid(2·(-0.5) - 1) = log(1 + e²)
        ("simpo", {"beta": 2.5, "gamma": 0.25}, 1.7014132779827524),  # log(1 + e^1.5)
        # means -1.5 and -1, log-odds -1.5 - log(1 - e^-1.5) and -1 - log(1 - e^-1)
        ("orpo", {"beta": 2.0}, 1.5 + 2.0 * math.log(1 + (math.e**1.5 - 1) / (math.e - 1))),
    ],
)
def test_values_of_one_pair_by_hand(name: str, options: dict[str, Any], loss: float) -> None:
    assert total(name, BY_HAND, **options)[0].item() == pytest.approx(loss, rel=1e-12)


def test_implicit_rewards_their_margin_and_accuracy_by_hand() -> None:
    two = pair(
        [[-1.0, -2.0], [-1.0, -1.0, -1.5, -0.5], [-3.0], [-2.0, -2.0]],
        [[-2.0, -2.0], [-0.5, -0.5, -0.5, -0.5], [-1.0], [-4.0, -2.0]],
        [True, False, False, True],
    )
    # Rewards 0.1·(1, -2) and, of the second pair, chosen 0.1·2 and rejected 0.1·(-2).
    _, stats = total("dpo", two)
    assert stats["share/reward_chosen"] == pytest.approx((0.1 + 0.2) / 2)
    assert stats["share/reward_rejected"] == pytest.approx((-0.2 - 0.2) / 2)
    assert stats["share/reward_margin"] == pytest.approx((0.3 + 0.4) / 2)
    assert stats["share/logprob_chosen"] == pytest.approx((-3.0 - 4.0) / 2)
    assert stats["share/logprob_rejected"] == pytest.approx((-4.0 - 3.0) / 2)
    assert stats["share/reward_accuracy"] == 1.0
    assert not any(key.startswith("sum/") for key in stats), "means over tokens would count long pairs more"
    assert total("simpo", two)[1]["share/reward_accuracy"] == 0.5
    assert total("simpo", two)[1]["share/reward_margin"] == pytest.approx(2.0 * (-0.5 + 1.0) / 2)


# ---- gradients -----------------------------------------------------------------------------------------


def ragged(seed: int) -> LossInput:
    """Five random pairs whose rollouts lie in any order."""
    num_pairs = 5
    generator = torch.Generator().manual_seed(seed)
    order_N = torch.randperm(2 * num_pairs, generator=generator)
    lengths_N = torch.randint(1, 9, (2 * num_pairs,), generator=generator)
    group_N, chosen_N = (torch.arange(2 * num_pairs) // 2)[order_N], (torch.arange(2 * num_pairs) % 2 == 0)[order_N]
    policy_T, ref_T = -3 * torch.rand(2, int(lengths_N.sum()), generator=generator, dtype=torch.float64)
    return LossInput(
        policy_logprobs_T=policy_T.requires_grad_(),
        advantages_T=torch.ones(len(policy_T)),
        segments=Segments(lengths_N),
        ref_logprobs_T=ref_T,
        group_N=group_N,
        chosen_N=chosen_N,
        kl_N=torch.full((2 * num_pairs,), 0.25),
        group_tokens_N=group_tokens(lengths_N, group_N),
    )


@pytest.mark.parametrize("seed", range(3))
def test_kto_and_its_gradient_are_those_of_trls_formula_in_a_loop(seed: int) -> None:
    """TRL's `KTOTrainer.kto_loss` over single rows: the KL of mismatched rows without gradient, cut below 0, then both sides."""
    beta, weights = 0.3, {True: 1.25, False: 0.75}
    inputs = dataclasses.replace(ragged(seed), group_N=torch.arange(10))
    mismatched = [[(-0.2 * row + 0.1 * token, -0.4 + 0.3 * seed) for token in range(1 + row % 3)] for row in range(10)]
    kl = max(0.0, sum(sum(policy - ref for policy, ref in row) for row in mismatched) / len(mismatched))
    inputs = dataclasses.replace(inputs, kl_N=torch.full((10,), kl, dtype=torch.float64))
    loss, _ = total("kto", inputs, beta=beta, desirable_weight=weights[True], undesirable_weight=weights[False])
    assert inputs.ref_logprobs_T is not None and inputs.chosen_N is not None
    by_loop, place = torch.zeros((), dtype=torch.float64), 0
    for length, desirable in zip(inputs.segments.lengths_N.tolist(), inputs.chosen_N.tolist(), strict=True):
        own = slice(place, place + length)
        ratio = inputs.policy_logprobs_T[own].sum() - inputs.ref_logprobs_T[own].sum()
        inside = beta * (ratio - kl) if desirable else beta * (kl - ratio)
        by_loop = by_loop + weights[desirable] * (1 - 1 / (1 + torch.exp(-inside))) / 10
        place += length
    torch.testing.assert_close(loss, by_loop, rtol=1e-10, atol=0)
    gradients = (torch.autograd.grad(value, inputs.policy_logprobs_T)[0] for value in (loss, by_loop))
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-15)


# ---- properties ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("average", PAIR_AVERAGES)
@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 10_000), num_parts=st.integers(1, 4))
def test_micro_batches_of_whole_pairs_add_up_to_the_same_loss_gradient_and_statistics(
    average: str, seed: int, num_parts: int
) -> None:
    inputs = ragged(seed)
    assert inputs.group_N is not None
    counts = Counts.of(inputs.segments.lengths_N, inputs.group_N)
    for name, options in CASES:
        objective = Objective(name, average, loss_options=tuple(options.items()))
        loss, stats = objective(inputs, counts)
        (gradient_T,) = torch.autograd.grad(loss, inputs.policy_logprobs_T)
        sums: dict[str, float] = {}
        parts_T = torch.zeros_like(gradient_T)
        for part in range(num_parts):
            rows_N = (inputs.group_N * 7 + seed) % num_parts == part
            share = rows(inputs, rows_N)
            share_loss, share_stats = objective(share, counts)
            if len(share.policy_logprobs_T):
                (share_T,) = torch.autograd.grad(share_loss, share.policy_logprobs_T)
                parts_T[inputs.segments.broadcast(rows_N)] = share_T
            for key, value in share_stats.items():
                sums[key] = sums.get(key, 0.0) + value.item()
        assert sums == pytest.approx({key: value.item() for key, value in stats.items()}, rel=1e-9, abs=1e-12)
        torch.testing.assert_close(parts_T, gradient_T, rtol=1e-9, atol=1e-15)


def rows(inputs: LossInput, rows_N: Tensor) -> LossInput:
    """Return some of the responses."""
    tokens_T = inputs.segments.broadcast(rows_N)
    columns = {
        field.name: getattr(inputs, field.name)
        for field in dataclasses.fields(inputs)
        if getattr(inputs, field.name) is not None
    }
    chosen = {name: value[tokens_T if name.endswith("_T") else rows_N] for name, value in columns.items() if name != "segments"}
    chosen["policy_logprobs_T"] = chosen["policy_logprobs_T"].detach().requires_grad_()
    return LossInput(segments=Segments(inputs.segments.lengths_N[rows_N]), **chosen)


@pytest.mark.parametrize(
    ("group", "chosen"),
    [
        ([0, 0, 1], [True, False, True]),
        ([0, 0, 0, 1], [True, False, False, True]),
        ([0, 0, 0, 0], [True, True, False, False]),
        ([0, 0], [True, True]),
        ([0, 0], [False, False]),
        ([0, 1], [True, False]),
    ],
)
def test_rollouts_that_are_no_pairs_are_refused(group: list[int], chosen: list[bool]) -> None:
    with pytest.raises(ValueError, match="not pairs: every group must have one chosen and one rejected"):
        Pairs.of(torch.tensor(group), torch.tensor(chosen))


# ---- what the losses need, and what they refuse --------------------------------------------------------


@pytest.mark.parametrize("name", ["dpo", "ipo", "dpo_hinge"])
def test_without_a_reference_none_has_to_run_and_none_is_read(name: str) -> None:
    options = {"reference_free": True}
    assert not Objective(name, "prompt-mean", loss_options=tuple(options.items())).needs_ref
    trial.run_loss(POLICY_LOSSES.get(name), options)  # which gives it none


@pytest.mark.parametrize("average", ["token-mean", "token-sum", "seq-mean-token-sum"])
def test_an_average_that_counts_tokens_is_refused(average: str) -> None:
    with pytest.raises(ConfigError, match=f"mean over pairs, which loss_agg_mode '{average}' does not make"):
        Objective("dpo", average)


def test_a_run_that_makes_no_mean_over_pairs_or_cannot_hold_one_is_refused() -> None:
    actor = "actor_rollout_ref.actor"
    words = ["data.train_files=task:arithmetic?num_rows=64", "actor_rollout_ref.model.path=builtin:arithmetic"]
    words += ["data.max_prompt_length=200", "data.max_response_length=400", f"{actor}.ppo_max_token_len_per_gpu=1000"]
    config = compose([*words, f"{actor}.policy_loss.loss_mode=dpo", f"{actor}.loss_agg_mode=token-sum"])
    with pytest.raises(ConfigError) as refused:
        make_plan(config, Machine(num_gpus=0, num_cpus=2, device="cpu"))
    text = str(refused.value)
    assert "loss_agg_mode=token-sum: makes no mean over pairs" in text and "prompt-mean or seq-mean-token-mean" in text
    assert "ppo_max_token_len_per_gpu=1000: shorter than a pair" in text and "at least 1200" in text


@pytest.mark.parametrize(
    ("name", "options", "formula"),
    [
        ("dpo", {"beta": 0.5}, "log sigmoid(0.5 h)"),
        ("dpo", {"reference_free": True}, "l = log π(y|x)"),
        ("dpo", {"length_normalised": True}, "l = (log π(y|x) - log π_ref(y|x))/|y|"),
        ("ipo", {"beta": 0.25}, "(h - 1/(2·0.25))²"),
        ("dpo_hinge", {"beta": 0.25}, "max(0, 1 - h·0.25)"),
        ("simpo", {"gamma": 0.5}, "-log sigmoid(2 (m(chosen) - m(rejected)) - 0.5)"),
    ],
)
def test_the_formula_shows_the_options(name: str, options: dict[str, Any], formula: str) -> None:
    text = Objective(name, "prompt-mean", loss_options=tuple(options.items())).formula()
    assert formula in text and ("π_ref" in text) is (name != "simpo" and "reference_free" not in options)
