"""Models with experts: their routers' choices, how even these are, router replay, and names in files.

Which `top_k` experts a router takes is a jump: if two are nearly equal, the last bits decide, and two passes
may differ. Replay (R2 of Zheng et al. 2025, "Stabilizing reinforcement learning with LLMs", section 4;
"routing replay" of GSPO, Zheng et al. 2025, section 5.3) takes the experts of an earlier pass again, weighted
by the router's present probabilities, so that it goes on learning.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(slots=True)
class Routed:
    """One pass's choices at the states before trained tokens; a shared one counts for each response.

    The first fields are `Routing.begin`'s, also for layers that are computed again for a gradient.
    """

    read_T: Tensor
    given_SLK: Tensor | None
    balance: bool
    choices: bool
    counts_LE: Tensor
    entropy_L: Tensor
    """Summed over the states, in nats."""
    changed_L: Tensor
    """The number of states whose router prefers another set of experts than was given."""
    probs: list[Tensor] = field(default_factory=list)
    """Summed over the states, [E] for each layer."""
    chosen: list[Tensor] = field(default_factory=list)
    ended: bool = False
    """Layers that are computed again are not counted."""


class Routing:
    """A model's routers, watched and steered by hooks on their outputs (logits, weights, experts)."""

    def __init__(self, routers: list[Any]) -> None:
        self.num_layers = len(routers)
        self.num_experts, self.top_k = int(routers[0].num_experts), int(routers[0].top_k)
        self.last: Routed | None = None
        for layer, router in enumerate(routers):
            router.register_forward_hook(functools.partial(self._on_output, layer))

    @staticmethod
    def of(lm: nn.Module) -> Routing | None:
        if getattr(getattr(lm, "config", None), "model_type", None) not in FAMILIES:
            return None
        # A layer's router is `mlp.gate`, with the number of experts; a dense layer of the same model has none.
        routers = [
            module for name, module in lm.named_modules() if name.endswith("mlp.gate") and hasattr(module, "num_experts")
        ]
        return Routing(routers) if routers else None

    def begin(self, read_T: Tensor, given_SLK: Tensor | None, *, balance: bool, choices: bool) -> None:
        """Watch the forward pass that follows.

        `read_T` are the positions of the states that count; `given_SLK` the experts that tokens take, if not
        `nothing_given`. `balance` keeps the gradient of `Routed.probs`, `choices` keeps `Routed.chosen`.
        """
        device = read_T.device
        counts_LE = torch.zeros(self.num_layers, self.num_experts, dtype=torch.float64, device=device)
        entropy_L, changed_L = torch.zeros(2, self.num_layers, dtype=torch.float64, device=device)
        self.last = Routed(read_T, given_SLK, balance, choices, counts_LE, entropy_L, changed_L)

    def end(self) -> None:
        assert self.last is not None
        self.last.ended = True

    def _on_output(
        self, layer: int, router: Any, inputs: Any, output: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        routed = self.last
        if routed is None:
            return None
        logits_SE, weights_SK, own_SK = output
        reads_probs = routed.balance or routed.given_SLK is not None
        with torch.set_grad_enabled(reads_probs and torch.is_grad_enabled()):
            probs_SE = logits_SE.softmax(-1, dtype=torch.float32)
        chosen_SK = own_SK
        if routed.given_SLK is not None:
            given_SK = routed.given_SLK[:, layer].to(own_SK.device)
            chosen_SK = torch.where(given_SK == nothing_given(given_SK.dtype), own_SK, given_SK.long())
            weights_SK = probs_SE.gather(1, chosen_SK)
            if router.norm_topk_prob:
                weights_SK = weights_SK / weights_SK.sum(-1, keepdim=True)
            weights_SK = weights_SK.to(logits_SE.dtype)
        # The same operations with a gradient whether or not they are counted: a checkpoint compares them.
        probs_E = probs_SE.index_select(0, routed.read_T).sum(0) if routed.balance else None
        if not routed.ended:
            with torch.no_grad():
                self._count(routed, layer, probs_SE, own_SK, chosen_SK)
            routed.probs += [] if probs_E is None else [probs_E]
        return None if routed.given_SLK is None else (logits_SE, weights_SK, chosen_SK)

    def _count(self, routed: Routed, layer: int, probs_SE: Tensor, own_SK: Tensor, chosen_SK: Tensor) -> None:
        probs_TE, chosen_TK = probs_SE.index_select(0, routed.read_T), chosen_SK.index_select(0, routed.read_T)
        routed.counts_LE[layer] = torch.bincount(chosen_TK.flatten(), minlength=self.num_experts)
        routed.entropy_L[layer] = torch.special.entr(probs_TE).sum()
        if routed.given_SLK is not None:
            own_TK = own_SK.index_select(0, routed.read_T)
            routed.changed_L[layer] = (own_TK.sort(-1).values != chosen_TK.sort(-1).values).any(-1).sum()
        if routed.choices:
            routed.chosen.append(chosen_SK)


def choice_dtype(num_experts: int) -> torch.dtype:
    """Return the smallest integer type for the numbers of experts and `nothing_given`."""
    return torch.uint8 if num_experts < 256 else torch.int16


def nothing_given(dtype: torch.dtype) -> int:
    """Return the number that lets a token take the experts that its router chooses."""
    return int(torch.iinfo(dtype).max)


def balance_loss(probs: list[Tensor], counts_LE: Tensor, num_states: int) -> Tensor:
    """Return this pass's share of the auxiliary loss that keeps experts evenly used; the shares of all passes
    add up.

    For each layer it is E Σ_e f_e P_e (Fedus et al. 2021, "Switch Transformers", equations 4 to 6), here
    averaged over the layers. f_e is how many of the `num_states` states took expert e, over `num_states`; P_e
    is the mean of the router's probability of e over them. f has no gradient. At perfect balance the value is
    `top_k`, as in transformers' `load_balancing_loss_func`, whose f and P are means over layers too, so that
    overused and idle experts of different layers cancel.

    `counts_LE` and `num_states` are those of the whole mini-batch, over all ranks and passes (as in Qiu et
    al. 2025, "Demons in the detail", section 3): else the loss would depend on how the mini-batch is cut.
    """
    num_layers, num_experts = counts_LE.shape
    share_LE = counts_LE.to(probs[0].dtype) / max(1, num_states)
    return (share_LE * torch.stack(probs)).sum() * num_experts / (num_layers * max(1, num_states))


def router_metrics(counts_LE: Tensor) -> dict[str, float]:
    """`load_max`: the fullest expert's count over the mean; `idle_experts`: the share without a token."""
    mean_L = counts_LE.mean(-1).clamp(min=1e-12)
    return {
        "router/load_max": float((counts_LE.max(-1).values / mean_L).mean()),
        "router/idle_experts": float((counts_LE == 0).double().mean()),
    }


FAMILIES = ("qwen3_moe", "olmoe")


def holds_experts(name: str) -> bool:
    return name.endswith((".experts.gate_up_proj", ".experts.down_proj"))


def stored_tensors(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield a model's tensors by the names that files have: one view for each matrix of each expert."""
    return itertools.chain.from_iterable(itertools.starmap(per_expert, named))


def per_expert(name: str, rows: Tensor, first: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Yield name and view of each matrix in `rows`, the experts from `first` on of the parameter `name`.

    The tensor of another parameter is yielded as it is.
    """
    if not holds_experts(name):
        yield name, rows
        return
    place, _, kind = name.rpartition(".")
    for number, weights in enumerate(rows, start=first):
        parts = {"down": weights} if kind == "down_proj" else dict(zip(("gate", "up"), weights.chunk(2), strict=True))
        for part, weight in parts.items():
            yield f"{place}.{number}.{part}_proj.weight", weight
