"""The routers of the actor's model in one rank: choices that are replayed, the auxiliary loss, metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_rl.columns import values
from grpo_rl.models.experts import Routing, balance_loss, choice_dtype, nothing_given, router_metrics
from grpo_rl.models.packing import Sequences
from grpo_rl.types import Batch, Counts, segment_index
from grpo_rl.workers.sharded_policy import rows_of
from grpo_rl.workers.specs import ActorSpec, OptimizerStep, Rows


class RouterWatch:
    def __init__(
        self, routing: Routing, spec: ActorSpec, device: torch.device, sequences: Callable[[Batch | None], Sequences]
    ) -> None:
        self.routing = routing
        self.replays = spec.replays_routing
        self.coefficient = spec.objective.router_aux_loss_coef
        self.choices: Tensor | None = None
        """The experts [S, layers, top_k] of the last shard that log-probs were computed of."""
        self._device = device
        self._sequences = sequences
        self._of_ids: Tensor | None = None
        self._noted: list[Tensor] = []
        self._balance: Tensor | None = None
        """The counts [layers, experts] of the whole mini-batch over all ranks, for the auxiliary loss."""
        self._counted = self._no_counts()

    def note_choices(self, place_S: Tensor | None) -> None:
        routed = self.routing.last
        assert routed is not None and place_S is not None
        dtype = choice_dtype(self.routing.num_experts)
        chosen_SLK = torch.stack(routed.chosen, 1).to("cpu", dtype)
        noted = chosen_SLK[place_S.clamp(min=0)]
        noted[place_S < 0] = nothing_given(dtype)
        self._noted.append(noted)

    def keep_choices(self, shard: Batch, micro_batches: Sequence[Rows]) -> None:
        """Keep what was noted in the passes over these micro-batches."""
        if not self.replays:
            return
        dtype = choice_dtype(self.routing.num_experts)
        shape = len(shard.token_ids_S), self.routing.num_layers, self.routing.top_k
        choices = torch.full(shape, nothing_given(dtype), dtype=dtype)
        noted = iter(self._noted)
        for rows in micro_batches:
            if rows:
                choices[segment_index(shard.sequence_lengths_N, torch.tensor(rows))] = next(noted)
        self._noted = []
        self.choices, self._of_ids = choices, values(shard.token_ids_S)

    def has_choices_of(self, shard: Batch) -> bool:
        return self._of_ids is not None and torch.equal(self._of_ids, values(shard.token_ids_S))

    def begin_step(self, batch: Batch, step: OptimizerStep, model: Any) -> None:
        """Count the mini-batch's experts for the auxiliary loss, if not replayed by a pass. A collective."""
        self._counted, self._balance = self._no_counts(), None
        if not self.coefficient:
            return
        counts_LE = self._counted
        for rows in (*step.micro_batches, *step.zero_advantage):
            micro_batch = rows_of(batch, rows)
            if micro_batch is not None and micro_batch.experts_S is not None:
                counts_LE += self._replayed_counts(micro_batch)
            elif not self.replays:
                with torch.no_grad():
                    model(self._sequences(micro_batch))
                assert self.routing.last is not None
                counts_LE += self.routing.last.counts_LE
        self._balance = _sum_over_ranks(counts_LE.clone())
        counts_LE.zero_()

    def _replayed_counts(self, batch: Batch) -> Tensor:
        """Return the counts [layers, experts] at the tokens before the trained ones."""
        assert batch.experts_S is not None
        read_TLK = batch.experts_S[batch.positions() - 1].long()
        numbered = read_TLK + torch.arange(self.routing.num_layers)[:, None] * self.routing.num_experts
        flat = torch.bincount(numbered.flatten(), minlength=self.routing.num_layers * self.routing.num_experts)
        return flat.view(self.routing.num_layers, self.routing.num_experts).double().to(self._device)

    def loss(self, counts: Counts) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the auxiliary loss's weighted share of the last pass, and its statistics."""
        routed = self.routing.last
        assert routed is not None
        self._counted += routed.counts_LE
        stats = {"sum/router/entropy": routed.entropy_L.mean()}
        if self.replays:
            stats["sum/router/changed"] = routed.changed_L.mean()
        if self._balance is None or not routed.probs:
            return torch.zeros((), device=self._device), stats
        loss = balance_loss(routed.probs, self._balance, counts.num_tokens)
        return self.coefficient * loss, stats | {"share/router/aux_loss": loss.detach()}

    def end_step(self) -> dict[str, float]:
        """Return how evenly this step's tokens went to the experts. A collective."""
        metrics = router_metrics(_sum_over_ranks(self._counted))
        return {f"same/{name}": value for name, value in metrics.items()}

    def _no_counts(self) -> Tensor:
        shape = self.routing.num_layers, self.routing.num_experts
        return torch.zeros(shape, dtype=torch.float64, device=self._device)


def _sum_over_ranks(counts_LE: Tensor) -> Tensor:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(counts_LE)
    return counts_LE
