"""Tiny random Qwen3 and Llama folders, random ragged sequences, and what plain transformers says about them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from grpo_rl.models.forward import PolicyModel, Sequences
from grpo_rl.models.load import load_config, load_lm
from grpo_rl.types import Batch
from grpo_rl.workers.sharded_policy import sequences_of

VOCAB = 37
FAMILIES = {"qwen3": (Qwen3Config, Qwen3ForCausalLM), "llama": (LlamaConfig, LlamaForCausalLM)}


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
    config = config_class(**{**sizes, **settings}, tie_word_embeddings=tied, bos_token_id=None, eos_token_id=1)
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
