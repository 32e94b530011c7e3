"""Rollout correction: weights, rejections and metrics by hand, and settings that would have no effect."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch

from grpo_rl.algos.correction import (
    Correction,
    Rejection,
    RolloutCorrection,
    correct,
    mismatch_metrics,
    mismatch_shares,
)
from grpo_rl.algos.segments import Segments
from grpo_rl.errors import ConfigError
from grpo_rl.types import Counts

LENGTHS = torch.tensor([2, 0, 1, 1])
RATIOS = [1.5, 4.0, 0.25, 1.0]
"""Old over rollout probability: a response with product 6 and geometric mean sqrt(6), one with 1/4, one with 1."""


def corrected(**settings: Any) -> Correction:
    rollout_T = torch.tensor([-1.0, -2.0, -3.0, -4.0], dtype=torch.float64)
    old_T = rollout_T + torch.tensor(RATIOS, dtype=torch.float64).log()
    return correct(RolloutCorrection(**settings), old_T, rollout_T, Segments(LENGTHS))


def test_without_settings_nothing_is_corrected_and_the_metrics_are_there() -> None:
    out = corrected()
    assert out.weights_T is None and out.trained_T is None
    assert not RolloutCorrection().active
    assert out.metrics["chi2_token"] == pytest.approx((1.5**2 + 16 + 1 / 16 + 1) / 4 - 1)


def test_truncated_importance_sampling_cuts_the_ratio_of_each_token() -> None:
    out = corrected(rollout_is="token", rollout_is_threshold=2.0)
    assert out.weights_T is not None and out.weights_T.tolist() == pytest.approx([1.5, 2.0, 0.25, 1.0])
    assert out.weights_T.dtype == torch.float32 and out.trained_T is None
    assert out.metrics["rollout_is_truncated_fraction"] == 0.25
    assert out.metrics["rollout_is_mean"] == pytest.approx(4.75 / 4)
    assert (out.metrics["rollout_is_min"], out.metrics["rollout_is_max"]) == pytest.approx((0.25, 2.0))
    squares = 2.25 + 4 + 0.0625 + 1
    assert out.metrics["rollout_is_eff_sample_size"] == pytest.approx(4.75**2 / (4 * squares))


def test_icepop_weighs_what_is_inside_and_rejects_what_is_outside() -> None:
    out = corrected(rollout_is="token", rollout_rs=(Rejection("token_k1", 0.5, 2.0),))
    assert out.trained_T is not None and out.trained_T.tolist() == [True, False, False, True]
    assert out.weights_T is not None and out.weights_T[out.trained_T].tolist() == pytest.approx([1.5, 1.0])
    assert out.metrics["rollout_rs_masked_fraction"] == 0.5
    assert out.metrics["rollout_rs_seq_masked_fraction"] == pytest.approx(1 / 3)  # the empty response is none
    assert out.metrics["rollout_is_max"] == pytest.approx(1.5)  # of kept tokens
    assert Segments(LENGTHS).sum(out.trained_T.double()).tolist() == [1, 0, 0, 1]


def test_masked_importance_sampling_rejects_whole_responses_by_their_product() -> None:
    out = corrected(rollout_is="sequence", rollout_rs=(Rejection("seq_sum_k1", 0.2, 5.0),))
    assert out.trained_T is not None and out.trained_T.tolist() == [False, False, True, True]
    assert out.metrics["rollout_rs_seq_sum_k1_fraction"] == 0.5


REJECTIONS: list[tuple[Any, float | None, float, list[bool]]] = [
    ("seq_mean_k1", 0.5, 2.5, [True, True, False, True]),  # geometric means 2.449, 0.25, 1
    ("seq_mean_k1", 0.2, 2.4, [False, False, True, True]),
    ("seq_mean_k1", None, 2.4, [False, False, True, True]),
    ("token_k2", None, 0.5, [True, False, False, True]),  # 0.082, 0.961, 0.961, 0
    ("seq_sum_k2", None, 1.0, [False, False, True, True]),  # 1.043, 0.961, 0
    ("seq_mean_k2", None, 0.6, [True, True, False, True]),  # 0.522
    ("seq_max_k2", None, 0.9, [False, False, False, True]),
    ("token_k3", None, 0.7, [True, False, True, True]),  # 0.0945, 1.614, 0.636, 0
    ("seq_sum_k3", None, 1.7, [False, False, True, True]),  # 1.708
    ("seq_mean_k3", None, 0.9, [True, True, True, True]),  # 0.854
    ("seq_max_k3", None, 1.6, [False, False, True, True]),
]


@pytest.mark.parametrize(("mode", "lower", "upper", "keep"), REJECTIONS)
def test_every_rejection_by_hand(mode: Any, lower: float | None, upper: float, keep: list[bool]) -> None:
    out = corrected(rollout_rs=(Rejection(mode, lower, upper),))
    assert out.trained_T is not None and out.trained_T.tolist() == keep
    assert out.weights_T is None


def test_batch_normalised_weights_have_mean_one_over_kept_tokens_or_responses() -> None:
    out = corrected(rollout_is="token", rollout_is_threshold=2.0, rollout_is_batch_normalize=True)
    assert out.metrics["rollout_is_batch_norm_factor"] == pytest.approx(4.75 / 4)
    assert out.weights_T is not None and out.weights_T.mean().item() == pytest.approx(1.0)
    out = corrected(rollout_is="sequence", rollout_is_threshold=5.0, rollout_is_batch_normalize=True)
    assert out.metrics["rollout_is_batch_norm_factor"] == pytest.approx((5 + 0.25 + 1) / 3)
    out = corrected(
        rollout_is="sequence",
        rollout_is_threshold=5.0,
        rollout_is_batch_normalize=True,
        rollout_rs=(Rejection("token_k1", 0.5, 2.0),),
    )
    # Of the first response one token is kept; its weight still is that of the response.
    assert out.metrics["rollout_is_batch_norm_factor"] == pytest.approx((5 + 1) / 2)
    assert out.weights_T is not None and out.weights_T[0].item() == pytest.approx(5 / 3)


def test_mismatch_metrics_by_hand() -> None:
    metrics = corrected().metrics
    logs = [math.log(r) for r in RATIOS]
    means = [(logs[0] + logs[1]) / 2, logs[2], logs[3]]
    assert metrics["kl"] == pytest.approx(-sum(logs) / 4)
    assert metrics["k3_kl"] == pytest.approx(sum(r - 1 - log for r, log in zip(RATIOS, logs, strict=True)) / 4)
    assert metrics["log_ppl_diff"] == pytest.approx(-sum(means) / 3)
    assert metrics["log_ppl_abs_diff"] == pytest.approx(sum(map(abs, means)) / 3)
    assert metrics["ppl_ratio"] == pytest.approx((1 / math.sqrt(6) + 4 + 1) / 3)
    assert metrics["chi2_seq"] == pytest.approx((36 + 1 / 16 + 1) / 3 - 1)
    assert metrics["logprob_diff_max"] == pytest.approx(math.log(4))


@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_batches_without_a_token_give_finite_metrics(lengths: list[int]) -> None:
    settings = RolloutCorrection(
        rollout_is="token",
        rollout_is_threshold=2.0,
        rollout_is_batch_normalize=True,
        rollout_rs=(Rejection("seq_max_k2", None, 1.0),),
    )
    nothing_T = torch.zeros(0)
    out = correct(settings, nothing_T, nothing_T, Segments(torch.tensor(lengths, dtype=torch.long)))
    assert out.weights_T is not None and out.weights_T.tolist() == []
    assert all(math.isfinite(value) for value in out.metrics.values())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rollout_is": "token"}, "nothing bounds the weights"),
        (
            {"rollout_is": "token", "rollout_is_threshold": 5.0, "rollout_rs": (Rejection("token_k1", 0.5, 2.0),)},
            "has no effect, because token_k1 rejects weights above 2.0",
        ),
        ({"rollout_rs": (Rejection("token_k1"),)}, "rejects nothing without a bound"),
        ({"rollout_rs": (Rejection("token_k1", 1.5, 2.0),)}, "must have 1 between them"),
        ({"rollout_rs": (Rejection("seq_sum_k1", None, 0.5),)}, "must have 1 between them"),
        ({"rollout_rs": (Rejection("token_k2", 0.5, 2.0),)}, "no lower one"),
        ({"rollout_rs": (Rejection("token_k3"),)}, "an upper bound > 0"),
        ({"rollout_rs": (Rejection("token_k2", None, 2.0), Rejection("token_k2", None, 1.0))}, "given twice"),
        (
            {"bypass_mode": True, "rollout_is": "token", "rollout_is_threshold": 2.0, "rollout_is_batch_normalize": True},
            "how the batch is cut",
        ),
    ],
)
def test_settings_that_contradict_each_other_or_have_no_effect_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        RolloutCorrection(**settings)


def test_shares_of_the_metrics_add_up_to_those_of_the_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = [3, 0, 1, 5]
    old_T, engine_T = (-torch.rand(9, generator=generator) for _ in range(2))
    whole = mismatch_metrics(old_T, engine_T, Segments(torch.tensor(lengths)))
    counts = Counts(9, 3, 1)
    total = dict.fromkeys(mismatch_shares(old_T, engine_T, Segments(torch.tensor(lengths)), counts), 0.0)
    for places, part in ((slice(0, 4), lengths[:3]), (slice(4, 9), lengths[3:])):
        for name, share in mismatch_shares(old_T[places], engine_T[places], Segments(torch.tensor(part)), counts).items():
            total[name] += share
    assert total == pytest.approx({name: whole[name] for name in total}) and len(total) == 7
