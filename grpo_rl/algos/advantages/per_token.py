"""Estimators whose advantage differs from token to token."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from grpo_rl.algos.advantages import blockwise
from grpo_rl.algos.advantages.contract import ADVANTAGES, AdvantageInput, AdvantageOutput
from grpo_rl.algos.advantages.group_relative import Std, divided, scaled
from grpo_rl.algos.group_statistics import Groups
from grpo_rl.config.schema.kinds import Coefficient, Epsilon, Fraction
from grpo_rl.registry import formula_by, needs


def unwhitened(formula: str, options: Mapping[str, Any]) -> str:
    return formula if options["whiten"] else re.sub(r"whiten\((Σ.*?)\); (.*); whiten.*", r"\1; \2", formula)


@ADVANTAGES.register("gae")
@needs("values")
@formula_by(unwhitened)
def gae(inp: AdvantageInput, *, gamma: Fraction = 1.0, lam: Fraction = 1.0, whiten: bool = True) -> AdvantageOutput:
    """The critic's temporal differences, summed with decay, then whitened over the batch.

    Formula: A = whiten(Σ_l (γ λ)^l δ_(t+l)); δ_t = r_t + γ V_(t+1) - V_t, V after the last token = 0;
    γ = gamma, λ = lam; whiten(x) = (x - mean) / sqrt(var + 1e-8), over all tokens of the batch

    GAE (arXiv 1506.02438), eq. 16; PPO (arXiv 1707.06347), eq. 11. returns = unwhitened A + V. Equal
    differences give exactly 0.
    """
    values_T = inp.column("values_T")
    advantages_T, returns_T = torch.empty(len(values_T)), torch.empty(len(values_T))
    for lot in blockwise.lots(inp.lengths_N):
        values_RL = lot.rows(values_T)
        difference_RL = lot.rows(inp.token_rewards_T)
        difference_RL[:, :-1].add_(values_RL[:, 1:], alpha=gamma)
        difference_RL -= values_RL
        sums_RL = blockwise.suffix_sums(difference_RL, gamma * lam)
        lot.write(sums_RL, advantages_T)
        lot.write(sums_RL + values_RL, returns_T)
    return AdvantageOutput(blockwise.whiten_(advantages_T) if whiten else advantages_T, returns_T)


@ADVANTAGES.register("reinforce_plus_plus")
def reinforce_plus_plus(inp: AdvantageInput, *, gamma: Fraction = 1.0) -> AdvantageOutput:
    """The discounted reward to go of each token, whitened over the batch.

    Formula: A = whiten(Σ_l γ^l r_(t+l)); γ = gamma; whiten(x) = (x - mean) / sqrt(var + 1e-8), over all tokens of the
    batch

    REINFORCE++ (arXiv 2501.03262). returns are the unwhitened sums. Equal sums give exactly 0.
    """
    returns_T = torch.empty(len(inp.token_rewards_T))
    for lot in blockwise.lots(inp.lengths_N):
        lot.write(blockwise.suffix_sums(lot.rows(inp.token_rewards_T), gamma), returns_T)
    return AdvantageOutput(blockwise.whiten_(returns_T.clone()), returns_T)


@ADVANTAGES.register("remax")
@needs("baselines")
def remax(inp: AdvantageInput) -> AdvantageOutput:
    """The reward to go of each token, minus the reward of the greedy response to the same prompt.

    Formula: A = Σ_l r_(t+l) - R(greedy response)

    ReMax (arXiv 2310.10505), algorithm 1. One response per prompt is enough.
    """
    baselines_N = inp.column("baselines_N").double()
    advantages_T, returns_T = torch.empty(len(inp.token_rewards_T)), torch.empty(len(inp.token_rewards_T))
    for lot in blockwise.lots(inp.lengths_N):
        sums_RL = blockwise.suffix_sums(lot.rows(inp.token_rewards_T), 1.0)
        lot.write(sums_RL, returns_T)
        lot.write(sums_RL - baselines_N[lot.rollouts, None], advantages_T)
    return AdvantageOutput(advantages_T, returns_T)


@ADVANTAGES.register("grpo_process")
@needs("group", "steps")
@formula_by(divided)
def grpo_process(
    inp: AdvantageInput, *, std: Literal["group", "none"] = "group", epsilon: Epsilon = 1e-6, gamma: Fraction = 1.0
) -> AdvantageOutput:
    """The discounted sum of the normalised rewards of the steps that end at the token or after it.

    Formula: A = Σ_{steps of the response that end at or after the token} γ^k (r - mean(r of group)) / (std(r of group) +
    epsilon); k = 0, 1, ... counts these steps; γ = gamma

    DeepSeekMath (arXiv 2402.03300), section 4.1.3. Mean and sample standard deviation (n - 1) are over all
    step rewards of the group together; `std="none"` leaves the division out. Tokens after the last step have
    0. One step, or equal step rewards, give exactly 0. γ discounts by steps, which are turns in episodes; the
    paper has 1. Raises ValueError for a step that ends outside the token axis.
    """
    if std not in ("group", "none"):
        raise ValueError(f"std={std!r}: group or none")
    steps = Steps(inp, gamma)
    normalised_K = scaled(steps.rewards_K, Groups(inp.group_N[steps.rollout_K]), std, epsilon)
    return steps.on_tokens(steps.to_come(normalised_K), torch.zeros(len(inp.lengths_N), dtype=torch.float64))


def divided_by_mode(formula: str, options: Mapping[str, Any]) -> str:
    if options["mode"] == "mean_norm":
        return formula
    return re.sub(r"(\w+ - mean\(([^)]*)\))", r"(\1) / (std(\2) + epsilon)", formula)


@ADVANTAGES.register("gigpo")
@needs("group", "steps", "states")
@formula_by(divided_by_mode)
def gigpo(
    inp: AdvantageInput,
    *,
    step_advantage_w: Coefficient = 1.0,
    gamma: Fraction = 1.0,
    mode: Literal["mean_norm", "mean_std_norm"] = "mean_norm",
    epsilon: Epsilon = 1e-6,
) -> AdvantageOutput:
    """The episode's distance to its group's mean, and that of what a turn leads to among all turns in the
    same state.

    Formula: A = R - mean(R of group) + step_advantage_w (G_t - mean(G of the group's turns in t's state));
    G_t = Σ_k γ^k r_(t+k), r of turns; γ = gamma

    GiGPO (arXiv 2505.10978), section 4. A group is the episodes of one prompt; its turns that begin in equal
    states are compared, whenever they were taken. `mode=mean_std_norm` divides both deviations by the sample
    standard deviation (n - 1), plus epsilon. A state that only one turn has adds exactly 0. R is not
    discounted. Raises ValueError for a step that ends outside the token axis.
    """
    steps = Steps(inp, gamma)
    episode_N, turn_K = episode_and_turn(inp, steps, mode, epsilon)
    return steps.on_tokens(episode_N[steps.rollout_K] + step_advantage_w * turn_K, episode_N)


def episode_and_turn(inp: AdvantageInput, steps: Steps, mode: str, epsilon: float) -> tuple[Tensor, Tensor]:
    """GiGPO's advantages of episodes [N] and turns [K], float64. Raises ValueError for another mode."""
    if mode not in ("mean_norm", "mean_std_norm"):
        raise ValueError(f"mode={mode!r}: mean_norm or mean_std_norm")
    std: Std = "none" if mode == "mean_norm" else "group"
    states_K = inp.column("step_states_K")[steps.order_K]
    of_states_K = torch.stack([inp.group_N[steps.rollout_K], states_K], dim=1)
    anchors = Groups(torch.unique(of_states_K, dim=0, return_inverse=True)[1])
    episode_N = scaled(inp.scores_N(), Groups(inp.group_N), std, epsilon)
    return episode_N, scaled(steps.to_come(steps.rewards_K), anchors, std, epsilon)


class Steps:
    def __init__(self, inp: AdvantageInput, gamma: float) -> None:
        """Raises ValueError for a step that ends outside the token axis."""
        ends_K, self._gamma = inp.column("step_ends_K").long(), gamma
        self._token_ends_N = inp.lengths_N.cumsum(0)
        num_tokens = int(inp.lengths_N.sum())
        if len(ends_K) and not 0 <= int(ends_K.min()) <= int(ends_K.max()) < num_tokens:
            raise ValueError(
                f"steps end at tokens {int(ends_K.min())} to {int(ends_K.max())}; the batch has 0 to {num_tokens - 1}"
            )
        self.order_K = torch.argsort(ends_K, stable=True)
        self._ends_K = ends_K[self.order_K]
        self.rewards_K = inp.column("step_rewards_K")[self.order_K].double()
        self.rollout_K = torch.searchsorted(self._token_ends_N, self._ends_K, right=True)

    def to_come(self, x_K: Tensor) -> Tensor:
        """Return the discounted sum over each step and those of its response that follow."""
        steps_N = torch.bincount(self.rollout_K, minlength=len(self._token_ends_N))
        sums_K = torch.empty(len(x_K), dtype=torch.float64)
        for lot in blockwise.lots(steps_N):
            lot.write(blockwise.suffix_sums(lot.rows(x_K), self._gamma), sums_K)
        return sums_K

    def on_tokens(self, x_K: Tensor, rest_N: Tensor) -> AdvantageOutput:
        """Return each step's value on all tokens up to its end, and `rest_N` on those after the last."""
        run_ends, order = torch.sort(torch.cat([self._ends_K + 1, self._token_ends_N]), stable=True)
        run_lengths = torch.diff(run_ends, prepend=torch.zeros(1, dtype=torch.long))
        return AdvantageOutput(blockwise.spread(torch.cat([x_K, rest_N])[order], run_lengths))
