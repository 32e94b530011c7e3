"""The mathematics of `grpo_rl.algos` again: plain Python floats, nested loops over responses, no tensors.

Written from the papers' formulas and not from the package, so that agreement means something. Also the random
ragged batches that both are compared on.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_rl.types import Counts

STOPS_GRADIENTS = {"cispo", "gspo_token"}
"""Losses whose gradient is on purpose not that of their value."""

EXTREME_LOG_RATIOS = (30.0, -30.0, 100.0, -100.0, 20.0, -20.0)


@dataclass
class Ragged:
    """A batch as flat float32 columns."""

    lengths: list[int]
    group: list[int]
    rewards: list[float]
    policy: list[float]
    old: list[float]
    ref: list[float]
    entropy: list[float]
    full_kl: list[float]

    def nested(self, flat: list[float]) -> list[list[float]]:
        """One list per response."""
        out, start = [], 0
        for length in self.lengths:
            out.append(flat[start : start + length])
            start += length
        return out

    def select(self, order: list[int]) -> Ragged:
        """The responses in `order`."""
        tokens = {}
        for name in ("policy", "old", "ref", "entropy", "full_kl"):
            nested = self.nested(getattr(self, name))
            tokens[name] = [value for i in order for value in nested[i]]
        rollouts = {name: [getattr(self, name)[i] for i in order] for name in ("lengths", "group", "rewards")}
        return Ragged(**rollouts, **tokens)

    def counts(self) -> Counts:
        alive = [i for i, length in enumerate(self.lengths) if length > 0]
        return Counts(num_tokens=sum(self.lengths), num_sequences=len(alive), num_groups=len({self.group[i] for i in alive}))


def ragged(seed: int, num_rollouts: int = 12, extremes: bool = False) -> Ragged:
    """A seeded batch with empty and one-token responses, interleaved groups of differing size, one of them constant."""
    rng = random.Random(seed)
    lengths = [0, 1, *(rng.choice([0, 1, 2, 3, 7]) for _ in range(num_rollouts - 3)), 4]
    group = [rng.choice([3, 5, 8]) for _ in lengths]
    group[0], group[-1] = 3, 11
    rewards = [0.1 if g == 8 else rng.choice([0.0, 1.0, -1.0, rng.gauss(0, 3)]) for g in group]
    total = sum(lengths)
    log_ratio = [rng.gauss(0, 0.3) for _ in range(total)]
    to_ref = [rng.gauss(0, 0.5) for _ in range(total)]
    if extremes:
        for i in range(0, total, 2):
            log_ratio[i] = rng.choice(EXTREME_LOG_RATIOS)
            to_ref[i] = rng.choice(EXTREME_LOG_RATIOS)
    # Low enough that neither of the three log-probs is above 0.
    policy = [-rng.expovariate(0.5) - max(0.0, -a, -b) for a, b in zip(log_ratio, to_ref, strict=True)]
    columns = {
        "rewards": rewards,
        "policy": policy,
        "old": [a - b for a, b in zip(policy, log_ratio, strict=True)],
        "ref": [a - b for a, b in zip(policy, to_ref, strict=True)],
        "entropy": [rng.expovariate(1) for _ in range(total)],
        "full_kl": [rng.expovariate(3) for _ in range(total)],
    }
    # Through float32, so that the reference starts from the very numbers the package gets.
    rounded = {name: torch.tensor(values, dtype=torch.float32).tolist() for name, values in columns.items()}
    return Ragged(lengths=lengths, group=group, **rounded)


def as_float32(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def grpo(token_rewards: list[list[float]], rewards: list[float], group: list[int], norm_by_std: bool) -> list[list[float]]:
    scores = [math.fsum(tokens) if tokens else reward for tokens, reward in zip(token_rewards, rewards, strict=True)]
    advantages = []
    for i, tokens in enumerate(token_rewards):
        members = [scores[j] for j in range(len(scores)) if group[j] == group[i]]
        if all(score == members[0] for score in members):
            advantage = 0.0
        else:
            mean = math.fsum(members) / len(members)
            advantage = scores[i] - mean
            if norm_by_std:
                variance = math.fsum((score - mean) ** 2 for score in members) / (len(members) - 1)
                advantage /= math.sqrt(variance) + 1e-6
        advantages.append([advantage for _ in tokens])
    return advantages


def vanilla(policy: float, old: float, advantage: float, low: float, high: float, c: float) -> float:
    ratio = math.exp(min(max(policy - old, -20.0), 20.0))
    clipped_ratio = min(max(ratio, 1 - low), 1 + high)
    objective = min(ratio * advantage, clipped_ratio * advantage)
    if advantage < 0:
        objective = max(objective, c * advantage)
    return -objective


def reinforce(policy: float, old: float, advantage: float, low: float, high: float, c: float) -> float:
    return -advantage * policy


def cispo(policy: float, old: float, advantage: float, low: float, high: float, c: float) -> float:
    ratio = math.exp(min(max(policy - old, -20.0), 20.0))
    return -min(max(ratio, 1 - low), 1 + high) * advantage * policy


def sapo(policy: float, old: float, advantage: float, low: float, high: float, c: float) -> float:
    ratio = math.exp(min(max(policy - old, -20.0), 20.0))
    tau = 1.0 if advantage > 0 else 1.05
    return -advantage * 4 / tau / (1 + math.exp(-min(tau * (ratio - 1), 700.0)))


def gspo(policy: list[float], old: list[float], advantage: list[float], low: float, high: float) -> list[float]:
    mean = math.fsum(p - o for p, o in zip(policy, old, strict=True)) / len(policy)
    ratio = math.exp(min(mean, 10.0))
    clipped = min(max(ratio, 1 - low), 1 + high)
    return [-min(a * ratio, a * clipped) for a in advantage]


def geo_mean(policy: list[float], old: list[float], advantage: list[float], low: float, high: float) -> list[float]:
    logs = []
    for p, o, a in zip(policy, old, advantage, strict=True):
        log_ratio = min(max(p - o, -20.0), 20.0)
        if a > 0:
            log_ratio = min(log_ratio, high)
        elif a < 0:
            log_ratio = max(log_ratio, -low)
        logs.append(log_ratio)
    value = -math.fsum(advantage) / len(advantage) * math.exp(math.fsum(logs) / len(logs))
    return [value for _ in advantage]


TOKEN_LOSSES = {"vanilla": vanilla, "reinforce": reinforce, "cispo": cispo, "sapo": sapo}
SEQUENCE_LOSSES = {"gspo": gspo, "gspo_token": gspo, "geo_mean": geo_mean}


def policy_loss(name: str, data: Ragged, advantages: list[float], low: float, high: float, c: float) -> list[float]:
    """The loss of every token, flat."""
    losses = []
    columns = (data.nested(data.policy), data.nested(data.old), data.nested(advantages))
    for policy, old, advantage in zip(*columns, strict=True):
        if name in SEQUENCE_LOSSES:
            losses += SEQUENCE_LOSSES[name](policy, old, advantage, low, high) if policy else []
        else:
            tokens = zip(policy, old, advantage, strict=True)
            losses += [TOKEN_LOSSES[name](p, o, a, low, high, c) for p, o, a in tokens]
    return losses


def kl(kind: str, policy: float, ref: float) -> float:
    d = policy - ref
    if kind in ("kl", "k1"):
        return d
    if kind == "abs":
        return abs(d)
    if kind in ("mse", "k2"):
        return d * d / 2
    x = min(max(-d, -20.0), 20.0)
    return min(math.expm1(x) - x, 10.0)


def average(mode: str, values: list[list[float]]) -> float:
    alive = [tokens for tokens in values if tokens]
    if mode == "token-mean":
        return math.fsum(v for tokens in alive for v in tokens) / sum(len(tokens) for tokens in alive)
    if mode == "seq-mean-token-sum":
        return math.fsum(math.fsum(tokens) for tokens in alive) / len(alive)
    assert mode == "seq-mean-token-mean"
    return math.fsum(math.fsum(tokens) / len(tokens) for tokens in alive) / len(alive)
