"""Measures of a reward model's scores: accuracy on pairs, ranking of good and bad, and calibration."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def pair_accuracy(chosen_P: Tensor, rejected_P: Tensor) -> float:
    """Return how often the chosen response has the larger score; a tie counts one half. NaN without pairs."""
    difference_P = chosen_P.double() - rejected_P.double()
    return float(((difference_P > 0).double() + 0.5 * (difference_P == 0).double()).mean())


def auc(scores_K: Tensor, good_K: Tensor) -> float:
    """Return the area under the ROC curve, ties counting one half (Mann and Whitney, 1947); NaN
    without both."""
    good_K = good_K.bool()
    num_good, num_bad = int(good_K.sum()), int((~good_K).sum())
    if not num_good or not num_bad:
        return float("nan")
    _, value_K, counts_V = torch.unique(scores_K.double(), return_inverse=True, return_counts=True)
    # Equal scores share the mean of the ranks that they take up together.
    last_V = counts_V.cumsum(0).double()
    rank_K = (last_V - 0.5 * (counts_V.double() - 1))[value_K]
    return float((rank_K[good_K].sum() - 0.5 * num_good * (num_good + 1)) / (num_good * num_bad))


class Calibration(NamedTuple):
    error: float
    """The mean of |frequency - probability| over bins ((b/B, (b+1)/B], 0 in the first), weighed by counts."""
    brier: float


def calibration(probability_K: Tensor, good_K: Tensor, *, num_bins: int = 10) -> Calibration:
    """Guo et al. (arXiv 1706.04599), eq. 3; Brier (1950), in bins of equal width; NaN without any."""
    probability_K, good_K = probability_K.double(), good_K.double()
    bin_K = (torch.ceil(probability_K * num_bins).long() - 1).clamp(0, num_bins - 1)
    counts_B = torch.bincount(bin_K, minlength=num_bins)
    probability_B = torch.bincount(bin_K, probability_K, minlength=num_bins).double() / counts_B
    frequency_B = torch.bincount(bin_K, good_K, minlength=num_bins).double() / counts_B
    distance_B = torch.where(counts_B > 0, (frequency_B - probability_B).abs(), 0.0)
    error = float((distance_B * counts_B).sum() / counts_B.sum())
    return Calibration(error, float((probability_K - good_K).square().mean()))


def pair_calibration(chosen_P: Tensor, rejected_P: Tensor) -> Calibration:
    """Of a Bradley-Terry model, with probability sigmoid(abs(r_w - r_l)); equal scores are left out."""
    difference_P = chosen_P.double() - rejected_P.double()
    difference_P = difference_P[difference_P != 0]
    return calibration(difference_P.abs().sigmoid(), difference_P > 0)
