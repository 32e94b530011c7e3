"""Inputs of advantage estimators for tests."""

from __future__ import annotations

from dataclasses import replace

import torch
from ragged_batches import Ragged

from grpo_rl.algos.advantages.registered import AdvantageInput, token_rewards


def inputs(
    rewards: list[float], lengths: list[int], group: list[int], kl: list[float] | None = None, kl_coef: float = 0.0
) -> AdvantageInput:
    """Return the input that outcome estimators see."""
    rewards_N, lengths_N = torch.tensor(rewards, dtype=torch.float32), torch.tensor(lengths, dtype=torch.long)
    kl_T = None if kl is None else torch.tensor(kl)
    group_N = torch.tensor(group, dtype=torch.long)
    return AdvantageInput(token_rewards(rewards_N, lengths_N, kl_T, kl_coef), lengths_N, group_N, rewards_N)


def complete(data: Ragged) -> AdvantageInput:
    """Return the input with all that any estimator may see."""
    starts = [sum(data.lengths[:i]) for i in range(len(data.lengths))]
    steps = [(start + t, reward) for start, steps in zip(starts, data.steps, strict=True) for t, reward in steps]
    return replace(
        inputs(data.rewards, data.lengths, data.group),
        values_T=torch.tensor(data.values, dtype=torch.float32),
        baselines_N=torch.tensor(data.baselines, dtype=torch.float32),
        step_ends_K=torch.tensor([end for end, _ in steps], dtype=torch.long),
        step_rewards_K=torch.tensor([reward for _, reward in steps], dtype=torch.float32),
        step_states_K=torch.tensor([number for steps in data.steps for number in range(len(steps))], dtype=torch.long),
        reward_parts_NP=torch.tensor(data.parts, dtype=torch.float32),
    )
