"""What an engine must know about a model folder: its tensors, its stop tokens, its size in the cache."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PretrainedConfig

from grpo_rl.rollout.engine import EngineSpec


def load_config(spec: EngineSpec) -> PretrainedConfig:
    """The Hugging Face config of the model with the overrides applied."""
    config = AutoConfig.from_pretrained(spec.model_path, trust_remote_code=spec.trust_remote_code, **spec.override_config)
    assert isinstance(config, PretrainedConfig)
    return config


def expected_tensors(spec: EngineSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a full update: the model's state dict, the tied head's alias included.

    The alias is asked for on purpose: an engine that keeps a packed copy of the head leaves it old when
    only the embedding arrives.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(load_config(spec), trust_remote_code=spec.trust_remote_code)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def stop_token_ids(spec: EngineSpec) -> tuple[int, ...]:
    """The tokens that end a response: those of generation_config.json and the tokenizer's end of sequence."""
    found: set[int] = set()
    for source in (_generation_config(spec), load_config(spec)):
        found.update(_as_ids(getattr(source, "eos_token_id", None)))
    found.update(_as_ids(_tokenizer_eos(spec)))
    return tuple(sorted(found))


def kv_bytes_per_token(config: PretrainedConfig, dtype: str) -> int:
    """Bytes of keys and values that one token takes in all layers of a decoder with full attention."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * text.num_hidden_layers * heads * head_dim * getattr(torch, dtype).itemsize


def _generation_config(spec: EngineSpec) -> GenerationConfig | None:
    try:
        return GenerationConfig.from_pretrained(spec.model_path)
    except OSError:
        return None  # the file is optional in a model folder


def _tokenizer_eos(spec: EngineSpec) -> int | None:
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            spec.tokenizer_path or spec.model_path, trust_remote_code=spec.trust_remote_code
        )
    except (OSError, ValueError):
        if spec.tokenizer_path is not None:
            raise
        return None  # token ids go in and out: a folder without a tokenizer is enough
    return tokenizer.eos_token_id


def _as_ids(value: Any) -> list[int]:
    if value is None:
        return []
    return [int(token) for token in value] if isinstance(value, list | tuple) else [int(value)]
