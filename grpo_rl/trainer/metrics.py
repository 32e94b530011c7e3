"""Metrics of rollouts and batches."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from grpo_rl.trainer.sampled.trained import BASELINE_FAILED, is_trained
from grpo_rl.types import GREEDY, TRUNCATED, Batch, Metrics, Rollout

COUNTS = ("tool_calls", "failed_calls", "malformed_calls")  # counts that every run with episodes has
FAILURES = {"timeouts": "_timeout", "errors": "_error", "invalid": "_invalid"}
"""The endings of the names of failures, as in reward_timeout and judge_timeout."""


def rollout_metrics(rollouts: Sequence[Rollout]) -> Metrics:
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    metrics = failure_metrics(rollouts)
    if rewards:
        metrics |= {"reward/mean": _mean(rewards), "reward/max": max(rewards), "reward/min": min(rewards)}
        metrics["reward/std"] = float(np.std(rewards))
    metrics |= episode_metrics(rollouts)
    metrics["response_length/clip_ratio"] = _mean(rollout.finish_reason == "length" for rollout in rollouts)
    baselines = {rollout.prompt.uid: rollout.baseline for rollout in rollouts if rollout.baseline is not None}
    if baselines:
        metrics["reward/greedy_baseline_mean"] = _mean(baselines.values())
    parts: dict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        for name, value in rollout.reward_parts.items():
            parts[name].append(value)
    # A part called `answer` is there for majority votes; its mean has no meaning.
    for name, values in parts.items():
        if name.rpartition("/")[2] != "answer":
            metrics |= {f"reward/{name}": _mean(values), f"reward/{name}/std": float(np.std(values))}
    return metrics


def failure_metrics(rollouts: Sequence[Rollout]) -> Metrics:
    """Return how many rewards failed in which way, and how many rollouts are not trained for it.

    `reward/failed_baselines` counts prompts, `reward/broken_groups` groups with less than two responses left.
    """
    failures = [rollout.failure or "" for rollout in rollouts]
    counts = {f"reward/{name}": sum(failure.endswith(end) for failure in failures) for name, end in FAILURES.items()}
    counts["reward/dropped"] = sum(not is_trained(rollout) for rollout in rollouts)
    sampled = [rollout for rollout in rollouts if rollout.sample_index != GREEDY]
    sizes = Counter(rollout.prompt.uid for rollout in sampled)
    trained = Counter(rollout.prompt.uid for rollout in sampled if is_trained(rollout))
    optional = {
        "reward/failed_baselines": len({rollout.prompt.uid for rollout in rollouts if rollout.failure == BASELINE_FAILED}),
        "reward/broken_groups": sum(trained[uid] < min(2, size) for uid, size in sizes.items()),
    }
    counts |= {name: count for name, count in optional.items() if count}
    return {name: float(count) for name, count in counts.items()}


def episode_metrics(rollouts: Sequence[Rollout]) -> Metrics:
    """Counts are per episode, `episode/truncated_*` and `episode/failed` shares, `env/NAME` means of last
    values.
    """
    episodes = [rollout.episode for rollout in rollouts if rollout.episode is not None]
    if not episodes:
        return {}
    turns = [float(len(episode.turns)) for episode in episodes]
    metrics = {"episode/turns": _mean(turns), "episode/turns/max": max(turns), "episode/turns/min": min(turns)}
    for name in sorted({*COUNTS, *(name for episode in episodes for name in episode.counts)}):
        metrics[f"episode/{name}"] = _mean(episode.counts.get(name, 0.0) for episode in episodes)
    for name, ending in (*((f"truncated_{ending}", ending) for ending in TRUNCATED), ("failed", "failed")):
        metrics[f"episode/{name}"] = _mean(episode.ended == ending for episode in episodes)
    if waits := [wait for episode in episodes for wait in episode.waits_s]:
        metrics |= {"episode/wait_s": _mean(waits), "episode/wait_s/max": max(waits)}
    num_tokens = sum(len(rollout.response_ids) for rollout in rollouts if rollout.episode is not None)
    num_sampled = sum(episode.num_sampled for episode in episodes)
    metrics["episode/context_token_fraction"] = 1.0 - num_sampled / max(1, num_tokens)
    metrics["episode/sampled_tokens"] = num_sampled / len(episodes)
    if cached := [turn for episode in episodes for turn in episode.turns if turn.cached_tokens is not None]:
        hits = sum(turn.cached_tokens or 0 for turn in cached)
        metrics["episode/cache_hit_fraction"] = hits / max(1, sum(turn.context_tokens for turn in cached))
    for name in sorted({name for episode in episodes for name in episode.info}):
        metrics[f"env/{name}"] = _mean(episode.info[name] for episode in episodes if name in episode.info)
    return metrics


def batch_metrics(batch: Batch, seconds: float) -> Metrics:
    """`rollout/support_mean`: the tokens that top_p, top_k and min_p leave to sample from."""
    lengths_N = batch.response_lengths_N
    metrics = {
        "response_length/mean": float(lengths_N.float().mean()),
        "response_length/max": float(lengths_N.max()),
        "response_length/min": float(lengths_N.min()),
        "prompt_length/mean": float(batch.prompt_lengths_N.float().mean()),
        "prompt_length/max": float(batch.prompt_lengths_N.max()),
    }
    if batch.support_ids_M is not None and batch.num_trained_tokens:
        metrics["rollout/support_mean"] = len(batch.support_ids_M) / batch.num_trained_tokens
    return metrics | throughput(batch, seconds)


def throughput(batch: Batch, seconds: float) -> Metrics:
    """Return the number of tokens of prompts and responses, and how many a second."""
    num_tokens = float(len(batch.token_ids_S))
    return {"perf/total_num_tokens": num_tokens, "perf/tokens_per_s": num_tokens / max(1e-9, seconds)}


def staleness_metrics(rollouts: Sequence[Rollout], version: int) -> Metrics:
    """Return how many versions the tokens' weights are older than `version`, over tokens; empty without any."""
    tokens = Counter[int]()
    for rollout in rollouts:
        for sampled_with, num_tokens in rollout.versions:
            tokens[version - sampled_with] += num_tokens
    total = tokens.total()
    if not total:
        return {}
    return {
        "staleness/min": float(min(tokens)),
        "staleness/mean": sum(age * number for age, number in tokens.items()) / total,
        "staleness/max": float(max(tokens)),
        "staleness/stale_token_fraction": (total - tokens[0]) / total,
    }


def pair_metrics(pairs: Sequence[tuple[Rollout, Rollout]], num_groups: int) -> Metrics:
    metrics = {"pairs/num_pairs": float(len(pairs)), "pairs/tied_fraction": 1.0 - len(pairs) / max(1, num_groups)}
    gaps = [best.reward - worst.reward for best, worst in pairs if best.reward is not None and worst.reward is not None]
    return metrics | ({"pairs/reward_gap": _mean(gaps)} if gaps else {})


def logged_advantages(sampled: Sequence[Rollout], trained: Sequence[Rollout], batch: Batch | None) -> list[float | None]:
    """Return the advantage of each rollout's last token, None if it is not among `trained`, the rollouts of `batch`."""
    if batch is None:
        return [None] * len(sampled)
    advantages_T = batch.token_advantages()
    assert advantages_T is not None
    last_N = torch.cat([torch.zeros(1), advantages_T])[batch.trained_lengths_N.cumsum(0)]
    last_N = torch.where(batch.trained_lengths_N > 0, last_N, 0.0)
    advantages = {
        (rollout.prompt.uid, rollout.sample_index): value for rollout, value in zip(trained, last_N.tolist(), strict=True)
    }
    return [advantages.get((rollout.prompt.uid, rollout.sample_index)) for rollout in sampled]


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)
