"""The floating point operations of a model's passes, as in model FLOPs utilization (PaLM, Appendix B).

Two operations for each weight that a token is multiplied with, twice as many again backwards, and attention.
A shared prompt counts once, what gradient checkpointing computes again not at all.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from grpo_rl.models.forward import PackedModel, PolicyModel
from grpo_rl.models.packing import Sequences


class ModelWork:
    """The operations of this rank's passes since the last `take`."""

    def __init__(self, *models: PackedModel) -> None:
        self._done: list[Tensor | float] = []
        for model in models:
            self._watch(model)

    def _watch(self, model: PackedModel) -> None:
        config = model.lm.config.get_text_config()
        head = model.lm.get_output_embeddings().weight if isinstance(model, PolicyModel) else None
        # A table of embeddings is looked up. If the head is tied to it, the head multiplies with it all the same.
        elsewhere = {id(head)} | {id(module.weight) for module in model.lm.modules() if isinstance(module, nn.Embedding)}
        of_head = _operations([] if head is None else [(head, 1.0)])
        of_body = _operations(
            (weight, _active_share(name, config))
            for name, weight in model.lm.named_parameters()
            if weight.dim() >= 2 and id(weight) not in elsewhere
        )
        heads, head_dim = config.num_attention_heads, getattr(config, "head_dim", None)
        # A window of attention is never shorter than a sequence here (`models/attention.py`), so that all layers are alike.
        of_attention = 4.0 * heads * (head_dim or config.hidden_size // heads) * config.num_hidden_layers
        # Ranks that compute a pass together share its work, evenly but for the head.
        part = 1 if model.sequence_group is None else 1 / model.sequence_group.size

        def count(_: nn.Module, arguments: tuple[Any, ...]) -> None:
            sequences: Sequences = arguments[0]
            trains = torch.is_grad_enabled()
            tokens = len(sequences.token_ids_S) * of_body[trains] + len(sequences.predict_T) * of_head[trains]
            # The number of tokens that each one attends to, itself included. It stays on the device: a look at it would wait.
            pairs = (sequences.packing.position_ids_S + 1).sum()
            self._done += [tokens * part, pairs * (of_attention * (3 if trains else 1) * part)]

        model.register_forward_pre_hook(count)

    def take(self) -> float:
        done, self._done = self._done, []
        return float(sum(float(part) for part in done))


def _operations(weights: Iterable[tuple[Tensor, float]]) -> tuple[float, float]:
    """Return the operations on one token with these shares of weights: forwards; and also backwards."""
    sizes = [(share * weight.numel(), weight.requires_grad) for weight, share in weights]
    return sum(2.0 * size for size, _ in sizes), sum((6.0 if trained else 4.0) * size for size, trained in sizes)


def _active_share(name: str, config: Any) -> float:
    """Of experts, those that a token goes to."""
    num_experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    return config.num_experts_per_tok / num_experts if num_experts and ".experts." in name else 1.0
