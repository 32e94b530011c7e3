"""Names and seeds of requests: the same for a response wherever and whenever it is sampled."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from grpo_rl.types import GREEDY, Prompt, Sampling


def rollout_id(prompt: Prompt, sample: int) -> str:
    """Return what names one rollout in the pool and in the engines."""
    return f"{prompt.uid}/{sample}"


def sampling_of(sampling: Sampling, uid: str, sample: int) -> Sampling:
    """Return how one response is sampled: with a seed of its own, or greedily."""
    if sample == GREEDY:
        return replace(sampling, temperature=0.0, top_p=1.0, top_k=-1, min_p=0.0, keep_support=False, seed=None)
    return replace(sampling, seed=sample_seed(sampling.seed, uid, sample))


def sample_seed(seed: int | None, uid: str, sample: int) -> int | None:
    """Return the seed of one response, another for each, the same wherever and whenever it is sampled."""
    if seed is None:
        return None
    digest = hashlib.blake2b(f"{seed}:{uid}:{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def turn_sampling(sampling: Sampling, turn: int, max_tokens: int) -> Sampling:
    """Return how one turn of an episode is sampled: the first as a response of its own would be, the others with further seeds."""
    seed = sampling.seed if turn == 0 else sample_seed(sampling.seed, "turn", turn)
    return replace(sampling, seed=seed, max_tokens=max_tokens)
