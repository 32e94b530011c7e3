"""Causal attention over blocks of tokens that lie back to back on one flat axis (`models/packing.py`).

On GPUs in half precision a kernel of variable lengths takes the blocks as they lie: flash-attn's if it is
installed, else torch's (`torch.nn.attention.varlen`). Everywhere else, and for other head sizes, it is SDPA
over right-padded groups of blocks of similar length. All are exact.

A block that continues a prompt attends to the whole prompt and to its own block up to itself. On CPUs that is
computed in two parts without a mask: a prompt's continuations together against the prompt, and every block
causally against itself, joined by their log-sum-exps (Milakov & Gimelshein 2018). Elsewhere each block gets a
copy of its prompt's keys and values, and one kernel computes all.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from typing import Any

import torch
import torch.nn.attention
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from grpo_rl.errors import ConfigError
from grpo_rl.models.packing import GatheredKeys, Packing
from grpo_rl.models.sequence_parallel import Slice

ATTENTION_NAME = "grpo_rl_packed"


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Packing,
    slice: Slice | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return attention outputs [1, S, heads, head_dim] of flat queries, keys and values [1, heads, S,
    head_dim].

    The signature is transformers'. It refuses sequences longer than a sliding window, logit soft-capping and
    attention sinks (`s_aux`). With a `slice` tensors are over this rank's slice, and `packing` is that of
    all.
    """
    if sliding_window is not None and packing.max_length > sliding_window:
        raise ValueError(
            f"sequences of {packing.max_length} tokens under a sliding window of {sliding_window} are not supported"
        )
    if softcap is not None:
        raise ValueError("attention logit soft-capping is not supported")
    if s_aux is not None:
        raise ValueError("attention sinks are not supported")
    if packing.families and dropout:
        raise ValueError("attention weights that are dropped at random cannot be shared between sequences")
    if slice is not None:
        query, key, value = slice.to_heads((query, key, value))
    out_SHD = _attention(query, key, value, packing, scaling, dropout)
    return (out_SHD if slice is None else slice.to_tokens(out_SHD))[None], None


def _attention(query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None, dropout: float) -> Tensor:
    if takes_blocks_as_they_lie(query, dropout):
        return _blocks_as_they_lie(query, key, value, packing, scaling)
    if packing.keys is not None:
        return block_by_block(query, key, value, packing, packing.keys, scaling)
    if packing.families:
        return split_attention(query, key, value, packing, scaling)
    return _padded_groups(query, key, value, packing, scaling, dropout)


def _padded_groups(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None, dropout: float
) -> Tensor:
    outputs = []
    for index_BL in packing.rectangles.groups:
        q, k, v = (_rectangle(x, index_BL, in_order=packing.uniform) for x in (query, key, value))
        k, v = repeated_heads(q, k, v)
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scaling, dropout_p=dropout, enable_gqa=q.shape[1] != k.shape[1]
        )
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    if packing.uniform:
        return outputs[0]
    return torch.cat(outputs).index_select(0, packing.rectangles.restore_S)


def _rectangle(x: Tensor, index_BL: Tensor, *, in_order: bool = False) -> Tensor:
    """[1, heads, S, head_dim] as [B, heads, L, head_dim]; `in_order` if the cells are all positions."""
    flat = x[0] if in_order else x[0].index_select(1, index_BL.reshape(-1))
    return flat.unflatten(1, tuple(index_BL.shape)).transpose(0, 1)


def repeated_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """On GPUs, for float32, a mask, or heads above 256, only the slow kernel takes shared heads."""
    times = q.shape[1] // k.shape[1]
    if not q.is_cuda or times == 1:
        return k, v
    return k.repeat_interleave(times, dim=1), v.repeat_interleave(times, dim=1)


def split_attention(query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None) -> Tensor:
    repeat = query.shape[1] // key.shape[1]
    if repeat > 1:
        key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    out: Tensor = _SplitAttention.apply(query, key, value, packing, scaling)
    return out


_flash: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""(query, key, value, dropout, is_causal) to outputs [B, H, L, D] and log-sum-exps [B, H, L]."""
_flash_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
"""(grad, query, key, value, out, lse, dropout, is_causal) to the gradients of query, key and value."""


class _SplitAttention(torch.autograd.Function):
    """Attention in two parts.

    With weights p = exp(score - lse), the gradient of a score is p (grad·v - grad·out), whichever part the
    key is in (Dao et al. 2022, appendix B.2). So the kernel's backward pass, called for a part of the keys
    with `out` and `lse` of all, gives that part's share.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None) -> Tensor:
        outs, lses = [], []
        for index_BL in packing.rectangles.groups:
            q, k, v = (_rectangle(x, index_BL) for x in (query, key, value))
            out_BHLD, lse_BHL = _flash(q, k, v, 0.0, True, scale=scaling)
            outs.append(out_BHLD.transpose(1, 2).flatten(0, 1))
            lses.append(lse_BHL.transpose(1, 2).flatten(0, 1))
        out_SHD, lse_SH = (torch.cat(parts).index_select(0, packing.rectangles.restore_S) for parts in (outs, lses))
        for prompt, rest in packing.families:
            part_HLD, part_HL = (
                x[0] for x in _flash(query[:, :, rest], key[:, :, prompt], value[:, :, prompt], 0.0, False, scale=scaling)
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
        groups = packing.rectangles.groups
        sizes = [index_BL.numel() for index_BL in groups]
        # A padding cell has the gradient 0, so that it adds nothing to any key.
        cells_CHD = grad_SHD.new_zeros(sum(sizes), *grad_SHD.shape[1:]).index_copy_(0, packing.rectangles.restore_S, grad_SHD)
        out_1HSD, lse_1HS = out_SHD.transpose(0, 1)[None], lse_SH.T[None]
        grad_1HSD = grad_SHD.transpose(0, 1)[None]
        parts: list[tuple[Tensor, ...]] = []
        for index_BL, grad_CHD in zip(groups, cells_CHD.split(sizes), strict=True):
            grad_BHLD = grad_CHD.unflatten(0, index_BL.shape).transpose(1, 2)
            q, k, v, out = (_rectangle(x, index_BL) for x in (query, key, value, out_1HSD))
            lse = _rectangle(lse_1HS[..., None], index_BL)[..., 0].contiguous()
            grads = _flash_backward(grad_BHLD, q, k, v, out, lse, 0.0, True, scale=ctx.scaling)
            parts.append(tuple(grad.transpose(1, 2).flatten(0, 1) for grad in grads))
        grads_SHD = [torch.cat(some).index_select(0, packing.rectangles.restore_S) for some in zip(*parts, strict=True)]
        for prompt, rest in packing.families:
            of_rest = (slice(None), slice(None), rest)
            grads = _flash_backward(
                grad_1HSD[of_rest],
                query[of_rest],
                key[:, :, prompt],
                value[:, :, prompt],
                out_1HSD[of_rest],
                lse_1HS[of_rest].contiguous(),
                0.0,
                False,
                scale=ctx.scaling,
            )
            for whole_SHD, grad, where in zip(grads_SHD, grads, (rest, prompt, prompt), strict=True):
                whole_SHD[where] += grad[0].transpose(0, 1)
        return (*(grad.transpose(0, 1)[None] for grad in grads_SHD), None, None)


def block_by_block(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, keys: GatheredKeys, scaling: float | None
) -> Tensor:
    queries = query.split(packing.lengths_N.tolist(), dim=2)
    copies = (gathered(x[0].transpose(0, 1), keys).split(keys.lengths_B.tolist()) for x in (key, value))
    outputs = []
    for q, *block_keys_values in zip(queries, *copies, strict=True):
        k, v = repeated_heads(q, *(x.transpose(0, 1)[None] for x in block_keys_values))
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(k.shape[2] - q.shape[2])
        out = F.scaled_dot_product_attention(q, k, v, mask, scale=scaling, enable_gqa=q.shape[1] != k.shape[1])
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


def gathered(x_SHD: Tensor, keys: GatheredKeys) -> Tensor:
    out: Tensor = _Gather.apply(x_SHD, keys.index_K)
    return out


class _Gather(torch.autograd.Function):
    """Copies of rows, whose gradients (one of each response for a prompt's keys) add up in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.length = x.shape[0]
        return x.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        precise = torch.promote_types(grad.dtype, torch.float32)
        total = torch.zeros(ctx.length, *grad.shape[1:], dtype=precise, device=grad.device)
        return total.index_add_(0, index, grad.to(precise)).to(grad.dtype), None


def takes_blocks_as_they_lie(query: Tensor, dropout: float) -> bool:
    """The kernels refuse head sizes that are no multiple of 8 or above 256; torch's has no dropout."""
    width = query.shape[-1]
    half = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
    return half and width % 8 == 0 and width <= 256 and not dropout


_flash_attn_is_wanted = True


def choose_kernel(name: str) -> None:
    """Take the kernel that model.flash_attention names. Raises ConfigError if it is not installed."""
    global _flash_attn_is_wanted
    _flash_attn_is_wanted = name == "auto"
    if name in ("auto", "torch"):
        return
    try:
        torch.nn.attention.activate_flash_attention_impl(name)
    except Exception as error:
        known = ", ".join(torch.nn.attention.list_flash_attention_impls())
        raise ConfigError(
            f"actor_rollout_ref.model.flash_attention={name}: torch cannot activate it ({type(error).__name__}: {error}); "
            f"its registry has {known}; install the kernel's package, or set auto"
        ) from error


@functools.cache
def _has_flash_attn() -> bool:
    """flash-attn 4 is a namespace package of the same name, without this function."""
    spec = importlib.util.find_spec("flash_attn")
    return spec is not None and spec.origin is not None


def _blocks_as_they_lie(query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None) -> Tensor:
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    ends_q = ends_k = packing.cumulative_lengths
    if packing.keys is not None:
        k, v, ends_k = gathered(k, packing.keys), gathered(v, packing.keys), packing.keys.cumulative_lengths
    ends = ends_q, ends_k, packing.max_length, packing.max_length
    # A block's queries are the last of its keys, and both kernels align the causal mask so (flash-attn since version 2.1).
    if _flash_attn_is_wanted and _has_flash_attn():
        from flash_attn import flash_attn_varlen_func

        same_bits = torch.are_deterministic_algorithms_enabled()
        out = flash_attn_varlen_func(q, k, v, *ends, softmax_scale=scaling, causal=True, deterministic=same_bits)
    else:
        from torch.nn.attention.varlen import varlen_attn

        options: dict[str, Any] = {}
        if "enable_gqa" in inspect.signature(varlen_attn).parameters:
            options["enable_gqa"] = q.shape[1] != k.shape[1]
        else:  # torch 2.11
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        # No window to the right is how this function writes a causal mask.
        out = varlen_attn(q, k, v, *ends, scale=scaling, window_size=(-1, 0), **options)
    assert isinstance(out, Tensor)
    return out


def register(*, left_out: bool = False) -> None:
    """Register our attention with transformers; `left_out` of what is compiled around it."""
    from transformers import AttentionInterface

    # The decorator loads torch's compiler: only if something is compiled.
    AttentionInterface.register(ATTENTION_NAME, torch.compiler.disable(packed_attention) if left_out else packed_attention)
