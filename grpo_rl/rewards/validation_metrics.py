from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean

from grpo_rl.rewards.compose import LIFTED
from grpo_rl.types import Metrics, Rollout


def validation_metrics(rollouts: Sequence[Rollout], n: int) -> Metrics:
    """Means over the prompts of each data source of some numbers of a prompt's n responses.

    The value v of a response is its `acc` part, else its reward; 0 if its reward failed.

    - `val/{source}/mean@n`, `best@n`: the mean and the largest v.
    - `val/{source}/maj@n`: v of the winner of a majority vote over the `answer` parts, or over v if no
      response has one. Ties are averaged: what a random choice gives on average.
    - `val/{source}/response_length`: tokens per response; `val/{source}/reward`: the reward itself.
    - `val/{source}/{function}/mean@n`: the mean of one function's score, before its factor.
    - `val/{source}/reward_failures`: how many rewards failed.

    Raises ValueError if a prompt has not exactly n responses, or a response neither reward nor failure.
    """
    groups: dict[str, list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        if rollout.reward is None and rollout.failure is None:
            raise ValueError(f"rollout {rollout.prompt.uid}, sample {rollout.sample_index}, has no reward")
        groups[rollout.prompt.uid].append(rollout)
    by_source: dict[str, list[list[Rollout]]] = defaultdict(list)
    for uid, group in groups.items():
        if len(group) != n:
            raise ValueError(f"prompt {uid} has {len(group)} responses, expected n={n}")
        by_source[group[0].prompt.data_source].append(group)
    metrics: Metrics = {}
    for source, source_groups in sorted(by_source.items()):
        metrics |= {f"val/{source}/{key}": value for key, value in _of_source(source_groups, n).items()}
    return metrics


def _of_source(groups: list[list[Rollout]], n: int) -> Metrics:
    values = [[value_of(rollout) for rollout in group] for group in groups]
    rollouts = [rollout for group in groups for rollout in group]
    # `name/key` is a further number of a function, and the lifted ones are what mean@n is made of.
    names = dict.fromkeys(
        name for rollout in rollouts for name in rollout.reward_parts if "/" not in name and name not in LIFTED
    )
    return {f"{name}/mean@{n}": fmean(rollout.reward_parts.get(name, 0.0) for rollout in rollouts) for name in names} | {
        f"mean@{n}": fmean(fmean(group) for group in values),
        f"best@{n}": fmean(max(group) for group in values),
        f"maj@{n}": fmean(majority((value_of(item), item.reward_parts.get("answer")) for item in group) for group in groups),
        "reward": fmean(0.0 if rollout.failure else rollout.reward or 0.0 for rollout in rollouts),
        "reward_failures": float(sum(rollout.failure is not None for rollout in rollouts)),
        "response_length": fmean(len(rollout.response_ids) for rollout in rollouts),
    }


def value_of(rollout: Rollout) -> float:
    if rollout.failure is not None:
        return 0.0
    assert rollout.reward is not None
    return rollout.reward_parts.get("acc", rollout.reward)


def majority(votes: Iterable[tuple[float, float | None]]) -> float:
    """From value and answer of each response."""
    votes = list(votes)
    ballots: dict[float, list[float]] = defaultdict(list)
    for value, answer in [vote for vote in votes if vote[1] is not None] or votes:
        ballots[value if answer is None else answer].append(value)
    num_votes = max(map(len, ballots.values()))
    return fmean(fmean(values) for values in ballots.values() if len(values) == num_votes)
