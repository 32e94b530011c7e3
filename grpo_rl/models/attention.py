"""Causal attention over blocks of tokens that lie back to back on one flat axis.

Every linear layer of the model runs on the flat axis `[1, S, D]`; only attention depends on where
sequences begin. A *block* is a whole sequence, or the prompt that several sequences share, or what one of these
sequences has after the prompt: that block *continues* the prompt's, and attends to it and to itself.

On GPUs in half precision a variable-length kernel takes the blocks as they lie: flash-attn's where it is installed, else the one
that comes with torch (`torch.nn.attention.varlen`, the same algorithm). Everywhere else it is SDPA over groups of blocks of
similar length, right-padded: under a causal mask no real token ever sees the padding. All are exact. `prefix_attention.py` has
the ways of blocks that continue one.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.attention
import torch.nn.functional as F
from torch import Tensor, nn

from grpo_rl.errors import ConfigError
from grpo_rl.models.packing import Packing, PaddedGroup
from grpo_rl.models.prefix_attention import gathered, masked_attention, repeated_heads, split_attention
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
    """Return attention outputs [1, S, heads, head_dim] of flat queries, keys and values [1, heads, S, head_dim].

    The signature is that of transformers' attention interface. A sliding window is exact here only
    while no sequence is longer than it; beyond that, for logit soft-capping and for attention sinks (`s_aux`), it
    refuses. With a `slice` all of them are over this rank's slice of the tokens, and `packing` is that of all.
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
    if slice is None:
        return _attention(query, key, value, packing, scaling, dropout)[None], None
    query, key, value = slice.to_heads((query, key, value))
    return slice.to_tokens(_attention(query, key, value, packing, scaling, dropout))[None], None


def _attention(query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None, dropout: float) -> Tensor:
    """Return the outputs [S, heads, head_dim] of whole sequences, by the way that suits the device and the type."""
    keys = packing.keys
    kernel = variable_length_kernel(query, dropout)
    if kernel is not None:
        k, v = key[0].transpose(0, 1), value[0].transpose(0, 1)
        return kernel(
            query[0].transpose(0, 1),
            k if keys is None else gathered(k, keys),
            v if keys is None else gathered(v, keys),
            packing.cumulative_lengths,
            packing.cumulative_lengths if keys is None else keys.cumulative_lengths,
            packing.max_length,
            scaling,
            dropout,
        )
    if keys is not None:
        return masked_attention(query, key, value, keys, scaling)
    if packing.families:
        return split_attention(query, key, value, packing, scaling)
    return _padded_groups(query, key, value, packing, scaling, dropout)


def _padded_groups(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None, dropout: float
) -> Tensor:
    """Return the outputs [S, heads, head_dim] of SDPA over each padded group."""
    outputs = []
    for group in packing.rectangles.groups:
        rows, length = group.index_BL.shape
        q, k, v = (_rectangle(x, group, packing.uniform) for x in (query, key, value))
        k, v = repeated_heads(q, k, v)
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scaling, dropout_p=dropout, enable_gqa=q.shape[1] != k.shape[1]
        )
        outputs.append(out.transpose(1, 2).reshape(rows * length, *out.shape[1::2]))
    if packing.uniform:
        return outputs[0]
    return torch.cat(outputs).index_select(0, packing.rectangles.restore_S)


def _rectangle(x: Tensor, group: PaddedGroup, uniform: bool) -> Tensor:
    """Return [1, heads, S, head_dim] as [rows, heads, length, head_dim]."""
    rows, length = group.index_BL.shape
    heads, head_dim = x.shape[1], x.shape[3]
    flat = x[0] if uniform else x[0].index_select(1, group.index_BL.reshape(-1))
    return flat.reshape(heads, rows, length, head_dim).transpose(0, 1)


Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, float | None, float], Tensor]
"""Attention over blocks on a flat axis: queries [S, heads, head_dim], keys, values, where each one's blocks begin (int32,
[num_blocks + 1]), the longest block, scale and dropout. A block's queries are the last of its keys."""


def variable_length_kernel(query: Tensor, dropout: float) -> Kernel | None:
    """Return the kernel that takes blocks as they lie, None where there is none for this device and type."""
    if not query.is_cuda or query.dtype not in (torch.bfloat16, torch.float16):
        return None
    if not _takes_torchs and _has_flash_attention():
        return _flash_attention
    # Torch's own has no dropout.
    return None if dropout else _torch_attention


_takes_torchs = False
"""True once `choose_kernel` has named another kernel than that of an installed flash-attn 2."""


def choose_kernel(name: str) -> None:
    """Take the kernel that model.flash_attention names, in this process. Raises ConfigError for one that is not installed."""
    global _takes_torchs
    _takes_torchs = name != "auto"
    if name in ("FA3", "FA4"):
        try:
            torch.nn.attention.activate_flash_attention_impl(name)
        except Exception as error:
            known = ", ".join(torch.nn.attention.list_flash_attention_impls())
            raise ConfigError(
                f"actor_rollout_ref.model.flash_attention={name}: torch cannot activate it ({type(error).__name__}: {error}); "
                f"its registry has {known}; install the kernel's package, or set auto"
            ) from error


@functools.cache
def _has_flash_attention() -> bool:
    """Return whether flash-attn 2 is installed. The one of version 4 is a namespace package of that name, without this function."""
    spec = importlib.util.find_spec("flash_attn")
    return spec is not None and spec.origin is not None


def _flash_attention(
    q: Tensor, k: Tensor, v: Tensor, begin_q: Tensor, begin_k: Tensor, longest: int, scale: float | None, dropout: float
) -> Tensor:
    from flash_attn import flash_attn_varlen_func

    out: Tensor = flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q=begin_q,
        cu_seqlens_k=begin_k,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        dropout_p=dropout,
        softmax_scale=scale,
        # A block's queries are the last of its keys: since version 2.1 the kernel aligns the causal mask so.
        causal=True,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return out


def _torch_attention(
    q: Tensor, k: Tensor, v: Tensor, begin_q: Tensor, begin_k: Tensor, longest: int, scale: float | None, dropout: float
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {}
    if q.shape[1] != k.shape[1]:
        if "enable_gqa" in inspect.signature(varlen_attn).parameters:
            options["enable_gqa"] = True
        else:  # torch 2.11
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    # No window to the right is how this function writes a causal mask; it is FlashAttention 2 inside, which aligns it so.
    out = varlen_attn(q, k, v, begin_q, begin_k, longest, longest, scale=scale, window_size=(-1, 0), **options)
    assert isinstance(out, Tensor)
    return out


def register(*, left_out: bool = False) -> None:
    """Register `attn_implementation=ATTENTION_NAME` with transformers; `left_out` of what is compiled around it.

    Its way depends on the sequences, so that a compiled layer is compiled before and behind it.
    """
    from transformers import AttentionInterface

    # The decorator loads torch's compiler: only where something is compiled.
    AttentionInterface.register(ATTENTION_NAME, torch.compiler.disable(packed_attention) if left_out else packed_attention)
