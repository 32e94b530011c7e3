"""Losses of reward models: one value per pair or per reasoning step, in float64, and detached statistics."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid


def bradley_terry(
    chosen_P: Tensor, rejected_P: Tensor, *, margin_P: Tensor | None = None, center_coef: float = 0.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of each pair if the better response wins with probability sigmoid(r_w - r_l).

    Formula: -log sigmoid(r_w - r_l - margin) + center_coef (r_w + r_l)²

    Bradley and Terry (1952); InstructGPT (arXiv 2203.02155), eq. 1. The margin, larger for pairs that are
    easier to tell apart, is Llama 2's (arXiv 2307.09288), eq. 2. The second term, of Eisenstein et al. (arXiv
    2312.09244), eq. 2, pulls the scores' mean to 0: 0.01 is usual.
    """
    chosen_P, rejected_P = chosen_P.double(), rejected_P.double()
    difference_P = chosen_P - rejected_P
    loss_P = -logsigmoid(difference_P if margin_P is None else difference_P - margin_P.double())
    if center_coef:
        loss_P = loss_P + center_coef * (chosen_P + rejected_P).square()
    stats = {
        "accuracy": (difference_P > 0).double(),
        "margin": difference_P.detach(),
        "score_chosen": chosen_P.detach(),
        "score_rejected": rejected_P.detach(),
    }
    return loss_P, stats


def step_classification(scores_K: Tensor, labels_K: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The cross-entropy of each reasoning step, whose score is the logit of "this step is good".

    Formula: -y log sigmoid(s) - (1 - y) log sigmoid(-s)

    Lightman et al. (arXiv 2305.20050), section 2.6; Math-Shepherd (arXiv 2312.08935), eq. 2. Labels are 0 and
    1, or the share of completions from this step on that were right (its eq. 4). Raises ValueError for labels
    outside of 0 to 1.
    """
    labels_K = labels_K.double()
    if bool(((labels_K < 0) | (labels_K > 1)).any()) or not bool(labels_K.isfinite().all()):
        raise ValueError("labels of steps must lie in 0 to 1")
    scores_K = scores_K.double()
    loss_K = binary_cross_entropy_with_logits(scores_K, labels_K, reduction="none")
    stats = {
        "accuracy": ((scores_K > 0) == (labels_K > 0.5)).double(),
        "probability": scores_K.detach().sigmoid(),
        "label": labels_K,
    }
    return loss_K, stats
