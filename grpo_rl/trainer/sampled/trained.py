"""The rollouts and tokens that are trained: those with a reward, the penalty for long ones, masks and weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch

from grpo_rl.algos.correction import RolloutCorrection, correct
from grpo_rl.algos.segments import Segments
from grpo_rl.algos.shaping import overlong_penalty
from grpo_rl.columns import values
from grpo_rl.config.schema.tree import AlgorithmConfig, OverlongBufferConfig
from grpo_rl.protocols import Rewarder
from grpo_rl.rewards.contract import summary
from grpo_rl.types import GREEDY, Batch, Metrics, Rollout

BASELINE_FAILED = "baseline_failed"
"""The failure of a rollout whose prompt's greedy response has no reward."""
_NAMES = {"timeouts": "_timeout", "errors": "_error", "invalid": "_invalid"}
"""The endings of the names of failures, as in reward_timeout and judge_timeout."""


def is_trained(rollout: Rollout) -> bool:
    """Return whether the rollout has a reward, perhaps reward.failure_value, and the baseline that it is compared with."""
    return rollout.reward is not None and rollout.failure != BASELINE_FAILED


def with_reward(rollouts: Sequence[Rollout]) -> list[Rollout]:
    return [rollout for rollout in rollouts if is_trained(rollout)]


def failure_metrics(rollouts: Sequence[Rollout]) -> Metrics:
    """Return how many rewards failed in which way, and how many rollouts are not trained for it.

    `reward/failed_baselines` counts prompts, `reward/broken_groups` groups with less than two responses left; both only if there are any.
    """
    metrics = {f"reward/{name}": float(sum((r.failure or "").endswith(end) for r in rollouts)) for name, end in _NAMES.items()}
    metrics["reward/dropped"] = float(sum(not is_trained(rollout) for rollout in rollouts))
    baselines = {rollout.prompt.uid for rollout in rollouts if rollout.failure == BASELINE_FAILED}
    sampled = [rollout for rollout in rollouts if rollout.sample_index != GREEDY]
    trained_counts = Counter(rollout.prompt.uid for rollout in sampled if is_trained(rollout))
    broken = [
        uid for uid, size in Counter(rollout.prompt.uid for rollout in sampled).items() if trained_counts[uid] < min(2, size)
    ]
    counts = {"reward/failed_baselines": len(baselines), "reward/broken_groups": len(broken)}
    return metrics | {name: float(count) for name, count in counts.items() if count}


def scored(rewarder: Rewarder, rollouts: Sequence[Rollout], warn: Callable[[str], None]) -> list[Rollout]:
    waited = rewarder.wait(rollouts)
    # Truncated episodes are dropped because the configuration says so: they have a metric, and need no warning.
    failed = [rollout for rollout in waited if rollout.failure is not None and not rollout.failure.startswith("truncated_")]
    failures = [(rollout.failure or "", rollout.failure_cause or "") for rollout in failed]
    if failures:
        warn(summary(failures, len(waited)))
    return waited


def penalize_overlong(rollouts: Sequence[Rollout], config: OverlongBufferConfig, max_length: int) -> list[Rollout]:
    """Return the rollouts with the penalty for long responses in their rewards, unless these failed, and as a part `overlong`."""
    if config.len is None or not config.enable:
        return list(rollouts)
    lengths_N = torch.tensor([len(rollout.response_ids) for rollout in rollouts])
    penalties = overlong_penalty(lengths_N, max_length, config.len, config.penalty_factor).tolist()
    for rollout, penalty in zip(rollouts, penalties, strict=True):
        if rollout.failure is not None:
            continue
        assert rollout.reward is not None
        rollout.reward += penalty
        rollout.reward_parts = {**rollout.reward_parts, "overlong": penalty}
    return list(rollouts)


def trained_tokens(batch: Batch, config: AlgorithmConfig) -> tuple[Batch, Metrics]:
    """Return the batch, whose advantages are those of whole responses, of its trained tokens alone, with `weights_T` if they are weighed.

    The metrics `rollout_corr/*` say how far engine and trainer are apart; if nothing is corrected, the actor's ranks measure that.
    `rollout/trained_token_fraction` is there if tokens may be left out.
    """
    metrics: Metrics = {}
    correction = RolloutCorrection.from_config(config.rollout_correction)
    whole_N = torch.ones(batch.num_rollouts, dtype=torch.bool)
    num_tokens = batch.num_trained_tokens
    masks = config.mask_truncated or batch.masked_N is not None
    if config.mask_truncated:
        assert batch.truncated_N is not None
        whole_N = ~batch.truncated_N
    if batch.masked_N is not None:
        whole_N = whole_N & ~batch.masked_N
    if masks:
        metrics["rollout/masked_fraction"] = float((~whole_N).double().mean())
        batch = batch.keep(Segments(batch.trained_lengths_N).broadcast(whole_N))
    if batch.old_logprobs_T is not None and correction.active:
        assert batch.rollout_logprobs_T is not None, "these responses were sampled"
        # A response that was masked is in no mean of the correction.
        segments = Segments(batch.trained_lengths_N[whole_N])
        result = correct(correction, values(batch.old_logprobs_T), values(batch.rollout_logprobs_T), segments)
        metrics |= {f"rollout_corr/{name}": value for name, value in result.metrics.items()}
        batch = batch.replace(weights_T=result.weights_T)
        if result.trained_T is not None:
            batch = batch.keep(result.trained_T)
    if masks or (correction.active and correction.rollout_rs):
        metrics["rollout/trained_token_fraction"] = batch.num_trained_tokens / max(1, num_tokens)
    return batch, metrics
