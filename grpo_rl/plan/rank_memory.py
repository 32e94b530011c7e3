"""The bytes of tensors that live on a rank's GPU in each region of a pass, from the sizes of the model and of the micro-batch.

Each term was found by tracking the real model code on tensors without storage (`scripts/track_memory.py`), and is held to it by
`tests/unit/test_plan_tracked_memory.py`. What lies outside of tensors (contexts, NCCL, the allocator's slack) is in `gpu_memory.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from grpo_rl.plan.model_folder import ModelSize

GRADIENT = 4
"""Bytes of a gradient in a shard: float32."""


@dataclass(frozen=True, slots=True)
class Load:
    """One micro-batch of one rank, and what lies on the rank's GPU beside it."""

    ranks: int
    """Ranks that hold one copy of the model together."""
    tokens: int
    """Tokens that run through the body."""
    trained: int
    """Tokens that run through the LM head."""
    width: int
    """Bytes of a number that the layers compute with."""
    trains: bool
    checkpointing: bool = True
    chunk: int = 2048
    """Trained tokens whose logits are there at once."""
    logits: int = 3
    """Float32 tensors of [chunk, vocabulary] that are there at once in the head."""
    has_head: bool = True
    """False for a critic or a reward model, whose head is one number wide."""
    moments: int = 8
    """Bytes of the optimizer's moments for each parameter, where they lie on the GPU."""
    in_host_memory: bool = False
    """Weights, gradients and moments lie in host memory all the time."""
    offloads_inputs: bool = False
    """The layers' inputs wait for the backward pass in host memory."""
    shared_keys: int = 0
    """Keys that are copied so that responses share a prompt's."""
    adapters: int = 0
    """Parameters of LoRA adapters, which alone are trained; 0 where all parameters are."""
    half_base: bool = False
    """The blocks under adapters rest in bfloat16, in which they compute; without, in float32."""
    ref_head: bool = False
    """A reference's LM head lies there whole, for an exact KL."""


def frozen_bytes(size: ModelSize, load: Load) -> int:
    """Return the bytes of the whole model under adapters, all ranks together: embedding and head are float32 in any case."""
    ends = size.vocab * size.hidden * (1 if size.tied else 2)
    return ends * 4 + (size.num_params - ends) * (2 if load.half_base else 4)


def resident(size: ModelSize, load: Load) -> int:
    """Return the bytes of a rank's shards while it works: float32 weights and, where it trains, gradients and moments.

    This is where kinds of training that hold other parameters than these add what they hold.
    """
    state = 4 + (GRADIENT + load.moments if load.trains else load.moments)
    held = frozen_bytes(size, load) + load.adapters * state if load.adapters else size.num_params * state
    whole_head = load.ref_head * 4 * size.vocab * size.hidden
    return (0 if load.in_host_memory else held // load.ranks) + whole_head


def at_rest(size: ModelSize, load: Load, *, weights: bool, moments: bool) -> int:
    """Return the bytes of what a rank keeps between phases of its weights, and of the optimizer's moments."""
    if load.in_host_memory:
        return resident(size, load)
    held = frozen_bytes(size, load) + load.adapters * 4 if load.adapters else size.num_params * 4
    trained = (load.adapters or size.num_params) if load.trains else 0
    return (held * weights + trained * load.moments * moments) // load.ranks + load.ref_head * 4 * size.vocab * size.hidden


def regions(size: ModelSize, load: Load) -> dict[str, int]:
    """Return the peak bytes of each region of the pass, in the order in which the pass goes through them.

    With several ranks FSDP gathers a unit into one flat buffer and copies it out of that: both live until the next unit is
    gathered. With one rank all layers stay as they were computed with, but for frozen ones that rest in that type
    (`fsdp.shard`). The root unit is embedding, norm and head in float32.
    """
    if not load.has_head:
        size = replace(size, num_params=size.num_params - (0 if size.tied else size.vocab * size.hidden), tied=True)
    alone = load.ranks == 1
    keeps = alone and not load.half_base
    state = resident(size, load)
    root, layer = 4 * size.root_params, load.width * size.layer_params
    hidden = load.tokens * size.hidden
    stream, exact = hidden * load.width, hidden * 4
    unsharded = root + (size.layers * layer if keeps else 2 * layer)
    waiting = 2 if load.offloads_inputs else size.layers
    kept = waiting * (stream if load.checkpointing else _kept(size, load)) if load.trains else 2 * stream
    one_layer = exact + _forward(size, load)
    first = root + layer + one_layer if alone else 2 * root + 2 * layer + exact + stream
    found = {
        "gather": state + max(first, root + (1 if alone else 2) * layer + one_layer),
        "layers, forward": state + unsharded + kept + one_layer,
        "head": state + unsharded - (0 if keeps else layer) + (kept + 2 * exact if load.trains else 0) + _head(size, load),
    }
    if load.trains:
        full = not load.adapters
        head = 4 * size.vocab * size.hidden * (load.has_head and full)
        reduced = 4 * (size.layer_params if full else load.adapters // size.layers)
        found["layers, backward"] = state + unsharded + head + reduced + kept + _backward(size, load)
        found["root, backward"] = state + ((3 * root if alone else 2 * root + reduced) if full else root) + exact
    return found


def peak(size: ModelSize, load: Load) -> int:
    """Return the largest of the regions."""
    return max(regions(size, load).values())


def _head(size: ModelSize, load: Load) -> int:
    """Return the bytes of the LM head's tensors: hidden states in float32, logits, and gradients of the weight.

    Each chunk's gradient of the weight is added to that of the chunks before into a third tensor of its size.
    """
    states = (2 if load.trains else 1) * load.trained * size.hidden * 4
    if not load.has_head:
        return states
    logits = load.logits * min(load.chunk, load.trained) * size.vocab * 4
    weight = 4 * size.vocab * size.hidden
    if not load.trains or load.adapters:
        return states + logits
    return states + max(3 * weight, logits + weight) if load.trained > load.chunk else states + max(logits, weight)


def _forward(size: ModelSize, load: Load) -> int:
    """Return the bytes of one layer's tensors in a forward pass, at their largest: in the MLP."""
    if size.experts:
        mlp = size.experts_per_token * (3 * size.hidden + 2 * size.expert_intermediate)
    else:
        mlp = 3 * size.intermediate
    return load.tokens * load.width * (mlp + 2 * size.hidden)


def _backward(size: ModelSize, load: Load) -> int:
    """Return the bytes of one layer's tensors in its backward pass, which the MLP's part of it has the most of."""
    queries, keys = size.heads * size.head_dim, size.kv_heads * size.head_dim
    if size.experts:
        mlp = size.experts_per_token * (5 * size.hidden + 5 * size.expert_intermediate)
        gradients = size.experts * size.hidden * size.expert_intermediate
    else:
        mlp, gradients = 6 * size.intermediate, size.hidden * size.intermediate
    recomputed = load.tokens * (load.width * (mlp + 3 * size.hidden + 2 * queries + 2 * keys) + 3 * 4 * size.hidden)
    if not load.checkpointing:
        recomputed = load.tokens * load.width * 2 * (mlp // 6)
    return recomputed + load.width * gradients * (not load.adapters) + load.shared_keys * keys * (2 * load.width + 4)


def _kept(size: ModelSize, load: Load) -> int:
    """Return the bytes that one layer keeps for its backward pass where it is not recomputed."""
    queries, keys = size.heads * size.head_dim, size.kv_heads * size.head_dim
    if size.experts:
        mlp = size.experts_per_token * (3 * size.hidden + 4 * size.expert_intermediate)
    else:
        mlp = 4 * size.intermediate
    return load.tokens * (load.width * (mlp + 4 * size.hidden + 2 * queries + 2 * keys) + 2 * 4 * size.hidden)
