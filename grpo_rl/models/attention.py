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
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.attention
import torch.nn.functional as F
from torch import Tensor, nn

from grpo_rl.errors import ConfigError
from grpo_rl.models.prefix_attention import (
    Family,
    GatheredKeys,
    families_of,
    masked_attention,
    repeated_heads,
    split_attention,
)
from grpo_rl.models.sequence_parallel import Slice

ATTENTION_NAME = "grpo_rl_packed"
# A sequence joins a padded group while this share of the group's length is its own.
MIN_FILL = 0.8


@dataclass(frozen=True, slots=True)
class PaddedGroup:
    """Sequences of similar length, as rows of one rectangle."""

    index_BL: Tensor
    """Flat position of each cell; padding cells repeat the row's last token and are never read back."""


@dataclass(frozen=True, slots=True)
class Rectangles:
    """Blocks as padded rectangles, for kernels that take no variable lengths."""

    groups: tuple[PaddedGroup, ...]
    restore_S: Tensor
    """The row of each flat position in the groups' outputs laid end to end."""

    @staticmethod
    def of(lengths_N: Tensor, device: torch.device | str) -> Rectangles:
        """Return the rectangles of blocks with these lengths, laid back to back."""
        lengths, starts_N = lengths_N.tolist(), lengths_N.cumsum(0) - lengths_N
        order = torch.argsort(lengths_N, descending=True, stable=True)
        groups: list[PaddedGroup] = []
        restore_S = torch.empty(sum(lengths), dtype=torch.long)
        offset = first = 0
        while first < len(lengths):
            longest = lengths[order[first]]
            last = first
            while last < len(lengths) and lengths[order[last]] >= MIN_FILL * longest:
                last += 1
            rows_B = order[first:last]
            column_L = torch.arange(longest)
            lengths_B = lengths_N[rows_B]
            index_BL = starts_N[rows_B, None] + torch.minimum(column_L[None], lengths_B[:, None] - 1)
            real_BL = column_L[None] < lengths_B[:, None]
            cell_BL = offset + torch.arange(index_BL.numel()).view_as(index_BL)
            restore_S[index_BL[real_BL]] = cell_BL[real_BL]
            groups.append(PaddedGroup(index_BL.to(device)))
            offset += index_BL.numel()
            first = last
        return Rectangles(tuple(groups), restore_S.to(device))


@dataclass(frozen=True)
class Packing:
    """The places where the blocks of a flat axis begin and end, and their layout for attention."""

    position_ids_S: Tensor
    cumulative_lengths: Tensor
    """int32 [num_blocks + 1], the form that variable-length kernels take."""
    max_length: int
    """The length of the longest sequence, the prompt that it continues included."""
    lengths_N: Tensor
    """The blocks' lengths, on the CPU."""
    uniform: bool
    """True where all blocks are equally long: the rectangle is a plain view."""
    families: tuple[Family, ...] = ()
    """The prompts that several blocks continue."""
    keys: GatheredKeys | None = None
    """The keys of each block, where there are families and attention runs over copies of them: not on CPUs."""

    @staticmethod
    def of(lengths_N: Tensor, device: torch.device | str = "cpu", continues_N: Tensor | None = None) -> Packing:
        """Return the packing of blocks with these lengths (each at least 1) laid back to back.

        `continues_N` is the index of the block that each one continues, -1 for one that begins a sequence; blocks that
        continue the same one follow it directly.
        """
        lengths = lengths_N.tolist()
        if not lengths or min(lengths) < 1:
            raise ValueError(f"every sequence needs at least one token, got lengths {lengths}")
        starts_N = lengths_N.cumsum(0) - lengths_N
        total = int(lengths_N.sum())
        prefix_N = torch.zeros_like(lengths_N)
        if continues_N is not None:
            prefix_N = torch.where(continues_N < 0, 0, lengths_N[continues_N])
        families = () if continues_N is None else families_of(starts_N, lengths_N, continues_N)
        position_ids_S = torch.arange(total) - torch.repeat_interleave(starts_N - prefix_N, lengths_N)
        cumulative = torch.cat([starts_N, torch.tensor([total])]).to(torch.int32)
        return Packing(
            position_ids_S=position_ids_S.to(device),
            cumulative_lengths=cumulative.to(device),
            max_length=int((prefix_N + lengths_N).max()),
            lengths_N=lengths_N,
            uniform=min(lengths) == max(lengths),
            families=families,
            keys=GatheredKeys.of(starts_N, lengths_N, continues_N, device)
            if continues_N is not None and families and torch.device(device).type != "cpu"
            else None,
        )

    @functools.cached_property
    def rectangles(self) -> Rectangles:
        """The blocks as rectangles; made when a kernel first reads them, which those of variable length never do."""
        return Rectangles.of(self.lengths_N, self.position_ids_S.device)


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
            k if keys is None else keys.gather(k),
            v if keys is None else keys.gather(v),
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
