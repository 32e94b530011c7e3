"""The tokens that vLLM could sample, found from its log-probs of the likeliest tokens.

vLLM's `logprobs_mode=processed_logprobs` gives a token that was left out -inf. Its `return_sampling_mask`
needs Triton (no CPU) and refuses greedy requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from grpo_rl.rollout.vllm.vllm_patches import Reported
from grpo_rl.types import Sampling, Support

if TYPE_CHECKING:
    from vllm.logprobs import FlatLogprobs

_TIES = 32
"""Tokens beyond top_k that are requested: those as likely as the k-th."""
_LOST = 1e-3
"""Probability that may be missing from the requested tokens."""


def num_logprobs(sampling: Sampling, vocab_size: int) -> int:
    """Return how many of the likeliest tokens vLLM has to report."""
    if not sampling.returns_support:
        return 0
    return vocab_size if sampling.top_k <= 0 else min(sampling.top_k + _TIES, vocab_size)


def sampled_logprobs(logprobs: FlatLogprobs | Reported) -> np.ndarray:
    """float32: the first log-prob reported for each place."""
    return np.asarray(logprobs.logprobs, dtype=np.float32)[np.asarray(logprobs.start_indices, dtype=np.int64)]


def support_of(logprobs: FlatLogprobs | Reported) -> Support:
    """Return each place's tokens with a probability. Raises RuntimeError if not all were reported."""
    starts = np.asarray(logprobs.start_indices, dtype=np.int64)
    token_ids = np.asarray(logprobs.token_ids, dtype=np.int32)
    values = np.asarray(logprobs.logprobs, dtype=np.float64)
    lengths = np.diff(starts, append=len(values))
    first = np.zeros(len(values), dtype=bool)
    first[starts] = True
    # The sampled token comes first, and once more if it is among the likeliest.
    is_kept = first | ((values > -np.inf) & (token_ids != np.repeat(token_ids[starts], lengths)))
    total_probs = np.add.reduceat(np.where(is_kept, np.exp(values), 0.0), starts)
    if total_probs.min() < 1 - _LOST:
        raise RuntimeError(
            f"more than {_TIES} tokens are as likely as the top_k-th, so {1 - total_probs.min():.2g} of the probability is unknown; "
            "set actor_rollout_ref.rollout.fp32_lm_head=true, another dtype, or another top_k"
        )
    return Support(np.add.reduceat(is_kept, starts, dtype=np.int32), token_ids[is_kept])
