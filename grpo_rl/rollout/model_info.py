"""Facts of a model folder that an engine needs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig
from transformers.utils import cached_file

from grpo_rl.models.experts import stored_tensors
from grpo_rl.models.load import GENERATION_FILE, load_tokenizer
from grpo_rl.rollout.engine import EngineSpec


def load_config(spec: EngineSpec) -> PretrainedConfig:
    config = AutoConfig.from_pretrained(spec.model_path, trust_remote_code=spec.trust_remote_code, **spec.override_config)
    assert isinstance(config, PretrainedConfig)
    return config


def expected_tensors(spec: EngineSpec) -> dict[str, tuple[int, ...]]:
    """With a tied head's alias: an engine with a packed copy of the head would leave it old."""
    return {name: tuple(tensor.shape) for name, tensor in stored_tensors(model_on_meta(spec).state_dict().items())}


def model_on_meta(spec: EngineSpec) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(load_config(spec), trust_remote_code=spec.trust_remote_code)


def stop_token_ids(spec: EngineSpec) -> tuple[int, ...]:
    has_generation = has_file(spec.model_path, GENERATION_FILE)
    sources: list[Any] = [GenerationConfig.from_pretrained(spec.model_path)] if has_generation else []
    stop_ids: set[int] = set()
    for source in (*sources, load_config(spec), _tokenizer(spec)):
        ids = getattr(source, "eos_token_id", None)
        stop_ids.update(map(int, ids if isinstance(ids, list | tuple) else () if ids is None else (ids,)))
    return tuple(sorted(stop_ids))


def response_decoder(spec: EngineSpec) -> Callable[[np.ndarray], str]:
    """Empty texts without a tokenizer; a token that it lacks is shown as `<token 151700>`."""
    tokenizer = _tokenizer(spec)
    if tokenizer is None:
        return lambda token_ids: ""
    num_tokens = len(tokenizer)

    def decode(token_ids: np.ndarray) -> str:
        text = ""
        for is_token, group in itertools.groupby(token_ids.tolist(), key=num_tokens.__gt__):
            ids = list(group)
            shown = (
                tokenizer.decode(ids, skip_special_tokens=True) if is_token else "".join(f"<token {number}>" for number in ids)
            )
            text += shown
        return text

    return decode


def kv_bytes_per_token(config: PretrainedConfig, dtype: str) -> int:
    """Of keys and values in all layers of a decoder with full attention."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * text.num_hidden_layers * heads * head_dim * getattr(torch, dtype).itemsize


def has_file(model: str, name: str) -> bool:
    return cached_file(model, name, _raise_exceptions_for_missing_entries=False) is not None


def _tokenizer(spec: EngineSpec) -> Any:
    source = spec.tokenizer_path or spec.model_path
    # Asked first, because transformers makes an empty tokenizer of a folder that has none, with 0 as its end.
    if spec.tokenizer_path is None and not has_file(source, "tokenizer_config.json"):
        return None
    return _load_tokenizer(source, trust_remote_code=spec.trust_remote_code)


_load_tokenizer = lru_cache(maxsize=1)(load_tokenizer)
