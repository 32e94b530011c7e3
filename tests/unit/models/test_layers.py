"""What is done to decoder layers beside sharding: inputs in host memory, compilation, and heads over ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from machine_lacks import needs_compiler
from tiny_models import VOCAB, make_folder
from torch import Tensor

from grpo_rl.models import load
from grpo_rl.models.forward import PolicyModel
from grpo_rl.models.packing import Sequences
from grpo_rl.models.sequence_parallel import SequenceGroup, repeats

LENGTHS = torch.tensor([17, 5, 9])


def sequences(lengths_N: Tensor = LENGTHS) -> Sequences:
    """Sequences whose tokens are all trained, but for the first ones."""
    generator = torch.Generator().manual_seed(int(lengths_N.sum()))
    ids_S = torch.randint(1, VOCAB, (int(lengths_N.sum()),), generator=generator)
    starts = (lengths_N.cumsum(0) - lengths_N).tolist()
    positions = [torch.arange(start + 1, start + length) for start, length in zip(starts, lengths_N.tolist(), strict=True)]
    return Sequences.of(ids_S, lengths_N, torch.cat(positions), lengths_N - 1, torch.device("cpu"))


def passes(path: Path, prepare: Callable[[Any], None]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return log-probs and gradients."""
    lm = load.load_lm(str(path), load.load_config(str(path)))
    prepare(lm)
    policy = PolicyModel(lm)
    policy.train()
    logprobs_T = policy(sequences()).logprobs_T
    logprobs_T.square().sum().backward()
    return logprobs_T.detach(), {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}


def test_inputs_of_recomputed_layers_that_torch_keeps_in_host_memory_give_the_same_bits(tmp_path: Path) -> None:
    path = make_folder(tmp_path, "qwen3", tied=True)
    kept = passes(path, load.recompute_layers)
    moved = passes(path, lambda lm: load.recompute_layers(lm, inputs_in_host_memory=True))
    assert torch.equal(kept[0], moved[0])
    assert kept[1].keys() == moved[1].keys()
    for name, gradient in kept[1].items():
        assert torch.equal(moved[1][name], gradient), name


@pytest.mark.campaign
@needs_compiler
def test_compiled_layers_give_the_same_values_and_gradients(tmp_path: Path) -> None:
    path = make_folder(tmp_path, "qwen3", tied=True)
    torch._dynamo.utils.counters.clear()
    eager = passes(path, load.recompute_layers)
    assert not torch._dynamo.utils.counters["frames"]["ok"]

    def prepare(lm: Any) -> None:
        load.recompute_layers(lm)
        load.compile_layers(lm)

    compiled = passes(path, prepare)
    assert torch._dynamo.utils.counters["frames"]["ok"], "nothing was compiled"
    torch.testing.assert_close(compiled[0], eager[0], atol=1e-5, rtol=0)
    for name, gradient in eager[1].items():
        torch.testing.assert_close(
            compiled[1][name], gradient, atol=1e-5 * float(gradient.abs().max()) + 1e-7, rtol=0, msg=name
        )


# ---- sequence parallelism: the arithmetic of slices and heads --------------------------------------------------------


@given(st.integers(1, 8), st.integers(1, 8), st.sampled_from([1, 2, 3, 4, 6, 8]))
def test_every_rank_gets_the_key_heads_that_its_query_heads_read(key_heads: int, share: int, size: int) -> None:
    heads = key_heads * share
    if heads % size:
        return
    times = repeats(key_heads, size)
    spread = [head for head in range(key_heads) for _ in range(times)]
    assert len(spread) % size == 0 and heads % len(spread) == 0
    for rank in range(size):
        own_keys = spread[rank * len(spread) // size : (rank + 1) * len(spread) // size]
        for place in range(heads // size):
            query = rank * heads // size + place
            assert own_keys[place // (heads // len(spread))] == query // share


@pytest.mark.parametrize("size", [2, 3, 4])
def test_each_trained_token_belongs_to_the_rank_that_has_the_token_before_it(size: int) -> None:
    whole = sequences()
    owners = torch.zeros(len(whole.predict_T), dtype=torch.long)
    for rank in range(size):
        part = whole.sliced(SequenceGroup(None, rank, size))
        assert part.slice is not None and part.slice.own_T is not None
        owners[part.slice.own_T] += 1
        assert torch.equal(part.target_T, whole.target_T[part.slice.own_T])
        assert torch.equal(part.predict_T + part.slice.begin, whole.predict_T[part.slice.own_T])
        # The state that is read is the one at the token before, also if that is the last of the slice.
        assert torch.equal(part.token_ids_S[part.predict_T], whole.token_ids_S[whole.predict_T[part.slice.own_T]])
    assert torch.equal(owners, torch.ones_like(owners))
