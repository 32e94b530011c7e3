"""The advantage estimators again, in plain Python floats: see `algos_reference.py`."""

from __future__ import annotations

import math
from collections.abc import Callable

from algos_reference import Ragged

EPSILON = 1e-6


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def std(values: list[float]) -> float:
    if len(values) < 2 or all(value == values[0] for value in values):
        return 0.0
    return math.sqrt(math.fsum((value - mean(values)) ** 2 for value in values) / (len(values) - 1))


def whiten(values: list[float]) -> list[float]:
    if all(value == values[0] for value in values):
        return [0.0 for _ in values]
    return [(value - mean(values)) / math.sqrt(std(values) ** 2 + 1e-8) for value in values]


class Case:
    """A batch with its token rewards, and the helpers the formulas are written with."""

    def __init__(self, data: Ragged, token_rewards: list[float]) -> None:
        self.data = data
        self.rewards = data.nested(token_rewards)
        pairs = zip(self.rewards, data.rewards, strict=True)
        self.scores = [math.fsum(tokens) if tokens else reward for tokens, reward in pairs]
        self.count = len(data.lengths)

    def members(self, i: int) -> list[int]:
        return [j for j in range(self.count) if self.data.group[j] == self.data.group[i]]

    def of_group(self, i: int, values: list[float]) -> list[float]:
        return [values[j] for j in self.members(i)]

    def deviations(self, values: list[float]) -> list[float]:
        groups = [self.of_group(i, values) for i in range(self.count)]
        return [0.0 if len(set(g)) == 1 else value - mean(g) for value, g in zip(values, groups, strict=True)]

    def on_tokens(self, values: list[float]) -> list[float]:
        return [value for value, length in zip(values, self.data.lengths, strict=True) for _ in range(length)]


def grpo(case: Case) -> list[float]:
    scores = case.scores
    pairs = enumerate(case.deviations(scores))
    return case.on_tokens([d / (std(case.of_group(i, scores)) + EPSILON) for i, d in pairs])


def dr_grpo(case: Case) -> list[float]:
    return case.on_tokens(case.deviations(case.scores))


def rloo(case: Case) -> list[float]:
    advantages = []
    for i in range(case.count):
        others = [case.scores[j] for j in case.members(i) if j != i]
        advantages.append(case.scores[i] - mean(others) if others else 0.0)
    return case.on_tokens(advantages)


def opo(case: Case) -> list[float]:
    advantages = []
    for i, length in enumerate(case.data.lengths):
        pairs = [(case.data.lengths[j], case.scores[j]) for j in case.members(i) if case.data.lengths[j]]
        if not length or len({score for _, score in pairs}) == 1:
            advantages.append(0.0)
        else:
            weighted = math.fsum(weight * score for weight, score in pairs)
            advantages.append(case.scores[i] - weighted / sum(weight for weight, _ in pairs))
    return case.on_tokens(advantages)


def gpg(case: Case) -> list[float]:
    lively = sum(len(set(case.of_group(i, case.scores))) > 1 for i in range(case.count))
    return case.on_tokens([case.count / max(lively, 1) * d for d in case.deviations(case.scores)])


def grpo_passk(case: Case) -> list[float]:
    advantages = []
    for i in range(case.count):
        ranked = sorted(case.of_group(i, case.scores), reverse=True)
        leads = len(ranked) > 1 and case.scores[i] == ranked[0] > ranked[1]
        advantages.append((ranked[0] - ranked[1]) / (std(ranked) + EPSILON) if leads else 0.0)
    return case.on_tokens(advantages)


def gdpo(case: Case) -> list[float]:
    sums = [0.0] * case.count
    for part in zip(*case.data.parts, strict=True):
        values = list(part)
        for i, d in enumerate(case.deviations(values)):
            sums[i] += d / (std(case.of_group(i, values)) + EPSILON)
    spread = math.sqrt(math.fsum(s * s for s in sums) / (case.count - 1))
    return case.on_tokens([s / (spread + EPSILON) for s in sums])


def reinforce_plus_plus_baseline(case: Case) -> list[float]:
    return whiten(case.on_tokens(case.deviations(case.scores)))


def to_go(rewards: list[float], gamma: float) -> list[float]:
    length = len(rewards)
    return [math.fsum(gamma ** (k - t) * rewards[k] for k in range(t, length)) for t in range(length)]


def reinforce_plus_plus(case: Case, gamma: float = 1.0) -> list[float]:
    return whiten([value for rewards in case.rewards for value in to_go(rewards, gamma)])


def remax(case: Case) -> list[float]:
    pairs = zip(case.rewards, case.data.baselines, strict=True)
    return [value - baseline for rewards, baseline in pairs for value in to_go(rewards, 1.0)]


def rft(case: Case) -> list[float]:
    return [float(math.fsum(rewards) >= 1.0) for rewards in case.rewards for _ in rewards]


def gae_unwhitened(case: Case, gamma: float, lam: float) -> list[float]:
    advantages = []
    for rewards, values in zip(case.rewards, case.data.nested(case.data.values), strict=True):
        following = [*values[1:], 0.0]
        differences = [r + gamma * after - v for r, after, v in zip(rewards, following, values, strict=False)]
        advantages += to_go(differences, gamma * lam)
    return advantages


def gae(case: Case) -> list[float]:
    return whiten(gae_unwhitened(case, 1.0, 1.0))


def grpo_process(case: Case) -> list[float]:
    advantages = []
    for i, length in enumerate(case.data.lengths):
        of_group = [reward for j in case.members(i) for _, reward in case.data.steps[j]]
        constant = len(set(of_group)) == 1
        for t in range(length):
            later = [reward for end, reward in case.data.steps[i] if end >= t]
            advantages.append(
                0.0 if constant else math.fsum((reward - mean(of_group)) / (std(of_group) + EPSILON) for reward in later)
            )
    return advantages


ESTIMATORS: dict[str, Callable[[Case], list[float]]] = {
    function.__name__: function
    for function in (
        dr_grpo,
        gae,
        gdpo,
        gpg,
        grpo,
        grpo_passk,
        grpo_process,
        opo,
        reinforce_plus_plus,
        reinforce_plus_plus_baseline,
        remax,
        rft,
        rloo,
    )
}
