"""How much memory each role will need: estimates from the model's config.json and weight files, nothing is loaded."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_rl.config.derived import (
    Machine,
    MicroBatchRule,
    critic_has_own_model,
    critic_rule,
    has_reward_model,
    logprob_rule,
    max_model_len,
    num_reward_model_ranks,
    update_rule,
)
from grpo_rl.config.schema.tree import Config
from grpo_rl.models.builtin import MODEL_TYPE, PREFIX, get_builtin

GIB = 2**30
_TRAINING_BYTES = 16
"""Per parameter: float32 weight, gradient, and AdamW's two moments."""
_WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The sizes of a decoder that memory depends on."""

    architecture: str
    hidden: int
    layers: int
    intermediate: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    num_params: int

    def kv_bytes_per_token(self, width: int) -> int:
        """Keys and values of one token in all layers, `width` bytes per number."""
        return 2 * self.layers * self.kv_heads * self.head_dim * width


@dataclass(frozen=True, slots=True)
class RoleMemory:
    """One role's need on one device (or in one process on a CPU), in bytes."""

    role: str
    num_bytes: int
    parts: str
    """What it consists of."""


def model_size(path: str) -> ModelSize | None:
    """Sizes of the model at `path`; None where they cannot be told without loading it (hub names, other families)."""
    if path.startswith(PREFIX):
        builtin = get_builtin(path)
        return _from_config({name: getattr(builtin, name) for name in builtin.__slots__} | _BUILTIN_FAMILY, None)
    folder = Path(path).expanduser()
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return None
    return _from_config(config.get("text_config", config), stored_params(folder))


_BUILTIN_FAMILY = {"model_type": MODEL_TYPE, "tie_word_embeddings": True}


def stored_params(folder: Path) -> int | None:
    """Numbers in the folder's safetensors files, read from their headers; None where there are none or they are broken."""
    total = 0
    for file in folder.glob("*.safetensors"):
        try:
            with file.open("rb") as stream:
                (length,) = struct.unpack("<Q", stream.read(8))
                header = json.loads(stream.read(min(length, file.stat().st_size)))
            total += sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
        except (OSError, ValueError, KeyError, TypeError, struct.error):
            return None
    return total or None


def _from_config(config: dict[str, Any], num_params: int | None) -> ModelSize | None:
    try:
        hidden, layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
        heads, intermediate = int(config["num_attention_heads"]), int(config["intermediate_size"])
        vocab = int(config["vocab_size"])
    except (KeyError, TypeError, ValueError):
        return None
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or hidden // heads)
    size = ModelSize(
        architecture=str(config.get("model_type", "?")),
        hidden=hidden,
        layers=layers,
        intermediate=intermediate,
        vocab=vocab,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        num_params=num_params or 0,
    )
    return size if num_params else _with_counted_params(size, config)


def _with_counted_params(size: ModelSize, config: dict[str, Any]) -> ModelSize | None:
    """Parameters of a Llama-like decoder (Llama, Mistral, Qwen2, Qwen3): attention, gated MLP, norms, embeddings."""
    if size.architecture not in ("llama", "mistral", "qwen2", "qwen3"):
        return None
    queries, keys = size.heads * size.head_dim, size.kv_heads * size.head_dim
    attention = size.hidden * (queries + 2 * keys) + queries * size.hidden
    if config.get("attention_bias", size.architecture == "qwen2"):
        attention += queries + 2 * keys
    if size.architecture == "qwen3":
        attention += 2 * size.head_dim
    layer = attention + 3 * size.hidden * size.intermediate + 2 * size.hidden
    embeddings = size.vocab * size.hidden * (1 if config.get("tie_word_embeddings") else 2)
    fields = {name: getattr(size, name) for name in size.__slots__}
    return ModelSize(**fields | {"num_params": size.layers * layer + embeddings + size.hidden})


def memory_by_role(
    config: Config, machine: Machine, size: ModelSize, *, with_reference: bool, with_critic: bool = False
) -> list[RoleMemory]:
    """What actor, reference, critic and engines will need, each per device."""
    model = config.actor_rollout_ref.model
    ranks = machine.world_size(config)
    roles = []
    head = model.lm_head_chunk_tokens * size.vocab * 4 * 3
    actor_width = _width(config.actor_rollout_ref.actor.fsdp_config.dtype, machine)
    activations = _activations(config, size, update_rule(config), actor_width, model.enable_gradient_checkpointing) + head
    state = size.num_params * _TRAINING_BYTES // ranks
    parts = f"weights, gradients, AdamW {gib(state)} + activations {gib(activations)}"
    roles.append(RoleMemory("actor", state + activations, parts))
    if with_reference:
        weights = size.num_params * 4 // ranks
        # Without a backward pass only the layer that is being computed holds activations.
        passing = _layer_activations(size, _tokens(config, logprob_rule(config, "ref")), actor_width) + head
        roles.append(RoleMemory("reference", weights + passing, f"weights {gib(weights)} + activations {gib(passing)}"))
    if with_critic:
        roles.append(_critic(config, machine, size))
    if has_reward_model(config):
        roles += _reward_model(config, machine)
    roles.append(_engine(config, machine, size))
    return roles


def _critic(config: Config, machine: Machine, size: ModelSize) -> RoleMemory:
    """As the actor without the LM head's logits, when the critic is a copy of its model."""
    size = size if not critic_has_own_model(config) else model_size(config.critic.model.path) or size
    width = _width(config.critic.fsdp.dtype, machine)
    checkpointing = config.critic.model.enable_gradient_checkpointing
    activations = _activations(config, size, critic_rule(config), width, checkpointing)
    state = size.num_params * _TRAINING_BYTES // machine.world_size(config)
    return RoleMemory("critic", state + activations, f"weights, gradients, AdamW {gib(state)} + activations {gib(activations)}")


def _reward_model(config: Config, machine: Machine) -> list[RoleMemory]:
    """Of the scoring model, which has sizes of its own and no backward pass; none where its folder does not tell them."""
    own = config.reward.reward_model
    size = model_size(own.model_path or "")
    if size is None:
        return []
    weights = size.num_params * 4 // num_reward_model_ranks(config, machine)
    passing = _layer_activations(size, own.max_token_len_per_gpu, _width(own.dtype, machine))
    parts = f"weights {gib(weights)}{' while it scores' if own.param_offload else ''} + activations {gib(passing)}"
    return [RoleMemory("reward model", weights + passing, parts)]


def _engine(config: Config, machine: Machine, size: ModelSize) -> RoleMemory:
    rollout = config.actor_rollout_ref.rollout
    width = _width(rollout.dtype, machine)
    weights = size.num_params * width // rollout.tensor_model_parallel_size
    per_token = size.kv_bytes_per_token(width)
    if machine.device == "cuda":
        share = f"{rollout.gpu_memory_utilization:.0%} of the GPU, of it"
        return RoleMemory("rollout", weights, f"{share} weights {gib(weights)}; cache {per_token / 1024:.3g} KiB per token")
    cache = int(min(rollout.kv_cache_gib * GIB, rollout.max_num_seqs * max_model_len(config) * per_token))
    return RoleMemory("rollout", weights + cache, f"weights {gib(weights)} + cache {gib(cache)}")


def _activations(config: Config, size: ModelSize, rule: MicroBatchRule, width: int, checkpointing: bool) -> int:
    tokens = _tokens(config, rule)
    one_layer = _layer_activations(size, tokens, width)
    kept = size.layers * tokens * size.hidden * width
    return kept + one_layer if checkpointing else size.layers * one_layer


def _layer_activations(size: ModelSize, tokens: int, width: int) -> int:
    """What one decoder layer keeps for its backward pass: about 8 hidden-sized tensors, attention's, and the MLP's four."""
    attention = (2 * size.heads + 2 * size.kv_heads) * size.head_dim
    return tokens * width * (8 * size.hidden + attention + 4 * size.intermediate)


def _tokens(config: Config, rule: MicroBatchRule) -> int:
    """Most tokens in one micro-batch of one rank, and never more than the rank's share of a mini-batch could be."""
    longest = config.data.max_prompt_length + config.data.max_response_length
    rollouts = config.actor_rollout_ref.actor.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n
    limit = rule.max_tokens if rule.max_tokens is not None else (rule.max_rollouts or 1) * longest
    return min(limit, rollouts * longest)


def _width(dtype: str, machine: Machine) -> int:
    return _WIDTHS.get(dtype, 2 if machine.device == "cuda" else 4)


def gib(num_bytes: int) -> str:
    """A size for people: `0.3 GiB`, `12 MiB`."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:.0f} MiB"
