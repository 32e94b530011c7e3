"""The floating point operations of a model's passes, counted as they are made.

Counted is what the mathematics needs, as in model FLOPs utilization (Chowdhery et al. 2022, PaLM, Appendix B): two operations for
each weight that a token is multiplied with, twice as many again in a backward pass, and attention over the tokens that are
attended to. A prompt that several responses share counts once, as it is computed; what gradient checkpointing computes
again does not count, for a run is no better for it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from grpo_rl.models.forward import PackedModel, PolicyModel
from grpo_rl.models.packing import Sequences


class ModelWork:
    """A count of the operations of some models' passes: this rank's, since the count was taken last."""

    def __init__(self, model: PackedModel, *others: PackedModel) -> None:
        self._others = [ModelWork(other) for other in others]
        config = model.lm.config.get_text_config()
        self._head, self._body = _Weights(), _Weights()
        # A table of embeddings is looked up. Where the head is tied to it, the head multiplies with it all the same.
        elsewhere = {id(module.weight) for module in model.lm.modules() if isinstance(module, nn.Embedding)}
        if isinstance(model, PolicyModel):
            head = model.lm.get_output_embeddings().weight
            self._head.add(head)
            elsewhere.add(id(head))
        for name, weight in model.lm.named_parameters():
            if weight.dim() >= 2 and id(weight) not in elsewhere:
                self._body.add(weight, _active_share(name, config))
        self._attention = _attention_of(config)
        self._done: list[Tensor | float] = []
        self._ranks = model.sequence_group
        model.register_forward_pre_hook(self._count)

    def take(self) -> float:
        """Return the operations since the last call."""
        done, self._done = self._done, []
        return float(sum(float(part) for part in done)) + sum(other.take() for other in self._others)

    def _count(self, model: nn.Module, arguments: tuple[Any, ...]) -> None:
        sequences: Sequences = arguments[0]
        trains = torch.is_grad_enabled()
        # Ranks that compute a pass together share its work, evenly but for the head.
        part = 1 if self._ranks is None else 1 / self._ranks.size
        tokens = self._body.of(len(sequences.token_ids_S), trains) + self._head.of(len(sequences.predict_T), trains)
        self._done.append(tokens * part)
        # The number of tokens that each one attends to, itself included. It stays on the device: a look at it would wait.
        attended_S = sequences.packing.position_ids_S + 1
        for window, width in self._attention.items():
            pairs = (attended_S if window is None else attended_S.clamp(max=window)).sum()
            self._done.append(pairs * (4.0 * width * (3 if trains else 1) * part))


class _Weights:
    """The weights that each token is multiplied with: those that are trained, and those that are not."""

    def __init__(self) -> None:
        self.trained = self.frozen = 0.0

    def add(self, weight: Tensor, share: float = 1.0) -> None:
        if weight.requires_grad:
            self.trained += share * weight.numel()
        else:
            self.frozen += share * weight.numel()

    def of(self, num_tokens: int, trains: bool) -> float:
        """Return the operations on so many tokens. Backwards, a weight that is not trained has no gradient of its own."""
        if not trains:
            return 2.0 * num_tokens * (self.trained + self.frozen)
        return num_tokens * (6.0 * self.trained + 4.0 * self.frozen)


def _active_share(name: str, config: Any) -> float:
    """Return the share of a parameter that each token is multiplied with: of experts, those that a token goes to."""
    num_experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    if ".experts." not in name or not num_experts:
        return 1.0
    return float(getattr(config, "num_experts_per_tok", num_experts)) / float(num_experts)


def _attention_of(config: Any) -> dict[int | None, float]:
    """Return, for each window of attention (None: all tokens before), heads times their width, over its layers."""
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    window = getattr(config, "sliding_window", None)
    widths: dict[int | None, float] = {}
    for kind in kinds:
        key = window if kind == "sliding_attention" else None
        widths[key] = widths.get(key, 0.0) + width
    return widths
