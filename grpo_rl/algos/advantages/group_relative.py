"""Estimators that compare the responses to one prompt: one advantage per response, the same on all its tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from grpo_rl.algos.advantages.contract import ADVANTAGES, AdvantageInput, RolloutAdvantages
from grpo_rl.algos.group_statistics import Groups
from grpo_rl.config.schema.kinds import Epsilon, Factor
from grpo_rl.registry import formula_by, needs

Std = Literal["group", "batch", "batch_rewards", "none"]
"""The divisor of deviations: the standard deviation (n - 1) of the rewards in the group, of the deviations in the whole batch
(ScaleRL, arXiv 2510.13786), of the rewards in the whole batch (Lite PPO, arXiv 2508.08221), or nothing."""


def divided(formula: str, options: Mapping[str, Any]) -> str:
    std = options["std"]
    if std == "none":
        return re.sub(r" / \(std\([Rr] of group\) \+ epsilon\)", "", formula)
    if "of group) + epsilon" not in formula:
        # Written without one, as its default is none.
        head, semicolon, rest = formula.partition(";")
        formula = f"{head} / (std(R of group) + epsilon){semicolon}{rest}"
    names = {"batch": "std(deviations in the batch)", "batch_rewards": "std(R of batch)"}
    return re.sub(r"std\([Rr] of group\)", names[std], formula) if std in names else formula


@ADVANTAGES.register("grpo")
@needs("group")
@formula_by(divided)
def grpo(inp: AdvantageInput, *, std: Std = "group", epsilon: Epsilon = 1e-6) -> RolloutAdvantages:
    """The group-normalised reward of the response.

    Formula: A = (R - mean(R of group)) / (std(R of group) + epsilon)

    DeepSeekMath (arXiv 2402.03300), section 4.1.2. For `std` see `Std`. A group of equal rewards gives
    exactly 0.
    """
    groups = Groups(inp.group_N)
    scores_N = inp.scores_N()
    return _same_on_all_tokens(inp, scaled(scores_N, groups, std, epsilon))


@ADVANTAGES.register("dr_grpo")
@needs("group")
def dr_grpo(inp: AdvantageInput) -> RolloutAdvantages:
    """The distance to the group's mean: `grpo` without a standard deviation.

    Formula: A = R - mean(R of group)

    Dr. GRPO (arXiv 2503.20783), section 3.2, which averages with a constant (`seq-mean-token-sum-norm`) too.
    """
    return _same_on_all_tokens(inp, Groups(inp.group_N).deviation(inp.scores_N()))


@ADVANTAGES.register("rloo")
@needs("group")
def rloo(inp: AdvantageInput) -> RolloutAdvantages:
    """The distance to the mean of the other responses of the group.

    Formula: A = R - mean(R of the others in the group) = n/(n - 1) (R - mean(R of group))

    RLOO (arXiv 2402.14740), section 3. A group of one gives exactly 0.
    """
    groups = Groups(inp.group_N)
    factor_N = groups.count_N / (groups.count_N - 1).clamp(min=1)
    return _same_on_all_tokens(inp, factor_N * groups.deviation(inp.scores_N()))


@ADVANTAGES.register("rft")
def rft(inp: AdvantageInput, *, threshold: Factor = 1.0) -> RolloutAdvantages:
    """The indicator of a response that is good enough: it is learnt as a demonstration is.

    Formula: A = 1 where R >= threshold, else 0

    Online rejection-sampling fine-tuning (DeepSeekMath, arXiv 2402.03300, appendix A.1.3), with the loss
    `reinforce`. `threshold` is the least reward of a right answer.
    """
    return _same_on_all_tokens(inp, (inp.scores_N() >= threshold).double())


@ADVANTAGES.register("opo")
@needs("group")
def opo(inp: AdvantageInput) -> RolloutAdvantages:
    """The distance to the group's mean weighted by length, of least variance if gradients grow with length.

    Formula: A = R - Σ_group length R / Σ_group length

    OPO (arXiv 2505.23585). A response without a token has weight 0. Equal rewards of all that have tokens
    give exactly 0.
    """
    groups = Groups(inp.group_N)
    scores_N, lengths_N = inp.scores_N(), inp.lengths_N.double()
    baseline_N = groups.sum(lengths_N * scores_N) / groups.sum(lengths_N).clamp(min=1)
    # Empty responses take no part, so they must not make a constant group look otherwise.
    filled_N = inp.lengths_N > 0
    constant_N = torch.ones_like(filled_N)
    constant_N[filled_N] = Groups(inp.group_N[filled_N]).constant(scores_N[filled_N])
    return _same_on_all_tokens(inp, torch.where(constant_N, 0.0, scores_N - baseline_N))


@ADVANTAGES.register("gpg")
@needs("group")
@formula_by(divided)
def gpg(inp: AdvantageInput, *, std: Std = "none", epsilon: Epsilon = 1e-6) -> RolloutAdvantages:
    """The distance to the group's mean, scaled up for the groups that give no signal.

    Formula: A = α (R - mean(R of group)); α = rollouts / rollouts in groups with differing rewards

    GPG (arXiv 2504.02546), section 2. `std` divides, as in `grpo`. A group of one counts as one without
    signal.
    """
    groups = Groups(inp.group_N)
    scores_N = inp.scores_N()
    alpha = len(scores_N) / max(1, int((~groups.constant(scores_N)).sum()))
    return _same_on_all_tokens(inp, alpha * scaled(scores_N, groups, std, epsilon))


@ADVANTAGES.register("grpo_passk")
@needs("group")
@formula_by(divided)
def grpo_passk(inp: AdvantageInput, *, std: Std = "group", epsilon: Epsilon = 1e-6) -> RolloutAdvantages:
    """Give the best response of the group its lead over the second best, and all others 0.

    Formula: A = (best - second best) / (std(R of group) + epsilon) on the best response, else 0

    Pass@k training (arXiv 2503.19595). `std` as in `grpo`. Several best responses, or a group of one, give 0.
    """
    groups = Groups(inp.group_N)
    scores_N = inp.scores_N()
    best_N = scores_N == groups.highest(scores_N)
    second_N = groups.highest(torch.where(best_N, -torch.inf, scores_N))
    leads_N = best_N & (groups.sum(best_N) == 1) & (groups.count_N > 1)
    # Not inf - inf in a group of one, which is then multiplied by nothing.
    lead_N = torch.where(leads_N, scores_N - second_N, 0.0)
    return _same_on_all_tokens(inp, lead_N / _divisor(scores_N, groups, std, epsilon))


@ADVANTAGES.register("gdpo")
@needs("group", "parts")
@formula_by(divided)
def gdpo(
    inp: AdvantageInput, *, weights: Sequence[Factor] | None = None, std: Std = "group", epsilon: Epsilon = 1e-6
) -> RolloutAdvantages:
    """The weighted sum of each reward's own group-normalised value, brought to unit spread over the batch.

    Formula: A = s / (std(s of batch) + epsilon); s = Σ_parts weight (r - mean(r of group)) / (std(r of group) + epsilon)

    GDPO (arXiv 2601.05242): a part with a small spread is not drowned by one with a large spread. `weights`
    are 1 by default; `std` as in `grpo`. A part that is constant in a group adds exactly 0 there. Raises
    ValueError for another number of weights than of parts.
    """
    parts_NP = inp.column("reward_parts_NP").double()
    weights = [1.0] * parts_NP.shape[1] if weights is None else list(weights)
    if len(weights) != parts_NP.shape[1]:
        raise ValueError(f"{len(weights)} weights for {parts_NP.shape[1]} parts of the reward; one each")
    groups = Groups(inp.group_N)
    sum_N = torch.zeros(len(parts_NP), dtype=torch.float64)
    for weight, part_N in zip(weights, parts_NP.unbind(1), strict=True):
        sum_N += weight * scaled(part_N, groups, std, epsilon)
    return _same_on_all_tokens(inp, sum_N / (_sample_std(sum_N) + epsilon))


@ADVANTAGES.register("reinforce_plus_plus_baseline")
@needs("group")
def reinforce_plus_plus_baseline(inp: AdvantageInput) -> RolloutAdvantages:
    """The distance to the group's mean, whitened over all trained tokens.

    Formula: A = whiten(R - mean(R of group)); whiten(x) = (x - mean) / sqrt(var + 1e-8), over all tokens of the batch

    REINFORCE++ (arXiv 2501.03262), its form with a group baseline. Long responses weigh more in mean and
    variance. Constant groups have distance 0, and whitening moves all distances by the same amount.
    """
    deviation_N = Groups(inp.group_N).deviation(inp.scores_N())
    lengths_N = inp.lengths_N.double()
    total = float(lengths_N.sum())
    # Over tokens, but computed on rollouts, each as often as it has tokens.
    filled_N = deviation_N[inp.lengths_N > 0]
    if not len(filled_N) or bool((filled_N == filled_N[0]).all()):
        return _same_on_all_tokens(inp, torch.zeros_like(deviation_N))
    centred_N = deviation_N - (lengths_N * deviation_N).sum() / total
    variance = (lengths_N * centred_N.square()).sum() / (total - 1)
    return _same_on_all_tokens(inp, centred_N * (variance + 1e-8).rsqrt())


def _same_on_all_tokens(inp: AdvantageInput, advantages_N: Tensor) -> RolloutAdvantages:
    return RolloutAdvantages(advantages_N=advantages_N.float(), lengths_N=inp.lengths_N)


def scaled(scores_N: Tensor, groups: Groups, std: Std, epsilon: float) -> Tensor:
    return groups.deviation(scores_N) / _divisor(scores_N, groups, std, epsilon)


def _divisor(scores_N: Tensor, groups: Groups, std: Std, epsilon: float) -> Tensor:
    if std == "group":
        return groups.std(groups.deviation(scores_N)) + epsilon
    if std == "batch":
        return _sample_std(groups.deviation(scores_N)) + epsilon
    if std == "batch_rewards":
        return _sample_std(scores_N - scores_N.mean()) + epsilon
    if std == "none":
        return torch.ones((), dtype=torch.float64)
    raise ValueError(f"std={std!r}: group, batch, batch_rewards or none")


def _sample_std(deviation_N: Tensor) -> Tensor:
    return (deviation_N.square().sum() / max(len(deviation_N) - 1, 1)).sqrt()
