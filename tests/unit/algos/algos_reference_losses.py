"""The policy losses again, in plain Python floats: see `algos_reference.py`."""

from __future__ import annotations

import math

from algos_reference import Ragged

STOPS_GRADIENTS = {"cispo", "topr", "gspo_token", "dppo_tv", "dppo_kl"}
"""Losses whose gradient is on purpose not that of their value."""


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


def dppo_tv(policy: float, old: float, advantage: float, low: float, high: float, c: float) -> float:
    moved = math.exp(policy) - math.exp(old)
    if moved > high if advantage > 0 else moved < -low:
        return 0.0
    return -min(math.exp(min(max(policy - old, -20.0), 20.0)), 20.0) * advantage * policy


def dppo_kl(policy: float, old: float, advantage: float, low: float, high: float, c: float) -> float:
    p, q = math.exp(old), math.exp(policy)
    divergence = p * (old - policy) + (0.0 if p == 1 else math.inf if q == 1 else (1 - p) * math.log((1 - p) / (1 - q)))
    if (divergence > high and q > p) if advantage > 0 else (divergence > low and q < p):
        return 0.0
    return -min(math.exp(min(max(policy - old, -20.0), 20.0)), 20.0) * advantage * policy


def dro(policy: float, old: float, advantage: float, low: float, high: float, c: float) -> float:
    return -(advantage * policy - 0.1 / 2 * (policy - old) ** 2)


def clip_cov(policy: float, old: float, advantage: float, low: float, high: float, selected: bool) -> float:
    ratio = math.exp(min(max(policy - old, -20.0), 20.0))
    return 0.0 if selected else -min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)


def kl_cov(policy: float, old: float, advantage: float, low: float, high: float, selected: bool) -> float:
    log_ratio = min(max(policy - old, -20.0), 20.0)
    return -advantage * math.exp(log_ratio) + (0.1 * abs(log_ratio) if selected else 0.0)


def topr(policy: list[float], old: list[float], advantage: list[float], low: float, high: float) -> list[float]:
    mean = sum(p - o for p, o in zip(policy, old, strict=True)) / len(policy)
    weight = min(max(math.exp(min(mean, 10.0)), 0.0), 1.0)
    return [-(weight if a < 0 else 1.0) * a * p for p, a in zip(policy, advantage, strict=True)]


TOKEN_LOSSES = {
    "vanilla": vanilla,
    "reinforce": reinforce,
    "gpg": reinforce,
    "cispo": cispo,
    "sapo": sapo,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "dro": dro,
}
SELECTING_LOSSES = {"clip_cov": clip_cov, "kl_cov": kl_cov}
SEQUENCE_LOSSES = {"gspo": gspo, "gspo_token": gspo, "geo_mean": geo_mean, "topr": topr}


def selected(data: Ragged) -> list[bool]:
    """An arbitrary choice of tokens that goes along when responses are picked or permuted."""
    return [entropy > 1.0 for entropy in data.entropy]


def policy_loss(name: str, data: Ragged, advantages: list[float], low: float, high: float, c: float) -> list[float]:
    """The loss of every token, flat."""
    if name in SELECTING_LOSSES:
        tokens = zip(data.policy, data.old, advantages, selected(data), strict=True)
        return [SELECTING_LOSSES[name](p, o, a, low, high, chosen) for p, o, a, chosen in tokens]
    if name in TOKEN_LOSSES:
        return [TOKEN_LOSSES[name](p, o, a, low, high, c) for p, o, a in zip(data.policy, data.old, advantages, strict=True)]
    losses = []
    for policy, old, advantage in zip(data.nested(data.policy), data.nested(data.old), data.nested(advantages), strict=True):
        losses += SEQUENCE_LOSSES[name](policy, old, advantage, low, high) if policy else []
    return losses
