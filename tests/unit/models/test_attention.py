"""Packed attention against plain causal attention of one sequence at a time."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.attention import varlen

from grpo_rl.errors import ConfigError
from grpo_rl.models import attention
from grpo_rl.models.attention import packed_attention, repeated_heads
from grpo_rl.models.packing import GatheredKeys, Packing

lengths = st.lists(st.integers(1, 40), min_size=1, max_size=12)


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """[S, heads, head_dim] of one sequence, written out; keys and values are repeated for grouped queries."""
    repeat = query.shape[0] // key.shape[0]
    key, value = key.repeat_interleave(repeat, 0), value.repeat_interleave(repeat, 0)
    scores = query @ key.transpose(1, 2) * scale
    future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    return (scores.masked_fill(future, -math.inf).softmax(-1) @ value).transpose(0, 1)


def run(query: Tensor, key: Tensor, value: Tensor, packing: Packing, **options: float) -> Tensor:
    out, weights = packed_attention(nn.Identity(), query[None], key[None], value[None], None, packing=packing, **options)
    assert weights is None
    return out[0]


@settings(max_examples=40, deadline=None)
@given(lengths, st.sampled_from([(4, 4), (4, 2), (4, 1)]))
def test_every_sequence_is_attended_to_as_if_it_were_alone(lengths_N, heads):
    generator = torch.Generator().manual_seed(sum(lengths_N))
    total = sum(lengths_N)
    query = torch.randn(heads[0], total, 8, generator=generator, dtype=torch.float64)
    key = torch.randn(heads[1], total, 8, generator=generator, dtype=torch.float64)
    value = torch.randn(heads[1], total, 8, generator=generator, dtype=torch.float64)
    out = run(query, key, value, Packing.of(torch.tensor(lengths_N)), scaling=0.3)
    pieces = zip(query.split(lengths_N, 1), key.split(lengths_N, 1), value.split(lengths_N, 1), strict=True)
    expected = torch.cat([causal_attention(q, k, v, 0.3) for q, k, v in pieces])
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=0)


def test_a_sliding_window_is_accepted_only_while_it_changes_nothing():
    query = torch.randn(2, 6, 4)
    packing = Packing.of(torch.tensor([2, 4]))
    assert torch.equal(run(query, query, query, packing, sliding_window=4), run(query, query, query, packing))
    with pytest.raises(ValueError, match="4 tokens under a sliding window of 3"):
        run(query, query, query, packing, sliding_window=3)


@pytest.mark.parametrize(("name", "value", "said"), [("softcap", 50.0, "soft-capping"), ("s_aux", torch.zeros(2), "sinks")])
def test_terms_of_attention_that_the_kernels_lack_are_refused(name, value, said):
    query = torch.randn(2, 6, 4)
    with pytest.raises(ValueError, match=said):
        run(query, query, query, Packing.of(torch.tensor([6])), **{name: value})


# ---- variable-length kernels, of which this machine can run none ------------------------------------------


def described(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    """torch.nn.attention.varlen.varlen_attn as its documentation describes it, block by block on a CPU."""
    assert window_size == (-1, 0) and cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert enable_gqa == (query.shape[1] != key.shape[1]), "shared heads have to be announced"
    repeat = query.shape[1] // key.shape[1]
    blocks = []
    for (q0, q1), (k0, k1) in zip(itertools.pairwise(cu_seq_q), itertools.pairwise(cu_seq_k), strict=True):
        assert q1 - q0 <= max_q and k1 - k0 <= max_k
        q = query[q0:q1].transpose(0, 1).double()
        k, v = (x[k0:k1].repeat_interleave(repeat, 1).transpose(0, 1).double() for x in (key, value))
        # The last query is the last key: FlashAttention aligns a causal mask at the lower right since its version 2.1.
        seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        scores = (q @ k.transpose(1, 2) * (scale or q.shape[-1] ** -0.5)).masked_fill(~seen, -math.inf)
        blocks.append((scores.softmax(-1) @ v).transpose(0, 1).to(query.dtype))
    return torch.cat(blocks)


def test_the_arguments_of_torchs_kernel_are_those_of_the_installed_torch() -> None:
    """The stand-in takes what the real function takes, so that a call of it is a call of the real one."""
    parameters = inspect.signature(varlen.varlen_attn).parameters
    for name, parameter in inspect.signature(described).parameters.items():
        assert (parameters[name].kind, parameters[name].default) == (parameter.kind, parameter.default), name


def without_shared_heads(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
    """What torch 2.11 has: heads that share keys are not known there."""
    return described(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, window_size=window_size)


def of_flash_attn(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *, softmax_scale, causal, deterministic):
    """The arguments of flash-attn 2 that are used, by the names that its documentation gives them."""
    assert causal and not deterministic
    ends = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return described(q, k, v, *ends, scale=softmax_scale, window_size=(-1, 0), enable_gqa=q.shape[1] != k.shape[1])


@pytest.mark.parametrize("kernel", [described, without_shared_heads, of_flash_attn])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("shared", [False, True])
def test_blocks_that_a_kernel_takes_as_they_lie_have_the_values_of_the_cpu_path(monkeypatch, kv_heads, shared, kernel) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    monkeypatch.setattr(attention, "_has_flash_attn", lambda: kernel is of_flash_attn)
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_varlen_func=kernel))
    torch.manual_seed(kv_heads)
    block_lengths = torch.tensor([5, 3, 2, 7, 1, 4])
    # The second and third continue the first, the last two the fourth.
    continues = torch.tensor([-1, 0, 0, -1, 3, 3]) if shared else None
    size = int(block_lengths.sum())
    query, key, value = torch.randn(4, size, 8), torch.randn(kv_heads, size, 8), torch.randn(kv_heads, size, 8)
    expected = run(query, key, value, Packing.of(block_lengths, "cpu", continues), scaling=0.3)
    # As on a GPU: keys of each block are copied together, and the kernel is there.
    packing = Packing.of(block_lengths, "cpu", continues)
    keys = None if continues is None else GatheredKeys.of(block_lengths, continues, "cpu")
    monkeypatch.setattr(attention, "takes_blocks_as_they_lie", lambda query, dropout: True)
    packing = dataclasses.replace(packing, keys=keys)
    out = run(query, key, value, packing, scaling=0.3)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=0)
    assert "rectangles" not in vars(packing), "this kernel reads no rectangles"


def on_a_gpu(dtype: torch.dtype, width: int = 8) -> Any:
    return SimpleNamespace(is_cuda=True, dtype=dtype, shape=(1, 4, 6, width))


def test_half_precision_on_a_gpu_has_a_kernel() -> None:
    assert attention.takes_blocks_as_they_lie(on_a_gpu(torch.bfloat16), 0.0)
    assert not attention.takes_blocks_as_they_lie(on_a_gpu(torch.bfloat16), 0.1), "it has no dropout"
    assert not attention.takes_blocks_as_they_lie(on_a_gpu(torch.float32), 0.0)
    assert not attention.takes_blocks_as_they_lie(torch.zeros(1, 8, dtype=torch.bfloat16), 0.0), "a CPU has none"


@pytest.mark.parametrize(("width", "taken"), [(8, True), (12, False), (20, False), (96, True), (256, True), (264, False)])
def test_a_head_size_that_the_kernels_of_variable_length_refuse_takes_sdpa(width: int, taken: bool) -> None:
    assert attention.takes_blocks_as_they_lie(on_a_gpu(torch.bfloat16, width), 0.0) == taken


def test_sdpa_on_a_gpu_gets_heads_of_its_own_for_the_kernel_that_keeps_no_matrix() -> None:
    key = torch.randn(1, 2, 6, 8)
    for dtype in (torch.float32, torch.bfloat16):
        repeated, _ = repeated_heads(on_a_gpu(dtype), key, key)
        assert repeated.shape == (1, 4, 6, 8)
        assert torch.equal(repeated[:, 1], key[:, 0]) and torch.equal(repeated[:, 2], key[:, 1])
    assert repeated_heads(torch.zeros(1, 4, 6, 8), key, key)[0] is key, "a CPU's kernel takes shared ones"


def test_a_named_kernel_is_activated_and_one_that_is_missing_refused(monkeypatch) -> None:
    monkeypatch.setattr(attention, "_flash_attn_is_wanted", True)
    activated: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.attention, "activate_flash_attention_impl", activated.append)
        for name in ("auto", "torch", "FA3"):
            attention.choose_kernel(name)
            assert attention._flash_attn_is_wanted == (name == "auto")
    assert activated == ["FA3"]
    with pytest.raises(ConfigError, match=r"flash_attention=FA4: torch cannot activate it .* its registry has FA3, FA4"):
        attention.choose_kernel("FA4")
