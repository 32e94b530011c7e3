"""Causal language models from Hugging Face folders, ready for packed sequences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from grpo_rl.errors import ConfigError
from grpo_rl.models import attention


def load_config(path: str, *, trust_remote_code: bool = False, override: dict[str, Any] | None = None) -> Any:
    """The model's transformers config with `override` applied.

    Raises ConfigError for an unreadable folder, code that was not allowed, unknown override names, and
    features whose log-probs would be wrong here.
    """
    from transformers import AutoConfig

    config_file = Path(path) / "config.json"
    if config_file.is_file() and not trust_remote_code and "auto_map" in json.loads(config_file.read_text()):
        raise ConfigError(
            f"actor_rollout_ref.model.path={path}: its config.json names Python code of its own (auto_map); "
            "set actor_rollout_ref.model.trust_remote_code=true if you want that code to run"
        )
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"actor_rollout_ref.model.path={path}: no model configuration there: {error}") from error
    for key, value in (override or {}).items():
        if not hasattr(config, key):
            raise ConfigError(f"actor_rollout_ref.model.override_config.{key}: {type(config).__name__} has no such field")
        setattr(config, key, value)
    for key in ("final_logit_softcapping", "attn_logit_softcapping", "logit_scale", "logits_scaling"):
        if getattr(config, key, None) not in (None, 1.0, 1):
            raise ConfigError(f"actor_rollout_ref.model.path={path}: models with {key} are not supported yet")
    return config


def load_lm(path: str, config: Any, *, trust_remote_code: bool = False, on_meta: bool = False) -> Any:
    """An AutoModelForCausalLM with float32 weights and packed attention.

    `on_meta` gives the same module without storage, for ranks that receive their shards from rank 0.
    """
    from transformers import AutoModelForCausalLM

    attention.register()
    if on_meta:
        config._attn_implementation = attention.ATTENTION_NAME
        with torch.device("meta"):
            lm = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code, dtype=torch.float32)
    else:
        lm = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            trust_remote_code=trust_remote_code,
            dtype=torch.float32,
            attn_implementation=attention.ATTENTION_NAME,
        )
    if not getattr(lm, "_supports_attention_backend", True):
        raise ConfigError(f"{type(lm).__name__} does not let its attention be exchanged, which packed sequences need")
    return lm


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> Any:
    """The AutoTokenizer of a model folder."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"no tokenizer in {path}: {error}") from error


def decoder_layers(lm: Any) -> list[nn.Module]:
    """The transformer blocks, the units that FSDP shards and that are recomputed."""
    layers = getattr(lm.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ConfigError(f"{type(lm).__name__} has no list of decoder layers that could be sharded")
    return list(layers)
