"""Tiny random folders of the families that can be trained, random ragged sequences, and what plain transformers says about them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from grpo_rl.models.forward import PolicyModel
from grpo_rl.models.load import load_config, load_lm
from grpo_rl.models.packing import Sequences
from grpo_rl.types import Batch
from grpo_rl.workers.sharded_policy import sequences_of

VOCAB = 37
FAMILIES = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM),
    "phi3": (Phi3Config, Phi3ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "olmoe": (OlmoeConfig, OlmoeForCausalLM),
}
OWN_SIZES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "gemma3": {"query_pre_attn_scalar": 8},
    "phi3": {"pad_token_id": 0},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 16},
}
"""Settings that a family has beside the common ones."""


def make_folder(folder: Path, family: str, tied: bool, seed: int = 3, **settings: Any) -> Path:
    """A random model whose distributions are far from uniform, so that wrong ones are seen."""
    config_class, model_class = FAMILIES[family]
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCAB,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
    }
    torch.manual_seed(seed)
    config = config_class(
        **{**sizes, **OWN_SIZES.get(family, {}), **settings}, tie_word_embeddings=tied, bos_token_id=None, eos_token_id=1
    )
    model_class(config).save_pretrained(folder)
    return folder


def packed_policy(folder: Path, **options: Any) -> PolicyModel:
    """The model as the workers load it."""
    return PolicyModel(load_lm(str(folder), load_config(str(folder))), **options)


def plain_model(folder: Path) -> Any:
    """The model as transformers loads it, with its own attention."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


@dataclass
class Ragged:
    """Random token ids cut into prompts and responses of these lengths."""

    prompt_lengths: list[int]
    response_lengths: list[int]
    seed: int = 0

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        lengths = [p + r for p, r in zip(self.prompt_lengths, self.response_lengths, strict=True)]
        self.ids = [torch.randint(0, VOCAB, (length,), generator=generator) for length in lengths]

    def batch(self) -> Batch:
        """The responses as trained tokens."""
        return Batch(
            prompt_lengths_N=torch.tensor(self.prompt_lengths),
            response_lengths_N=torch.tensor(self.response_lengths),
            group_N=torch.arange(len(self.ids)),
            token_ids_S=torch.cat(self.ids),
            rewards_N=torch.zeros(len(self.ids)),
            rollout_logprobs_T=torch.zeros(sum(self.response_lengths)),
        )

    def sequences(self) -> Sequences:
        """The input of a forward pass over all of them."""
        return sequences_of(self.batch(), torch.device("cpu"), share_prompts=True)

    def plain_logprobs_TV(self, model: Any, temperature: float = 1.0) -> Tensor:
        """Whole distributions of every response token, one sequence after the other, no packing."""
        rows = []
        for ids, prompt, response in zip(self.ids, self.prompt_lengths, self.response_lengths, strict=True):
            logits = model(ids[None]).logits[0, prompt - 1 : prompt - 1 + response]
            rows.append((logits / temperature).log_softmax(-1))
        return torch.cat(rows)

    def targets_T(self) -> Tensor:
        return torch.cat([ids[prompt:] for ids, prompt in zip(self.ids, self.prompt_lengths, strict=True)])
