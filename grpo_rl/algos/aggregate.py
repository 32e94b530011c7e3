"""Averaging: per-token values of one micro-batch in, its share of the global average out.

Every mode divides by the counts of the whole optimizer step, which all ranks and micro-batches know, and never
by anything counted locally. So shares simply add up, and the gradient is the same for any split. Sums are
taken in float64. Register a mode with `@AGGREGATIONS.register("name")`.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from grpo_rl.algos.segments import Segments
from grpo_rl.registry import Registry
from grpo_rl.types import Counts

Aggregation = Callable[[Tensor, Segments, Counts], Tensor]
"""(values_T, segments, counts) -> 0-d share"""

AGGREGATIONS: Registry[Aggregation] = Registry("loss_agg_mode")


@AGGREGATIONS.register("token-mean")
def token_mean(values_T: Tensor, segments: Segments, counts: Counts) -> Tensor:
    """Mean over all trained tokens: long responses weigh more.

    Formula: 1/num_tokens Σ_tokens

    DAPO (arXiv 2503.14476), section 3.3.
    """
    return values_T.double().sum() / max(counts.num_tokens, 1)


@AGGREGATIONS.register("seq-mean-token-sum")
def seq_mean_token_sum(values_T: Tensor, segments: Segments, counts: Counts) -> Tensor:
    """Mean over responses of the sum over each one's tokens.

    Formula: 1/num_sequences Σ_responses Σ_tokens
    """
    return values_T.double().sum() / max(counts.num_sequences, 1)


@AGGREGATIONS.register("seq-mean-token-mean")
def seq_mean_token_mean(values_T: Tensor, segments: Segments, counts: Counts) -> Tensor:
    """Mean over responses of the mean over each one's tokens: all responses weigh the same.

    Formula: 1/num_sequences Σ_responses 1/length Σ_tokens

    GRPO as published: DeepSeekMath (arXiv 2402.03300), eq. 3.
    """
    return segments.mean(values_T.double()).sum() / max(counts.num_sequences, 1)
