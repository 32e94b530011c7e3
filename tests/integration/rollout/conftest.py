"""Tiny random Qwen3 models, and what transformers says about them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

EOS = 1
VOCAB = 64


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Path]:
    """Folder of a random Qwen3 with 2 layers, its head tied to the embedding or not."""
    made: dict[bool, Path] = {}

    def make(tied: bool) -> Path:
        if tied not in made:
            torch.manual_seed(3)
            config = Qwen3Config(
                hidden_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=32,
                intermediate_size=96,
                vocab_size=VOCAB,
                max_position_embeddings=512,
                tie_word_embeddings=tied,
                # Large weights: the distributions are far from uniform, so wrong ones are seen.
                initializer_range=0.15,
                eos_token_id=EOS,
                pad_token_id=0,
                bos_token_id=None,
            )
            made[tied] = tmp_path_factory.mktemp("model")
            Qwen3ForCausalLM(config).save_pretrained(made[tied])
        return made[tied]

    return make


@torch.no_grad()
def response_logits(model: Qwen3ForCausalLM, prompt_ids: tuple[int, ...], response_ids: tuple[int, ...]) -> Tensor:
    """Logits [tokens, V] that a plain forward pass gives for each response token."""
    ids = torch.tensor([[*prompt_ids, *response_ids]])
    logits: Tensor = model(ids).logits[0].float()
    return logits[len(prompt_ids) - 1 : -1]
