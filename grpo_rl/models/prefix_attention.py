"""Attention of blocks that continue a prompt, which lies on the flat axis once for all of them.

A token of such a block attends to the whole prompt and to its own block up to itself. On CPUs that is computed in two
parts without a mask: a prompt's continuations, all together, against the prompt, and every block causally against
itself. The parts are joined by their log-sum-exps (Milakov & Gimelshein 2018). On other devices each block gets a copy of
its prompt's keys and values, and one kernel computes all.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from grpo_rl.models.packing import GatheredKeys, Packing

# ---- CPUs: two parts and their log-sum-exps ----------------------------------------------------------------------


def split_attention(query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None) -> Tensor:
    """Return the outputs [S, heads, head_dim] on a CPU, whose kernel of flash attention gives log-sum-exps too."""
    repeat = query.shape[1] // key.shape[1]
    if repeat > 1:
        key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    out: Tensor = _SplitAttention.apply(query, key, value, packing, scaling)
    return out


class _SplitAttention(torch.autograd.Function):
    """Attention in two parts. The gradient of each part needs the whole's output and log-sum-exp only.

    With weights p = exp(score - lse), the gradient of a score is p (grad·v - grad·out), whichever part the key is in (Dao
    et al. 2022, appendix B.2). So the kernel's own backward pass, called for a part of the keys with `out` and `lse` of
    all, gives that part's share.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None) -> Tensor:
        outs, lses = [], []
        for index_BL in _rows(packing):
            q, k, v = (_rectangle(x, index_BL) for x in (query, key, value))
            out_BHLD, lse_BHL = _forward(q, k, v, 0.0, True, scale=scaling)
            outs.append(out_BHLD.transpose(1, 2).flatten(0, 1))
            lses.append(lse_BHL.transpose(1, 2).flatten(0, 1))
        out_SHD, lse_SH = (torch.cat(parts).index_select(0, packing.rectangles.restore_S) for parts in (outs, lses))
        for family in packing.families:
            prompt, rest = slice(family.begin, family.prompt_end), slice(family.prompt_end, family.end)
            part_HLD, part_HL = (
                x[0] for x in _forward(query[:, :, rest], key[:, :, prompt], value[:, :, prompt], 0.0, False, scale=scaling)
            )
            own_LHD, own_LH, part_LH = out_SHD[rest], lse_SH[rest], part_HL.T
            share_LH1 = torch.sigmoid(part_LH - own_LH)[..., None].to(out_SHD.dtype)
            own_LHD.lerp_(part_HLD.transpose(0, 1), share_LH1)
            lse_SH[rest] = torch.logaddexp(own_LH, part_LH)
        ctx.save_for_backward(query, key, value, out_SHD, lse_SH)
        ctx.packing, ctx.scaling = packing, scaling
        return out_SHD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_SHD: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out_SHD, lse_SH = ctx.saved_tensors
        packing: Packing = ctx.packing
        num_cells = sum(index_BL.numel() for index_BL in _rows(packing))
        # A padding cell has the gradient 0, so that it adds nothing to any key.
        cells_CHD = grad_SHD.new_zeros(num_cells, *grad_SHD.shape[1:]).index_copy_(0, packing.rectangles.restore_S, grad_SHD)
        out_1HSD, lse_1HS = out_SHD.transpose(0, 1)[None], lse_SH.T[None]
        grad_1HSD = grad_SHD.transpose(0, 1)[None]
        parts: list[tuple[Tensor, ...]] = []
        first = 0
        for index_BL in _rows(packing):
            rows, length = index_BL.shape
            grad_BHLD = cells_CHD[first : first + rows * length].unflatten(0, (rows, length)).transpose(1, 2)
            first += rows * length
            q, k, v, out = (_rectangle(x, index_BL) for x in (query, key, value, out_1HSD))
            lse = _rectangle(lse_1HS[..., None], index_BL)[..., 0].contiguous()
            grads = _backward(grad_BHLD, q, k, v, out, lse, 0.0, True, scale=ctx.scaling)
            parts.append(tuple(grad.transpose(1, 2).flatten(0, 1) for grad in grads))
        grads_SHD = [torch.cat(some).index_select(0, packing.rectangles.restore_S) for some in zip(*parts, strict=True)]
        for family in packing.families:
            prompt, rest = slice(family.begin, family.prompt_end), slice(family.prompt_end, family.end)
            grads = _backward(
                *(
                    x[:, :, rest] if x is not key and x is not value else x[:, :, prompt]
                    for x in (grad_1HSD, query, key, value)
                ),
                out_1HSD[:, :, rest],
                lse_1HS[:, :, rest].contiguous(),
                0.0,
                False,
                scale=ctx.scaling,
            )
            for whole_SHD, grad, where in zip(grads_SHD, grads, (rest, prompt, prompt), strict=True):
                whole_SHD[where] += grad[0].transpose(0, 1)
        return (*(grad.transpose(0, 1)[None] for grad in grads_SHD), None, None)


def _forward(*arguments: Any, scale: float | None) -> tuple[Tensor, Tensor]:
    """Return flash attention's outputs [B, H, L, D] and log-sum-exps [B, H, L]: (query, key, value, dropout, is_causal)."""
    out: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*arguments, scale=scale)
    return out


def _backward(*arguments: Any, scale: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value: (grad, query, key, value, out, lse, dropout, is_causal)."""
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    grads: tuple[Tensor, Tensor, Tensor] = backward(*arguments, scale=scale)
    return grads


def _rows(packing: Packing) -> list[Tensor]:
    return [group.index_BL for group in packing.rectangles.groups]


def _rectangle(x: Tensor, index_BL: Tensor) -> Tensor:
    """Return [1, heads, S, head_dim] as [B, heads, L, head_dim]."""
    return x[0].index_select(1, index_BL.reshape(-1)).unflatten(1, tuple(index_BL.shape)).transpose(0, 1)


# ---- other devices: copies of the prompts' keys --------------------------------------------------------------------


def repeated_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values [B, heads, L, head_dim], repeated for the queries that share them where SDPA needs it so.

    On GPUs, of SDPA's kernels for float32 only the one that writes the whole [L, L] matrix takes shared heads; with heads of
    their own the memory-efficient one takes them. CPUs have one kernel for both.
    """
    times = q.shape[1] // k.shape[1]
    if not q.is_cuda or q.dtype != torch.float32 or times == 1:
        return k, v
    return k.repeat_interleave(times, dim=1), v.repeat_interleave(times, dim=1)


def masked_attention(query: Tensor, key: Tensor, value: Tensor, keys: GatheredKeys, scaling: float | None) -> Tensor:
    """Return the outputs [S, heads, head_dim] of SDPA over rectangles of blocks, with a mask where they continue a prompt."""
    outputs = []
    for group in keys.rectangles.groups:
        q = _rectangle(query, group.index_BL)
        k, v = (_Gather.apply(x[0], group.key_index_BK.reshape(-1), 1) for x in (key, value))
        k, v = (x.unflatten(1, tuple(group.key_index_BK.shape)).transpose(0, 1) for x in (k, v))
        k, v = repeated_heads(q, k, v)
        num_queries, num_keys = q.shape[2], k.shape[2]
        mask = None
        if group.prompt_length:
            mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q.device).tril(group.prompt_length)
        gqa = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scaling, enable_gqa=gqa)
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, keys.rectangles.restore_S)


def gathered(x_SHD: Tensor, keys: GatheredKeys) -> Tensor:
    """Return the keys or values of all blocks, [K, heads, head_dim]."""
    out: Tensor = _Gather.apply(x_SHD, keys.index_K, 0)
    return out


class _Gather(torch.autograd.Function):
    """Copies along an axis whose gradients are added up in float32: a prompt's keys get one share from every response."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, dim: int) -> Tensor:
        ctx.save_for_backward(index)
        ctx.dim, ctx.length = dim, x.shape[dim]
        return x.index_select(dim, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        shape = list(grad.shape)
        shape[ctx.dim] = ctx.length
        precise = torch.promote_types(grad.dtype, torch.float32)
        total = torch.zeros(shape, dtype=precise, device=grad.device).index_add_(ctx.dim, index, grad.to(precise))
        return total.to(grad.dtype), None, None
