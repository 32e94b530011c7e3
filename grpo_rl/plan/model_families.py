"""Families of models: which can be trained here, and why others cannot.

The trainer runs the layers of transformers on one flat axis of tokens, on which only attention separates one sequence from
the next (`models/attention.py`). A model that mixes tokens in another way would mix sequences, and one whose attention has
terms that the kernels here lack would have other log-probs, both without an error. What is refused is found in config.json.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from grpo_rl.config.derived import longest_sequence
from grpo_rl.config.schema.tree import Config
from grpo_rl.models.load import SCALED_LOGITS
from grpo_rl.models.moe.expert_names import FAMILIES

_PATH = "actor_rollout_ref.model.path"
_ACTOR = "actor_rollout_ref.actor"
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names under which config.json has the number of experts of a layer."""
_ATTENTION_LAYERS = ("full_attention", "sliding_attention")
_MIXERS = ("mamba", "rwkv", "recurrent", "jamba", "bamba", "zamba", "xlstm", "lfm2", "falcon_h1", "nemotron_h", "minimax")
"""Parts of the names of families that carry a state from token to token beside attention, or in its place."""
_SINKS = ("gpt_oss",)
_OWN_POSITIONS = ("gpt2", "gptj", "opt", "bloom", "mpt", "codegen", "gpt_bigcode", "gpt_neo", "xglm")
"""Families whose layers have no list `layers`, or whose positions are a bias of attention (ALiBi)."""


def num_experts(settings: dict[str, Any]) -> int:
    """Return the number of experts of a layer, 0 for a model without; `settings` is a config.json."""
    text = settings.get("text_config") or settings
    counts = [text.get(name) for name in _EXPERTS]
    return max((count for count in counts if isinstance(count, int)), default=0)


def refusals(config: Config, settings: dict[str, Any]) -> Iterator[str]:
    """Yield what keeps the policy with these settings from being trained, and keys for experts that it lacks."""
    if config.trainer.val_only:
        return
    path = f"{_PATH}={config.actor_rollout_ref.model.path}"
    text = settings.get("text_config") or settings
    family, experts = str(text.get("model_type")), num_experts(settings)
    kinds = sorted({str(kind) for kind in text.get("layer_types") or ()} - set(_ATTENTION_LAYERS))
    if kinds or any(part in family for part in _MIXERS):
        what = f"layers of the kind {', '.join(kinds)}" if kinds else "layers that carry a state from token to token"
        yield f"{path}: {family} has {what}, which would mix the sequences of a packed pass; take a model with attention only"
    elif family in _SINKS:
        yield f"{path}: {family} has attention sinks, which the attention of packed sequences lacks; its log-probs would be wrong"
    elif family in _OWN_POSITIONS or text.get("alibi"):
        yield f"{path}: models of the family {family} cannot be packed here; Llama, Mistral, Qwen, Gemma 3 and Phi 3 can"
    elif experts > 1 and family not in FAMILIES:
        yield f"{path}: of models with experts, {' and '.join(FAMILIES)} can be trained; this one is {family} (docs/moe.md)"
    for name in SCALED_LOGITS:
        if text.get(name) not in (None, 1, 1.0):
            yield f"{path}: models with {name} cannot be trained here, and this one has {name}={text[name]}"
    yield from _window(config, text, path)
    if experts < 2:
        yield from _keys_for_experts(config, path)
    else:
        yield from _keys_without_experts(config, path)


def _window(config: Config, text: dict[str, Any], path: str) -> Iterator[str]:
    """Yield a problem for sequences that are longer than the window of some layers' attention."""
    window = text.get("sliding_window")
    if not isinstance(window, int) or text.get("use_sliding_window") is False or "sliding_attention" not in _layer_types(text):
        return
    longest = longest_sequence(config)
    if longest > window:
        yield (
            f"data.max_prompt_length + data.max_response_length = {longest}: more than the {window} tokens of the sliding window "
            f"of {path}, which the trainer's attention has not; at most {window}"
        )


def _layer_types(text: dict[str, Any]) -> tuple[str, ...]:
    """Return the kinds of the layers: those that are named, or all with a window."""
    named = text.get("layer_types")
    return tuple(named) if named else ("sliding_attention",)


def _keys_without_experts(config: Config, path: str) -> Iterator[str]:
    """Yield a problem for each key that models with experts do not take."""
    parts = config.actor_rollout_ref
    if (size := parts.actor.ulysses_sequence_parallel_size) > 1:
        yield (
            f"{_ACTOR}.ulysses_sequence_parallel_size={size}: {path} has experts, whose tokens are counted and replayed by rank; "
            "set it to 1 and lower ppo_max_token_len_per_gpu"
        )
    if parts.actor.fsdp_config.use_torch_compile:
        yield (
            f"{_ACTOR}.fsdp_config.use_torch_compile=true: {path} has experts, whose layers have other shapes in every pass; "
            "leave it out"
        )


def _keys_for_experts(config: Config, path: str) -> Iterator[str]:
    actor = config.actor_rollout_ref.actor
    given = []
    if actor.router_aux_loss_coef:
        given.append(f"{_ACTOR}.router_aux_loss_coef={actor.router_aux_loss_coef:g}")
    if actor.router_replay.mode != "disabled":
        given.append(f"{_ACTOR}.router_replay.mode={actor.router_replay.mode}")
    for key in given:
        yield f"{key}: is for models with experts, and {path} has none; leave it out"
