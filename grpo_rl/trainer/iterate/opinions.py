"""The reward model's opinion beside the reward of the rules: how far they agree, and whether the policy learns to please the model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from grpo_rl.algos.scoring_quality import pair_accuracy
from grpo_rl.rewards.combined import REWARD_MODEL, RULE
from grpo_rl.types import GREEDY, Metrics, Rollout


def opinions(rollouts: Sequence[Rollout]) -> Metrics:
    """Return how well the model's scores agree with the rules, within groups: a model of pairs leaves open a constant per prompt.

    `iterate/correlation` is Pearson's, of the deviations from the means of the groups; `iterate/agreement` is the share of the
    pairs within a group, of different reward by the rules, that the model orders as they do. Each only where there is something
    to compare.
    """
    scored = [rollout for rollout in rollouts if rollout.failure is None and rollout.sample_index != GREEDY]
    rule_N, score_N = (
        torch.tensor([rollout.reward_parts[name] for rollout in scored], dtype=torch.float64) for name in (RULE, REWARD_MODEL)
    )
    groups: dict[str, list[int]] = {}
    for index, rollout in enumerate(scored):
        groups.setdefault(rollout.prompt.uid, []).append(index)
    metrics: Metrics = {}
    centered = [values_N.clone() for values_N in (rule_N, score_N)]
    for members in groups.values():
        for values_N in centered:
            values_N[members] -= values_N[members].mean()
    lengths = [float(values_N.norm()) for values_N in centered]
    if min(lengths) > 1e-12 * len(scored):
        metrics["iterate/correlation"] = float(centered[0] @ centered[1]) / (lengths[0] * lengths[1])
    pairs = [(i, j) for members in groups.values() for i in members for j in members if rule_N[i] > rule_N[j]]
    if pairs:
        better_P, worse_P = (score_N[torch.tensor(side)] for side in zip(*pairs, strict=True))
        metrics["iterate/agreement"] = pair_accuracy(better_P, worse_P)
    return metrics


class Opinion:
    """The gains of the policy in the eyes of the reward model and in those of the rules, since the iteration began.

    Each gain is in units of the spread, over the responses of the iteration's first step of the policy, of what it measures:
    `iterate/gap` = (s_t - s_0) / std(s_0) - (r_t - r_0) / std(r_0), of means of the model's scores s and the rules' rewards r.
    It grows where the policy learns to please the model without getting better (the proxy and the gold reward of Gao et al.,
    arXiv 2210.10760).
    """

    def __init__(self) -> None:
        self.start: dict[str, list[float]] = {}
        """Mean and spread of rules and scores at the iteration's first step of the policy."""

    def __call__(self, rollouts: Sequence[Rollout], *, begins: bool) -> Metrics:
        """Return `opinions` of the step's rollouts, and the gap; `begins` at the first step of the policy in an iteration."""
        scored = [rollout for rollout in rollouts if rollout.failure is None and rollout.sample_index != GREEDY]
        if not scored:
            return {}
        gains = []
        if begins:
            self.start = {}
        for name in (REWARD_MODEL, RULE):
            values = [rollout.reward_parts[name] for rollout in scored]
            mean = math.fsum(values) / len(values)
            spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
            first_mean, first_spread = self.start.setdefault(name, [mean, spread])
            # All alike at the beginning: the gain has no unit.
            gains.append((mean - first_mean) / first_spread if first_spread > 0 else math.nan)
        gap = gains[0] - gains[1]
        return opinions(scored) | ({"iterate/gap": gap} if math.isfinite(gap) else {})

    def state_dict(self) -> dict[str, Any]:
        """Return what gains are measured from."""
        return {name: list(values) for name, values in self.start.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on measuring from this state."""
        self.start = {name: [float(value) for value in values] for name, values in state.items()}
