"""The critic of PPO: the value of the state before each trained token, and the steps in which it learns the returns."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from grpo_rl.algos.aggregate import token_mean
from grpo_rl.algos.correction import kept_lengths
from grpo_rl.algos.losses.value import value_loss
from grpo_rl.algos.segments import Segments
from grpo_rl.checkpoint.rank_files import RankFiles
from grpo_rl.faults import fault_point
from grpo_rl.models import fsdp
from grpo_rl.models.optim import make_optimizer, make_scheduler
from grpo_rl.models.value_head import ValueModel
from grpo_rl.types import Batch, Counts
from grpo_rl.workers.saving import Saving
from grpo_rl.workers.sharded_policy import (
    build_sharded,
    clip_gradients,
    join_group,
    move_optimizer,
    num_rollouts,
    sequences_of,
    step_optimizer,
)
from grpo_rl.workers.snapshots import Snapshots
from grpo_rl.workers.specs import CriticSpec, OptimizerStep, Rank


class CriticWorker(Saving, Snapshots):
    """One FSDP2 rank of the critic's worker set."""

    def __init__(self, spec: CriticSpec, rank: Rank) -> None:
        self.spec = spec
        self.rank = rank
        self.device = join_group(rank)
        # Each rank draws its own dropout; the offset keeps runs with other seeds apart.
        torch.manual_seed(spec.seed * 1_000_003 + rank.rank)
        self.model = build_sharded(spec.model, rank, self.device, ValueModel)
        self.optimizer = make_optimizer(self.model, spec.optim)
        self.scheduler = make_scheduler(self.optimizer, spec.optim, spec.total_optimizer_steps)
        self.files = RankFiles(self.model, self.optimizer, self.scheduler, rank.rank)
        self.stepped_model = lambda: self.model

    @torch.no_grad()
    def values(self, micro_batches: Sequence[Batch | None]) -> list[Tensor | None]:
        """Per micro-batch, the value of the state before each trained token."""
        self._onload()
        self.model.eval()
        columns = [self.model(sequences_of(batch, self.device)).to("cpu") for batch in micro_batches]
        self.model.train()
        return [None if batch is None else values_T for batch, values_T in zip(micro_batches, columns, strict=True)]

    def update(self, steps: Sequence[OptimizerStep]) -> list[dict[str, float]]:
        """Per optimizer step, this rank's share of the statistics; key prefixes as in `Objective`.

        A step whose loss or gradient is not finite is left out, on all ranks, with `same/nonfinite` 1.
        """
        self._onload()
        results = [self._optimizer_step(step) for step in steps]
        self.optimizer.zero_grad(set_to_none=True)
        self._offload()
        return results

    def _optimizer_step(self, step: OptimizerStep) -> dict[str, float]:
        self.optimizer.zero_grad(set_to_none=True)
        assert isinstance(self.model, FSDPModule)
        stats: defaultdict[str, float] = defaultdict(float)
        total_loss = 0.0
        for number, batch in enumerate(step.micro_batches):
            last = number == len(step.micro_batches) - 1
            # As in the actor: one reduction per optimizer step on CPU, one per micro-batch where whole gradients would not fit.
            self.model.set_requires_gradient_sync(last or self.device.type == "cuda")
            fault_point("critic.update.forward", rank=self.rank.rank, micro_batch=number, rollouts=num_rollouts(batch))
            loss, micro_stats = self._loss(self.model(sequences_of(batch, self.device)), batch, step.counts)
            if fault_point("critic.update.loss", rank=self.rank.rank, micro_batch=number) == "nan":
                loss = loss * math.nan
            loss.backward()
            total_loss += float(loss.detach())
            for key, value in micro_stats.items():
                stats[key] += float(value)
        grad_norm = clip_gradients(self.model, self.spec.optim.clip_grad)
        stats["same/grad_norm"] = grad_norm
        stats["same/lr"] = float(self.scheduler.get_last_lr()[0])
        stats |= step_optimizer(self.optimizer, self.scheduler, step.counts, total_loss, grad_norm)
        return dict(stats)

    def _loss(self, values_T: Tensor, batch: Batch | None, counts: Counts) -> tuple[Tensor, dict[str, Tensor]]:
        """This micro-batch's share of the mean over the mini-batch's trained tokens."""
        if batch is None:
            # A rank without work still takes part in the collectives of the backward pass.
            return values_T.sum() * 0.0, {}
        assert batch.values_T is not None and batch.returns_T is not None
        old_values_T, returns_T = batch.values_T.to(self.device), batch.returns_T.to(self.device)
        lengths_N = batch.response_lengths_N
        if batch.keep_T is not None:
            keep_T = batch.keep_T.to(self.device)
            values_T, old_values_T, returns_T = values_T[keep_T], old_values_T[keep_T], returns_T[keep_T]
            lengths_N = kept_lengths(batch.keep_T, lengths_N)
        losses_T, stats = value_loss(values_T, old_values_T, returns_T, cliprange_value=self.spec.cliprange_value)
        loss = token_mean(losses_T, Segments(lengths_N.to(self.device)), counts)
        return loss, {"share/vf_loss": loss.detach()} | {f"sum/{name}": value_T.sum() for name, value_T in stats.items()}

    def _onload(self) -> None:
        if self.spec.param_offload:
            self.model.to(self.device)
        if self.spec.optimizer_offload:
            move_optimizer(self.optimizer, self.device)

    def _offload(self) -> None:
        if self.spec.param_offload:
            fsdp.reshard(self.model)
            self.model.to("cpu")
        if self.spec.optimizer_offload:
            move_optimizer(self.optimizer, torch.device("cpu"))
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
