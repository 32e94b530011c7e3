"""Averaging: per-token values of one micro-batch in, its share of the global average out.

Every mode divides by the counts of the whole optimizer step, in float64, so shares add up, and the gradient
is the same for any split. A mode with `@needs("group_tokens")` is given the keyword `group_tokens_N`; its own
options are keywords with defaults.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from grpo_rl.algos.segments import Segments
from grpo_rl.config.schema.kinds import Positive
from grpo_rl.registry import Registry, needs
from grpo_rl.types import Counts

Aggregation = Callable[..., Tensor]  # (values_T, segments, counts, *, <group_tokens_N, own options>) -> 0-d share

AGGREGATIONS: Registry[Aggregation] = Registry(
    "loss_agg_mode", "average(values_T: Tensor, segments: Segments, counts: Counts, *, option=default, ...) -> 0-d Tensor"
)


@AGGREGATIONS.register("token-mean")
def token_mean(values_T: Tensor, segments: Segments, counts: Counts) -> Tensor:
    """Mean over all trained tokens: long responses weigh more.

    Formula: 1/num_tokens Σ_tokens

    DAPO (arXiv 2503.14476), section 3.3.
    """
    return values_T.double().sum() / max(counts.num_tokens, 1)


@AGGREGATIONS.register("token-sum")
def token_sum(values_T: Tensor, segments: Segments, counts: Counts) -> Tensor:
    """Sum over all trained tokens: the step grows with the batch.

    Formula: Σ_tokens
    """
    return values_T.double().sum()


@AGGREGATIONS.register("seq-mean-token-sum")
def seq_mean_token_sum(values_T: Tensor, segments: Segments, counts: Counts) -> Tensor:
    """Mean over responses of the sum over each one's tokens.

    Formula: 1/num_sequences Σ_responses Σ_tokens
    """
    return values_T.double().sum() / max(counts.num_sequences, 1)


@AGGREGATIONS.register("seq-mean-token-sum-norm")
def seq_mean_token_sum_norm(
    values_T: Tensor, segments: Segments, counts: Counts, *, loss_scale_factor: Positive | None = None
) -> Tensor:
    """Mean over responses of the sum over each one's tokens, divided by a constant.

    Formula: 1/(num_sequences loss_scale_factor) Σ_responses Σ_tokens

    Dr. GRPO (arXiv 2503.20783), section 3.1: the constant is the longest response that may be sampled.
    ValueError without it.
    """
    if loss_scale_factor is None or not loss_scale_factor > 0:
        raise ValueError(f"loss_scale_factor={loss_scale_factor}: a number > 0, such as the longest response")
    return values_T.double().sum() / (max(counts.num_sequences, 1) * loss_scale_factor)


@AGGREGATIONS.register("seq-mean-token-mean")
def seq_mean_token_mean(values_T: Tensor, segments: Segments, counts: Counts) -> Tensor:
    """Mean over responses of the mean over each one's tokens.

    Formula: 1/num_sequences Σ_responses 1/length Σ_tokens

    GRPO as published: DeepSeekMath (arXiv 2402.03300), eq. 3.
    """
    return segments.mean(values_T.double()).sum() / max(counts.num_sequences, 1)


@AGGREGATIONS.register("prompt-mean")
@needs("group_tokens")
def prompt_mean(values_T: Tensor, segments: Segments, counts: Counts, *, group_tokens_N: Tensor) -> Tensor:
    """Mean over prompts of the mean over all tokens of the responses to each one.

    Formula: 1/num_groups Σ_prompts 1/(tokens of its responses) Σ_tokens

    ScaleRL (arXiv 2510.13786), section 3. `group_tokens_N` counts over the whole mini-batch.
    """
    sums_N = segments.sum(values_T.double()) / group_tokens_N.clamp(min=1)
    return sums_N.sum() / max(counts.num_groups, 1)


def group_tokens(lengths_N: Tensor, group_N: Tensor) -> Tensor:
    _, index_N = torch.unique(group_N, return_inverse=True)
    tokens_G = torch.zeros(int(index_N.max()) + 1 if len(index_N) else 0, dtype=torch.long)
    return tokens_G.index_add(0, index_N, lengths_N.long())[index_N]
