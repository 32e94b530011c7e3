"""Random ragged batches."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from grpo_rl.types import Counts

EXTREME_LOG_RATIOS = (30.0, -30.0, 100.0, -100.0, 20.0, -20.0)


TOKEN_COLUMNS = ("policy", "old", "ref", "entropy", "values")
ROLLOUT_COLUMNS = ("lengths", "group", "rewards", "baselines", "parts", "steps", "group_tokens")


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
    values: list[float]
    """The critic's."""
    baselines: list[float]
    parts: list[list[float]]
    """The parts of each response's reward."""
    steps: list[list[tuple[int, float]]]
    """The steps of each response: the token on which a step ends, counted within the response, and its reward."""
    group_tokens: list[int]
    """Trained tokens of the response's group in the batch that it was first part of."""

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
        for name in TOKEN_COLUMNS:
            nested = self.nested(getattr(self, name))
            tokens[name] = [value for i in order for value in nested[i]]
        rollouts = {name: [getattr(self, name)[i] for i in order] for name in ROLLOUT_COLUMNS}
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
        "values": [rng.gauss(0, 1) for _ in range(total)],
        "baselines": [rng.gauss(0, 1) for _ in lengths],
    }
    rounded = {name: torch.tensor(values, dtype=torch.float32).tolist() for name, values in columns.items()}
    steps = [
        [(rng.randrange(length), rng.choice([0.0, 0.5, 1.0])) for _ in range(rng.randrange(4))] if length else []
        for length in lengths
    ]
    return Ragged(
        lengths=lengths,
        group=group,
        parts=[[reward, rng.choice([0.0, 0.25])] for reward in rounded["rewards"]],
        steps=steps,
        group_tokens=[sum(length for length, h in zip(lengths, group, strict=True) if h == g) for g in group],
        **rounded,
    )
