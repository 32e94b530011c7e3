"""One rank of a model that is trained: the optimizer step that actor, critic and reward model share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from grpo_rl.checkpoint.rank_files import RankFiles, weights_of
from grpo_rl.faults import fault_point
from grpo_rl.models import fsdp
from grpo_rl.models.forward import PackedModel
from grpo_rl.models.optim import lr_factor, make_optimizer
from grpo_rl.types import Batch, Counts
from grpo_rl.workers.device_memory import DeviceMemory, OnDevice
from grpo_rl.workers.model_work import ModelWork
from grpo_rl.workers.sharded_policy import Saves, join_set, rows_of
from grpo_rl.workers.specs import ActorSpec, CriticSpec, OptimizerStep, Rank, Rows, TrainedRewardModelSpec, Update

S = TypeVar("S", bound="ActorSpec | CriticSpec | TrainedRewardModelSpec")
M = TypeVar("M", bound=PackedModel)


class PerToken(OnDevice):
    model: PackedModel
    memory: DeviceMemory

    @torch.no_grad()
    def per_token(self, shard: Batch, micro_batches: Sequence[Rows]) -> Tensor:
        """Return `measure` of each trained token of the micro-batches, on the CPU."""
        trained = self.model.training
        self.memory.load_weights()
        self.model.eval()
        columns = [self.measure(rows_of(shard, rows)).cpu() for rows in micro_batches]
        self.model.train(trained)
        self.memory.release()
        return torch.cat(columns)

    def measure(self, batch: Batch | None) -> Tensor:
        """Return one number for each trained token of a micro-batch; none for None."""
        raise NotImplementedError


class TrainedRank(PerToken, Saves, ABC, Generic[S, M]):
    """One FSDP2 rank with a model, its optimizer and its schedule."""

    role: ClassVar[str]

    def __init__(self, spec: S, rank: Rank) -> None:
        self.spec = spec
        self.rank = rank
        self.device = join_set(rank, in_host_memory=spec.in_host_memory)
        # Each rank draws its own dropout; the offset keeps runs with other seeds apart.
        torch.manual_seed(spec.seed * 1_000_003 + rank.rank)
        self.model: M = self.build()
        self.work = ModelWork(self.model)
        self.optimizer = make_optimizer(self.model, spec.optim)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lr_factor(spec.optim, spec.total_optimizer_steps))
        self.files = RankFiles(self.model, (self.optimizer, self.scheduler), rank.rank, rank.patience_s)
        offload = spec.param_offload, spec.optimizer_offload, spec.in_host_memory
        self.memory = DeviceMemory(self.model, self.device, self.optimizer, *offload)
        self.memories = [self.memory]
        self.memory.release()
        # They stay on the device until the step is taken: to read one is to wait for all that the device was given.
        self._losses: list[Tensor] = []
        self._stats: list[dict[str, Tensor]] = []

    @abstractmethod
    def build(self) -> M: ...

    def export_bytes(self) -> int:
        return 4 * sum(parameter.numel() for parameter in self.model.parameters())

    @abstractmethod
    def loss(self, batch: Batch | None, step: OptimizerStep) -> tuple[Tensor, dict[str, Tensor]]:
        """Return this micro-batch's share of the global loss and of the statistics, with `Objective`'s key
        prefixes.

        None is a rank without work in a pass of others: it runs the same layers, and its loss is 0.
        """

    def begin_step(self, batch: Batch, step: OptimizerStep) -> None:
        """Called with the whole shard before the first pass of an optimizer step."""

    def end_step(self) -> dict[str, float]:
        """Return the statistics that only all passes of a step together have, with prefixes as `loss`."""
        return {}

    def update(self, shard: Batch, update: Update) -> list[dict[str, float]]:
        """A step whose loss or gradient is not finite is left out, on all ranks, with `same/nonfinite` 1."""
        results = []
        self.memory.load_all()
        batch = update.complete(shard)
        for step in update.steps:
            self._losses.clear()  # of a step that an error ended
            self._add_gradient(batch, step)
            results.append(self._optimizer_step(step.counts))
        self._end_update()
        return results

    def forward_backward(self, shard: Batch, update: Update) -> None:
        """Add the gradient of this rank's shard of a part of an optimizer step."""
        self.memory.load_all()
        self._add_gradient(update.complete(shard), update.steps[0])
        self.memory.release()

    def optim_step(self, counts: Counts) -> list[dict[str, float]]:
        """Take the optimizer step of all parts, whose counts are `counts`."""
        self.memory.load_all()
        stats = self._optimizer_step(counts)
        self._end_update()
        return [stats]

    def _end_update(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.memory.release()

    def _add_gradient(self, batch: Batch, step: OptimizerStep) -> None:
        """Make the passes of a step, or of a part of one."""
        if not self._losses:
            self._passes("start")
            self.optimizer.zero_grad(set_to_none=True)
            self._stats.clear()
            self.begin_step(batch, step)
        batch = batch if step.selected_T is None else batch.replace(selected_T=step.selected_T)
        # These passes come first: the last one of the step is the one that reduces gradients.
        for rows in step.zero_advantage:
            with torch.no_grad():
                self._losses.append(self._pass(batch, rows, step))
        for number, rows in enumerate(step.micro_batches):
            last = number == len(step.micro_batches) - 1
            # On CPU whole gradients stay local until the last micro-batch; a GPU lacks the memory for them.
            assert isinstance(self.model, FSDPModule)
            self.model.set_requires_gradient_sync(last or self.device.type == "cuda")
            self._passes("forward", micro_batch=number, rollouts=len(rows))
            loss = self._pass(batch, rows, step)
            if self._passes("loss", micro_batch=number) == "nan":
                loss = loss * math.nan
            loss.backward()
            self._losses.append(loss.detach())
            self._passes("mid_backward", micro_batch=number)

    def _pass(self, batch: Batch, rows: Rows, step: OptimizerStep) -> Tensor:
        loss, stats = self.loss(rows_of(batch, rows), step)
        self._stats.append(stats)
        return loss

    def _optimizer_step(self, counts: Counts) -> dict[str, float]:
        total_loss = sum(numbers(self._losses), 0.0)
        stats = combined(self._stats)
        self._losses.clear()
        grad_norm = clip_gradients(self.model, self.spec.optim.clip_grad)
        # `same/`: equal on all ranks.
        stats["same/lr"] = float(self.scheduler.get_last_lr()[0])
        stats["same/grad_norm"] = grad_norm
        stats |= self.end_step()
        self._passes("before_optimizer")
        stats |= step_optimizer(self.optimizer, self.scheduler, counts, total_loss, grad_norm)
        self._passes("after_optimizer")
        if self.device.type == "cuda":
            # At this process's peak, other processes included, without what the allocator keeps unused.
            free, total = torch.cuda.mem_get_info(self.device)
            other_bytes = total - free - torch.cuda.memory_reserved(self.device)
            stats["max/gpu_memory_share"] = float((other_bytes + torch.cuda.max_memory_allocated(self.device)) / total)
        return stats

    def _passes(self, point: str, **facts: int) -> str | None:
        return fault_point(f"{self.role}.update.{point}", rank=self.rank.rank, **facts)

    def load(self, folder: str) -> None:
        super().load(folder)
        self.memory.release()

    def weights(self) -> tuple[int, dict[str, Tensor]]:
        """Return the number of tensors in this rank's share of the weights, and a copy of it."""
        fsdp.reshard(self.model)
        weights = weights_of(self.model)
        return len(weights), weights


def combined(passes: Sequence[dict[str, Tensor]]) -> dict[str, float]:
    """Return the statistics of several passes: the largest of each `max/...`, the sum of all others."""
    read = iter(numbers([value for stats in passes for value in stats.values()]))
    total: dict[str, float] = {}
    for stats in passes:
        for key in stats:
            part = next(read)
            total[key] = max(total.get(key, -math.inf), part) if key.startswith("max/") else total.get(key, 0.0) + part
    return total


def numbers(tensors: Sequence[Tensor]) -> list[float]:
    """Return one-number tensors in float64; those on a GPU in one copy."""
    on_gpu = [tensor.detach().double() for tensor in tensors if tensor.is_cuda]
    read = iter(torch.stack(on_gpu).tolist() if on_gpu else ())
    return [next(read) if tensor.is_cuda else float(tensor) for tensor in tensors]


def clip_gradients(model: PackedModel, clip_grad: float) -> float:
    """Scale the gradient to a norm over all ranks of at most `clip_grad`; return its norm before."""
    return float(fsdp.full_tensor(torch.nn.utils.clip_grad_norm_(model.parameters(), clip_grad)))


def step_optimizer(
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    counts: Counts,
    loss: float,
    grad_norm: float,
) -> dict[str, float]:
    """Not taken if not finite on any rank, or nothing is trained: decay moves weights. A collective."""
    finite_1 = torch.tensor([float(math.isfinite(loss) and math.isfinite(grad_norm))])
    if dist.is_initialized() and dist.get_world_size() > 1:
        if dist.get_backend() == "nccl":
            finite_1 = finite_1.cuda()
        dist.all_reduce(finite_1, dist.ReduceOp.MIN)
    finite = bool(finite_1.item())
    if finite and counts.num_tokens:
        optimizer.step()
        scheduler.step()
    return {"same/nonfinite": float(not finite)}
