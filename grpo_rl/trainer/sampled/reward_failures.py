"""Rollouts whose reward failed: which of them are trained all the same, and the counts and reports of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from grpo_rl.protocols import Rewarder
from grpo_rl.rewards.contract import summary
from grpo_rl.types import GREEDY, Metrics, Rollout

BASELINE_FAILED = "baseline_failed"
"""The failure of a rollout of which the greedy response it is compared with has no reward."""
_NAMES = {"timeouts": "_timeout", "errors": "_error", "invalid": "_invalid"}
"""The endings of the names of failures, of rules (reward_timeout) as of models (judge_timeout)."""


def is_trained(rollout: Rollout) -> bool:
    """Return whether the rollout can be trained on: it has a reward, if only the one of reward.failure_value, and what it is compared with."""
    return rollout.reward is not None and rollout.failure != BASELINE_FAILED


def with_reward(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Return the rollouts that can be trained on; groups get smaller, and go where none of their rollouts is left."""
    return [rollout for rollout in rollouts if is_trained(rollout)]


def failure_metrics(rollouts: Sequence[Rollout]) -> Metrics:
    """Return how many rewards failed in which way, and how many rollouts are not trained for it.

    `reward/failed_baselines` counts prompts and `reward/broken_groups` groups of which one response or none is left, which
    compare nothing any more; both only on steps that have some.
    """
    metrics = {f"reward/{name}": float(sum((r.failure or "").endswith(end) for r in rollouts)) for name, end in _NAMES.items()}
    metrics["reward/dropped"] = float(sum(not is_trained(rollout) for rollout in rollouts))
    baselines = {rollout.prompt.uid for rollout in rollouts if rollout.failure == BASELINE_FAILED}
    sampled = [rollout for rollout in rollouts if rollout.sample_index != GREEDY]
    left = Counter(rollout.prompt.uid for rollout in sampled if is_trained(rollout))
    broken = [uid for uid, size in Counter(rollout.prompt.uid for rollout in sampled).items() if left[uid] < min(2, size)]
    counts = {"reward/failed_baselines": len(baselines), "reward/broken_groups": len(broken)}
    return metrics | {name: float(count) for name, count in counts.items() if count}


def scored(rewarder: Rewarder, rollouts: Sequence[Rollout], warn: Callable[[str], None]) -> list[Rollout]:
    """Return the rollouts with their rewards. Where rewards failed, `warn` is called with how many and why."""
    waited = rewarder.wait(rollouts)
    # Truncated episodes are dropped because the configuration says so: they have a metric, and need no warning.
    failed = [one for one in waited if one.failure is not None and not one.failure.startswith("truncated_")]
    failures = [(one.failure or "", one.failure_cause or "") for one in failed]
    if failures:
        warn(summary(failures, len(waited)))
    return waited
