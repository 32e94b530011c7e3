"""Weights by name: each family's trainer hands its weights to vLLM, which then samples what the trainer computes."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import engine_logprobs, perturb, sampled, send, trainer_logprobs
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    OlmoeConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from grpo_rl.models import fsdp
from grpo_rl.models.experts import stored_tensors
from grpo_rl.models.forward import PolicyModel
from grpo_rl.models.load import load_config, load_lm
from grpo_rl.rollout.engine import EngineSpec, RolloutEngine
from grpo_rl.rollout.engines import ENGINES
from grpo_rl.types import Request, Sampling

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2}
FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "mistral": (MistralConfig, {"sliding_window": None}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"head_dim": 32}),
    "qwen3_moe": (Qwen3MoeConfig, EXPERTS | {"head_dim": 32, "moe_intermediate_size": 32, "norm_topk_prob": True}),
    "olmoe": (OlmoeConfig, EXPERTS | {"intermediate_size": 32}),
    "gemma3": (Gemma3TextConfig, {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 64}),
    "phi3": (Phi3Config, {"sliding_window": None, "pad_token_id": 0}),
}
PROMPTS = [(5, 6, 7), (9, 8, 7, 6, 5, 4, 3, 2), (11,), (20, 21, 22, 23, 24)]


@pytest.fixture(
    scope="module",
    params=[one if one in ("qwen2", "phi3") else pytest.param(one, marks=pytest.mark.campaign) for one in FAMILIES],
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of the family whose distributions are far from uniform; each engine process is left to one test."""
    kind, own = FAMILIES[request.param]
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 96,
        "max_position_embeddings": 128,
        "initializer_range": 0.1,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": None,
    }
    torch.manual_seed(2)
    made = tmp_path_factory.mktemp(request.param)
    AutoModelForCausalLM.from_config(kind(**{**sizes, **own}), dtype=torch.float32).save_pretrained(made)
    return made


# "vllm 2": its weights are split over two processes, each of which receives the whole update.
@pytest.fixture(params=["vllm", "hf", pytest.param("vllm 2", marks=pytest.mark.slow)])
def engine(request: pytest.FixtureRequest, folder: Path) -> Iterator[RolloutEngine]:
    name, _, split = request.param.partition(" ")
    more = {"max_num_seqs": 4, "kv_cache_gib": 0.1, "verify_checksum": True, "tensor_parallel_size": int(split or 1)}
    built = ENGINES.get(name)(EngineSpec(str(folder), max_model_len=64, name=name, **more))
    yield built
    built.close()
    gc.collect()


def test_the_engine_has_the_trainers_weights_after_each_transfer(engine: RolloutEngine, folder: Path) -> None:
    policy = PolicyModel(load_lm(str(folder), load_config(str(folder))))
    requests = [
        Request(str(number), np.array(ids, dtype=np.int32), Sampling(max_tokens=12, seed=number, ignore_eos=True))
        for number, ids in enumerate(PROMPTS)
    ]
    before = sampled(engine, requests)
    old = engine_logprobs(before)
    torch.testing.assert_close(old, trainer_logprobs(policy, requests, before), atol=1e-4, rtol=0)
    for version in (1, 2):
        perturb(policy, version)
        send(engine, stored_tensors(fsdp.named_full_tensors(policy)))
        after = sampled(engine, requests)
        torch.testing.assert_close(engine_logprobs(after), trainer_logprobs(policy, requests, after), atol=1e-4, rtol=0)
        # The old weights would have said something else.
        assert float((trainer_logprobs(policy, requests, before) - old).abs().max()) > 0.1
