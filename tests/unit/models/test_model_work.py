"""The operations that are counted for MFU, against torch's own counter of matrix products and attention written out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import VOCAB, Ragged, make_folder, packed_policy
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from grpo_rl.models import linear
from grpo_rl.models.forward import PolicyModel
from grpo_rl.plan.machine import DEVICES, peak_tflops
from grpo_rl.workers.model_work import ModelWork

TOKENS = Ragged([5, 3, 9], [4, 8, 2])
WIDTH, LAYERS = 4 * 8, 2


def products(counter: FlopCounterMode) -> float:
    """The operations of matrix products, attention's left out."""
    return float(
        sum(count for op, count in counter.get_flop_counts()["Global"].items() if str(op) in ("aten.mm", "aten.addmm"))
    )


def attended(prompts: list[int], responses: list[int]) -> int:
    return sum(length * (length + 1) // 2 for length in map(sum, zip(prompts, responses, strict=True)))


@pytest.mark.parametrize("tied", [True, False])
def test_products_are_those_that_torch_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool) -> None:
    monkeypatch.setattr(linear, "_has_onednn", lambda: False)  # torch counts its own products only
    model = packed_policy(make_folder(tmp_path / "m", "qwen3", tied))
    work, sequences = ModelWork(model), TOKENS.sequences()
    pairs = attended(TOKENS.prompt_lengths, TOKENS.response_lengths)

    with torch.no_grad(), FlopCounterMode(display=False) as forward:
        model(sequences)
    assert work.take() == products(forward) + 4 * WIDTH * LAYERS * pairs
    with FlopCounterMode(display=False) as both:
        model(sequences).logprobs_T.sum().backward()
    # The embedding's rows have a gradient, so that the first layer sends one back as all others do.
    assert work.take() == products(both) + 12 * WIDTH * LAYERS * pairs
    assert work.take() == 0


def test_of_experts_those_count_that_a_token_goes_to() -> None:
    config = Qwen3MoeConfig(
        hidden_size=16, intermediate_size=32, moe_intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, vocab_size=VOCAB, num_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    model = PolicyModel(Qwen3MoeForCausalLM(config))
    work = ModelWork(model)
    sequences = TOKENS.sequences()
    for before_a_pass in model._forward_pre_hooks.values():
        before_a_pass(model, (sequences,))
    attention = 16 * 16 * 2 + 2 * 16 * 8  # q, o; k, v
    per_token = attention + 16 * 8 + 2 * 3 * 16 * 8  # the router, two experts of three matrices
    pairs = attended(TOKENS.prompt_lengths, TOKENS.response_lengths)
    expected = 6 * (31 * per_token + 14 * 16 * VOCAB) + 12 * 16 * pairs
    assert work.take() == expected


def test_the_peak_of_a_gpu_is_found_by_what_torch_calls_it() -> None:
    for name, kind in {
        "NVIDIA H100 80GB HBM3": "H100-80GB",
        "NVIDIA H100 PCIe": "H100PCIE-80GB",
        "NVIDIA H100 NVL": "H100NVL-94GB",
        "NVIDIA A100-SXM4-40GB": "A100-40GB",
        "NVIDIA GeForce RTX 4090": "RTX4090-24GB",
        "NVIDIA RTX A6000": "A6000-48GB",
        "NVIDIA A10": "A10-24GB",
        "NVIDIA L4": "L4-24GB",
    }.items():
        assert peak_tflops(name) == DEVICES[kind].tflops, name
    assert peak_tflops("Tesla T4") is peak_tflops("NVIDIA L40") is None, "without bfloat16, and not listed"
