"""Names of experts' weights: one tensor for all experts in the trainer's model, three for each expert in files and engines.

transformers stores the experts of a layer in `...mlp.experts.gate_up_proj` [experts, 2 x inner, hidden], whose first half
of rows is the gate, and `...mlp.experts.down_proj` [experts, hidden, inner]. Checkpoints on hubs, what `save_pretrained`
writes, and vLLM's loaders have `...mlp.experts.7.gate_proj.weight`, `up_proj` and `down_proj` for each expert
(transformers 5, `conversion_mapping.py`, the mapping "qwen2_moe", which Qwen3-MoE and OLMoE share).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

FAMILIES = ("qwen3_moe", "olmoe")
"""The `model_type` of each family with experts that this program trains."""
_BOTH, _DOWN = "experts.gate_up_proj", "experts.down_proj"


def holds_experts(name: str) -> bool:
    """Return whether the parameter of this name has the weights of all experts of a layer."""
    return name.endswith((f".{_BOTH}", f".{_DOWN}"))


def stored_tensors(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield a model's tensors by the names that files have: those of experts as views, one for each matrix of each expert."""
    for name, tensor in named:
        if holds_experts(name):
            yield from per_expert(name, tensor)
        else:
            yield name, tensor


def per_expert(name: str, rows: Tensor, first: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Yield name and view of each matrix in `rows`, which are experts `first` and following of the parameter `name`."""
    place, _, kind = name.rpartition(".")
    for number, weights in enumerate(rows, start=first):
        if kind == "down_proj":
            yield f"{place}.{number}.down_proj.weight", weights
            continue
        gate, up = weights.chunk(2)
        yield f"{place}.{number}.gate_proj.weight", gate
        yield f"{place}.{number}.up_proj.weight", up
