"""The critic's loss per token, and how much of the returns it explains."""

from __future__ import annotations

import torch
from torch import Tensor


def value_loss(
    values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, *, cliprange_value: float = 0.5
) -> tuple[Tensor, dict[str, Tensor]]:
    """Half the squared error of each value, with the step away from the old value bounded.

    Formula: max((V - R)², (clip(V, V_old - cliprange_value, V_old + cliprange_value) - R)²) / 2

    PPO's reference code (OpenAI baselines); not in the paper. Float64. `vf_clipfrac` counts the tokens where
    the clip decides, `vpred_mean` is V; both are detached.
    """
    values_T, old_values_T, returns_T = values_T.double(), old_values_T.double(), returns_T.double()
    bounded_T = torch.minimum(torch.maximum(values_T, old_values_T - cliprange_value), old_values_T + cliprange_value)
    plain_T, clipped_T = (values_T - returns_T).square(), (bounded_T - returns_T).square()
    stats = {"vf_clipfrac": (clipped_T > plain_T).double().detach(), "vpred_mean": values_T.detach()}
    return 0.5 * torch.maximum(plain_T, clipped_T), stats


def explained_variance(values_T: Tensor, returns_T: Tensor) -> float:
    """1 - Var(R - V) / Var(R): 1 for a perfect critic, 0 for a constant one, below 0 for a harmful one."""
    returns_T = returns_T.double()
    if not len(returns_T) or bool((returns_T == returns_T[0]).all()):
        return 0.0
    return float(1.0 - (returns_T - values_T.double()).var() / returns_T.var())
