"""Greedy responses, whose rewards are compared with those of the sampled ones."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_rl.trainer.reward_failures import BASELINE_FAILED
from grpo_rl.types import GREEDY, Rollout


def with_baselines(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Return the sampled rollouts, each with the reward of its prompt's greedy response as `baseline`.

    A prompt is identified by its uid. The greedy responses themselves end here: they are compared with and not
    trained on. Where the greedy one's reward failed, so have all that would be compared with it. Without any the rollouts are
    returned as they are. Raises ValueError for a prompt that alone has none.
    """
    greedy = {rollout.prompt.uid: rollout for rollout in rollouts if rollout.sample_index == GREEDY}
    if not greedy:
        return list(rollouts)
    sampled = [rollout for rollout in rollouts if rollout.sample_index != GREEDY]
    for rollout in sampled:
        if rollout.prompt.uid not in greedy:
            raise ValueError(f"prompt {rollout.prompt.uid} has no greedy response, and others of the step have")
        baseline = greedy[rollout.prompt.uid]
        rollout.baseline = baseline.reward
        if baseline.reward is None and rollout.failure is None:
            rollout.failure, rollout.failure_cause = BASELINE_FAILED, f"{baseline.failure}: {baseline.failure_cause}"
    return sampled
