"""The LM head: log-probabilities, entropies and exact KLs of trained tokens out of their hidden states.

Logits are float32, and made chunk by chunk: `[tokens, vocabulary]` never exists at once. The log-prob of the
sampled token has a backward pass of its own (`token_logprobs`); the rest is left to autograd, each chunk
recomputed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from grpo_rl.frozen import frozen
from grpo_rl.models.linear import Precision, add_product, linear, product, reduced_linear, rounded

Columns = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""Log-prob, entropy, KL to the reference, log-probs and ids of several tokens, of each trained token."""
Support = tuple[Tensor, Tensor]
"""Row in the chunk and id of every token that could be sampled there."""
Chunk = tuple[slice, Support | None]
"""The rows of a chunk, and their support; None: all tokens."""


@frozen
class Head:
    weight_VD: Tensor
    bias_V: Tensor | None
    temperature: float
    precision: Precision
    rounded_VD: Tensor
    """The weight as products of this precision take it, rounded once for a pass."""

    @classmethod
    def of(cls, weight_VD: Tensor, bias_V: Tensor | None, temperature: float, precision: Precision) -> Head:
        return cls(weight_VD, bias_V, temperature, precision, rounded(weight_VD.float(), precision))

    def detached(self) -> Head:
        return replace(self, weight_VD=self.weight_VD.detach(), bias_V=None if self.bias_V is None else self.bias_V.detach())

    def scaled_TD(self, hidden_TD: Tensor) -> Tensor:
        hidden_TD = hidden_TD.float()
        return hidden_TD if self.temperature == 1.0 else hidden_TD / self.temperature

    def logits_TV(self, hidden_TD: Tensor, left_out_TV: Tensor | None) -> Tensor:
        bias_V = None if self.bias_V is None else self.bias_V.float() / self.temperature
        arguments = self.scaled_TD(hidden_TD), self.weight_VD.float(), bias_V
        if self.precision == "float32":
            logits_TV = linear(*arguments)
        else:
            logits_TV = reduced_linear(*arguments, self.precision, self.rounded_VD)
        if left_out_TV is not None:
            logits_TV = logits_TV.masked_fill(left_out_TV, float("-inf"))
        return logits_TV

    def left_out_TV(self, hidden_TD: Tensor, support: Support | None) -> Tensor | None:
        if support is None:
            return None
        left_out_TV = torch.ones(len(hidden_TD), len(self.weight_VD), dtype=torch.bool, device=hidden_TD.device)
        left_out_TV[support] = False
        return left_out_TV

    def logprobs_TV(self, hidden_TD: Tensor, left_out_TV: Tensor | None) -> Tensor:
        return self.logits_TV(hidden_TD, left_out_TV).log_softmax(dim=-1)


def token_logprobs(head: Head, hidden_TD: Tensor, target_T: Tensor, chunks: list[Chunk]) -> Tensor:
    out: Tensor = _TokenLogprobs.apply(hidden_TD, head.weight_VD, head.bias_V, target_T, head.detached(), chunks)
    return out


class _TokenLogprobs(torch.autograd.Function):
    """log softmax(W h)[target], whose gradient of the logits is g (onehot(target) - p).

    p - onehot is made where the probabilities lie, and g scales the hidden states: of [tokens, vocabulary]
    the backward pass writes nothing else. Probabilities of several chunks are recomputed.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, target_T: Tensor, head: Head, chunks: list[Chunk]
    ) -> Tensor:
        ctx.head, ctx.chunks = head, chunks
        logprobs_T = torch.empty(len(target_T), dtype=torch.float32, device=hidden_TD.device)
        saved: list[Tensor] = []
        for rows, support in chunks:
            logprobs_CV = head.logprobs_TV(hidden_TD[rows], head.left_out_TV(hidden_TD[rows], support))
            logprobs_T[rows] = logprobs_CV.gather(1, target_T[rows, None])[:, 0]
            if len(chunks) == 1 and any(ctx.needs_input_grad):
                saved.append(logprobs_CV)
            del logprobs_CV  # before the next chunk's logits are made
        ctx.save_for_backward(hidden_TD, target_T, *saved)
        return logprobs_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TD, target_T, *saved = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        head: Head = ctx.head
        grad_TD = torch.empty_like(hidden_TD) if needs_hidden else None
        grad_VD = grad_V = None
        for rows, support in ctx.chunks:
            if saved:
                probs_CV = saved[0].exp_()
            else:
                probs_CV = head.logits_TV(hidden_TD[rows], head.left_out_TV(hidden_TD[rows], support)).softmax(dim=-1)
            index_C1 = target_T[rows, None]
            probs_CV.scatter_(1, index_C1, probs_CV.gather(1, index_C1) - 1.0)
            grad_C1 = -grad_T[rows, None]
            if needs_bias:
                part_V = (probs_CV.t() @ grad_C1)[:, 0] / head.temperature
                grad_V = part_V if grad_V is None else grad_V + part_V
            probs_CV = rounded(probs_CV, head.precision)
            if grad_TD is not None:
                grad_CD = product(probs_CV, head.rounded_VD, head.precision)
                grad_TD[rows] = (grad_C1 / head.temperature * grad_CD).to(grad_TD.dtype)
            if needs_weight:
                grad_VD = add_product(grad_VD, probs_CV.t(), grad_C1 * head.scaled_TD(hidden_TD[rows]), head.precision)
            del probs_CV
        return grad_TD, grad_VD, grad_V, None, None, None


def chunks_of(num_tokens: int, chunk_tokens: int, support: tuple[Tensor, Tensor] | None = None) -> list[Chunk]:
    """`support`: how many tokens each one was sampled from, on the CPU, and their ids; None: from all."""
    starts = range(0, max(1, num_tokens), chunk_tokens)
    slices = [slice(start, min(start + chunk_tokens, num_tokens)) for start in starts]
    if support is None:
        return [(rows, None) for rows in slices]
    counts_T, ids_M = support
    counts = counts_T.split(chunk_tokens)
    ids = ids_M.split([int(counts_C.sum()) for counts_C in counts])
    rows_of_ids = [torch.arange(len(counts_C), dtype=torch.int32).repeat_interleave(counts_C) for counts_C in counts]
    return list(zip(slices, zip((rows.to(ids_M.device) for rows in rows_of_ids), ids, strict=True), strict=True))


def in_chunks(columns: Callable[[slice, Support | None], Columns], chunks: list[Chunk]) -> Columns:
    """With a gradient, each of several chunks is computed again in the backward pass."""
    if torch.is_grad_enabled() and len(chunks) > 1:
        outputs = [checkpoint(columns, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
    else:
        outputs = [columns(*chunk) for chunk in chunks]
    if len(outputs) == 1:
        return outputs[0]
    return tuple(None if parts[0] is None else torch.cat(parts) for parts in zip(*outputs, strict=True))  # type: ignore[return-value]


def head_columns(
    head: Head,
    hidden_TD: Tensor,
    target_T: Tensor,
    *,
    want_entropy: bool = False,
    ref_head: Head | None = None,
    ref_hidden_TD: Tensor | None = None,
    top: tuple[int, int] | None = None,
    top_ids_TK: Tensor | None = None,
    support: Support | None = None,
) -> Columns:
    left_out_TV = head.left_out_TV(hidden_TD, support)
    logprobs_TV = head.logprobs_TV(hidden_TD, left_out_TV)
    # A copy, not a view: FSDP hooks the outputs and cannot hook views.
    logprobs_T = logprobs_TV.gather(1, target_T[:, None]).squeeze(1).clone()
    top_logprobs_TK = None if top_ids_TK is None else logprobs_TV.gather(1, top_ids_TK)
    if top is not None:
        top_logprobs_TK, top_ids_TK = logprobs_TV[:, : top[1]].topk(min(top), dim=1)
    else:
        top_ids_TK = None  # the caller's own
    entropy_T = kl_T = None
    if want_entropy or ref_hidden_TD is not None:
        probs_TV = logprobs_TV.exp()
        if left_out_TV is not None:
            # 0 log 0 is 0, in the gradient too.
            logprobs_TV = logprobs_TV.masked_fill(left_out_TV, 0.0)
        entropy_T = -(probs_TV * logprobs_TV).sum(-1) if want_entropy else None
        if ref_hidden_TD is not None:
            assert ref_head is not None
            ref_logprobs_TV = ref_head.logprobs_TV(ref_hidden_TD, left_out_TV)
            if left_out_TV is not None:
                ref_logprobs_TV = ref_logprobs_TV.masked_fill(left_out_TV, 0.0)
            kl_T = (probs_TV * (logprobs_TV - ref_logprobs_TV)).sum(-1)
    return logprobs_T, entropy_T, kl_T, top_logprobs_TK, top_ids_TK
