"""Measures of a reward model's scores: accuracy on pairs, ranking of good and bad, and calibration."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from grpo_rl.algos.losses.reward_scores import bradley_terry, step_classification


def pair_accuracy(chosen_P: Tensor, rejected_P: Tensor) -> float:
    """Return how often the chosen response has the larger score; a tie counts one half. NaN without pairs."""
    difference_P = chosen_P.double() - rejected_P.double()
    return float(((difference_P > 0).double() + 0.5 * (difference_P == 0).double()).mean())


def auc(scores_K: Tensor, good_K: Tensor) -> float:
    """The area under the ROC curve, ties counting one half (Mann and Whitney, 1947); NaN without both."""
    good_K = good_K.bool()
    num_good, num_bad = int(good_K.sum()), int((~good_K).sum())
    if not num_good or not num_bad:
        return float("nan")
    _, value_K, counts_V = torch.unique(scores_K.double(), return_inverse=True, return_counts=True)
    # Equal scores share the mean of the ranks that they take up together.
    last_V = counts_V.cumsum(0).double()
    rank_K = (last_V - 0.5 * (counts_V.double() - 1))[value_K]
    return float((rank_K[good_K].sum() - 0.5 * num_good * (num_good + 1)) / (num_good * num_bad))


def calibration(probability_K: Tensor, good_K: Tensor, *, num_bins: int = 10) -> dict[str, float]:
    """Return `calibration_error`, the mean of |frequency - probability| over bins of equal width ((b/B, (b+1)/B], 0 in the first),
    weighed by counts (Guo et al., arXiv 1706.04599, eq. 3), and `brier` (Brier, 1950); NaN without any."""
    probability_K, good_K = probability_K.double(), good_K.double()
    bin_K = (torch.ceil(probability_K * num_bins).long() - 1).clamp(0, num_bins - 1)
    counts_B = torch.bincount(bin_K, minlength=num_bins)
    probability_B = torch.bincount(bin_K, probability_K, minlength=num_bins).double() / counts_B
    frequency_B = torch.bincount(bin_K, good_K, minlength=num_bins).double() / counts_B
    distance_B = torch.where(counts_B > 0, (frequency_B - probability_B).abs(), 0.0)
    error = float((distance_B * counts_B).sum() / counts_B.sum())
    return {"calibration_error": error, "brier": float((probability_K - good_K).square().mean())}


def pair_quality(chosen_P: Tensor, rejected_P: Tensor, margin_P: Tensor, center_coef: float = 0.0) -> dict[str, float]:
    """Return loss, accuracy, AUC of all chosen against all rejected responses, and calibration of pairs, as far as they are defined.

    The calibrated probability is sigmoid(|r_w - r_l|), that of the preferred response; equal scores prefer neither, and are left out.
    """
    difference_P = chosen_P.double() - rejected_P.double()
    decided_P = difference_P[difference_P != 0]
    scores = torch.cat([chosen_P, rejected_P])
    is_chosen = torch.arange(2).repeat_interleave(len(chosen_P)) == 0
    loss_P = bradley_terry(chosen_P, rejected_P, margin_P=margin_P, center_coef=center_coef)[0]
    measures = {
        "loss": float(loss_P.mean()),
        "accuracy": pair_accuracy(chosen_P, rejected_P),
        "margin": float((chosen_P - rejected_P).double().mean()),
        "score_mean": float(scores.double().mean()),
    }
    measures |= {"auc": auc(scores, is_chosen)} | calibration(decided_P.abs().sigmoid(), decided_P > 0)
    return _defined(measures)


def step_quality(scores_K: Tensor, labels_K: Tensor) -> dict[str, float]:
    """Return loss, accuracy, AUC and calibration of rated steps, as far as they are defined.

    A step is good if its label is above one half, with probability sigmoid(s). Neutral steps (label 0.5) count in the loss only.
    """
    loss_K = step_classification(scores_K, labels_K)[0]
    is_decided_K = labels_K != 0.5
    decided_K, good_K = scores_K[is_decided_K], labels_K[is_decided_K] > 0.5
    measures = {"loss": float(loss_K.mean()), "good": float(good_K.double().mean())}
    measures["accuracy"] = float(((decided_K > 0) == good_K).double().mean())
    measures |= {"auc": auc(decided_K, good_K)} | calibration(decided_K.double().sigmoid(), good_K)
    return _defined(measures)


def _defined(measures: dict[str, float]) -> dict[str, float]:
    # Before the first update of a new head all scores are equal, and no pair has a preferred side.
    return {name: value for name, value in measures.items() if not math.isnan(value)}
