"""Drawing tokens from logits, each row with its own settings and random numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from grpo_rl.rollout.counter_noise import exponential_noise, row_keys
from grpo_rl.types import Sampling, Support


def sample(
    logits_BV: Tensor, settings: Sequence[Sampling], seeds: Sequence[int], positions: Sequence[int]
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """Draw one token per row; return tokens (int64 [B]), their log-probs (float32 [B]), and the ids left to
    draw from.

    The distribution is softmax(logits / temperature), cut to the tokens with at least min_p of the likeliest
    one's probability, to the top k, then to the smallest set with probability top_p, and normalised again.
    Temperature 0 takes the likeliest token and its log-probability at temperature 1. A draw depends only on
    the row's logits, seed and position.
    """
    temperature_B = torch.tensor([s.temperature or 1.0 for s in settings], device=logits_BV.device)
    logits_BV = logits_BV.float() / temperature_B[:, None]
    for row, s in enumerate(settings):
        if s.min_p > 0:
            logits_BV[row] = keep_min_p(logits_BV[row], s.min_p)
        if s.top_k > 0:
            logits_BV[row] = keep_top_k(logits_BV[row], s.top_k)
        if s.top_p < 1:
            logits_BV[row] = keep_top_p(logits_BV[row], s.top_p)
    logprobs_BV = logits_BV.log_softmax(-1)
    tokens_B = logits_BV.argmax(-1)
    drawn = [row for row, s in enumerate(settings) if s.temperature > 0]
    if drawn:
        keys = row_keys([seeds[row] for row in drawn], [positions[row] for row in drawn])
        noise_RV = exponential_noise(keys, logits_BV.shape[1], logits_BV.device)
        tokens_B[drawn] = (logprobs_BV[drawn].exp() / noise_RV).argmax(-1)
    support_ids = [
        logits_V.isfinite().nonzero()[:, 0] if s.returns_support else None
        for s, logits_V in zip(settings, logits_BV, strict=True)
    ]
    return tokens_B, logprobs_BV.gather(-1, tokens_B[:, None])[:, 0], support_ids


def support_of(left: Sequence[Tensor]) -> Support:
    ids = [ids.cpu().numpy().astype(np.int32) for ids in left]
    return Support(np.array([len(token_ids) for token_ids in ids], dtype=np.int32), np.concatenate(ids))


def keep_min_p(logits_V: Tensor, p: float) -> Tensor:
    """Set logits to -inf whose probability is below p times the largest."""
    return logits_V.masked_fill(logits_V.softmax(-1) < p * logits_V.softmax(-1).max(), float("-inf"))


def keep_top_k(logits_V: Tensor, k: int) -> Tensor:
    """Set all but the k largest to -inf; ties with the k-th stay."""
    smallest = logits_V.topk(min(k, len(logits_V))).values[-1]
    return logits_V.masked_fill(logits_V < smallest, float("-inf"))


def keep_top_p(logits_V: Tensor, p: float) -> Tensor:
    """Set to -inf all but the smallest set of likeliest tokens whose probability reaches p."""
    probs_V, order_V = logits_V.softmax(-1).sort(descending=True)
    before_V = probs_V.cumsum(-1) - probs_V
    drop_V = torch.zeros_like(before_V, dtype=torch.bool).scatter(0, order_V, before_V >= p)
    return logits_V.masked_fill(drop_V, float("-inf"))
