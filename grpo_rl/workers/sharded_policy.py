"""A sharded policy in one process of a worker set: what the actor and the reference have in common."""

from __future__ import annotations

import datetime
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from grpo_rl.models import fsdp, load
from grpo_rl.models.forward import PackedModel, PolicyModel, Sequences, TokenOutputs
from grpo_rl.types import Batch, Counts
from grpo_rl.workers.specs import PolicySpec, Rank

M = TypeVar("M", bound=PackedModel)


def join_group(rank: Rank) -> torch.device:
    """This process's device, after it has joined its group's process group (NCCL on GPUs, gloo on CPU)."""
    device = torch.device(rank.device, 0) if rank.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if rank.master_address == "127.0.0.1" else "")
    if not os.environ["GLOO_SOCKET_IFNAME"]:
        del os.environ["GLOO_SOCKET_IFNAME"]
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"tcp://{rank.master_address}:{rank.master_port}",
        rank=rank.rank,
        world_size=rank.world_size,
        timeout=datetime.timedelta(seconds=rank.timeout_s),
    )
    return device


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """The torch type that `auto`, `bfloat16` or `float32` stands for on this device."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.bfloat16 if name == "bfloat16" else torch.float32


def build_policy(spec: PolicySpec, rank: Rank, device: torch.device) -> PolicyModel:
    """The policy, sharded over the worker set."""
    chunk_tokens = spec.model.lm_head_chunk_tokens
    return build_sharded(
        spec, rank, device, lambda lm: PolicyModel(lm, temperature=spec.temperature, chunk_tokens=chunk_tokens)
    )


def build_sharded(spec: PolicySpec, rank: Rank, device: torch.device, wrap: Callable[[Any], M]) -> M:
    """What `wrap` makes of the language model, sharded over the worker set.

    Only rank 0 reads the weights; the others get their shards from it.
    """
    model = spec.model
    own_code, key = model.trust_remote_code, spec.path_key
    config = load.load_config(model.path, trust_remote_code=own_code, override=model.override_config, key=key)
    alone = rank.world_size == 1
    lm = load.load_lm(model.path, config, trust_remote_code=own_code, on_meta=not alone, key=key)
    if spec.train and model.enable_gradient_checkpointing:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    policy = wrap(lm)
    policy.train(spec.train)
    policy.requires_grad_(spec.train)
    if alone:
        policy.to(device)
    fsdp.shard(
        policy,
        init_device_mesh(device.type, (rank.world_size,)),
        compute_dtype=compute_dtype(spec.dtype, device),
        reshard_after_forward=spec.reshard_after_forward,
    )
    if not alone:
        fsdp.materialize(policy, wrap(_whole_lm(spec)) if rank.rank == 0 else None, device)
    return policy


def _whole_lm(spec: PolicySpec) -> Any:
    """The unsharded language model with its weights, in host memory."""
    model, key = spec.model, spec.path_key
    config = load.load_config(model.path, trust_remote_code=model.trust_remote_code, override=model.override_config, key=key)
    return load.load_lm(model.path, config, trust_remote_code=model.trust_remote_code, key=key)


def clip_gradients(model: PackedModel, clip_grad: float) -> float:
    """The norm of the gradient over all ranks, which is at most `clip_grad` afterwards."""
    return float(fsdp.full_tensor(torch.nn.utils.clip_grad_norm_(model.parameters(), clip_grad)))


def all_finite(*values: float) -> bool:
    """Whether these numbers are finite on every rank, the same answer on all of them. A collective."""
    finite_1 = torch.tensor([float(all(map(math.isfinite, values)))])
    if dist.is_initialized() and dist.get_world_size() > 1:
        if dist.get_backend() == "nccl":
            finite_1 = finite_1.cuda()
        dist.all_reduce(finite_1, dist.ReduceOp.MIN)
    return bool(finite_1.item())


def step_optimizer(
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    counts: Counts,
    loss: float,
    grad_norm: float,
) -> dict[str, float]:
    """Take the step, and tell whether loss and gradient were finite.

    It is not taken, and parameters, moments and learning rate stay what they were, where one of them is not finite on
    any rank, and where no token of the mini-batch is trained: moments and weight decay would move the weights.
    """
    finite = all_finite(loss, grad_norm)
    if finite and counts.num_tokens:
        optimizer.step()
        scheduler.step()
    return {"same/nonfinite": float(not finite)}


def move_optimizer(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move the optimizer's moments."""
    for state in optimizer.state.values():
        for key, value in state.items():
            # AdamW's step counter stays where AdamW put it.
            if isinstance(value, Tensor) and key != "step":
                state[key] = value.to(device)


def forward_micro_batches(
    micro_batches: Sequence[Batch | None],
    device: torch.device,
    run: Callable[[Sequences, Batch | None], TokenOutputs],
) -> list[TokenOutputs | None]:
    """`run` on each micro-batch. An empty one becomes a one-token dummy, so that every rank enters every collective."""
    outputs: list[TokenOutputs | None] = []
    for batch in micro_batches:
        result = run(sequences_of(batch, device), batch)
        outputs.append(None if batch is None else result)
    return outputs


def sequences_of(batch: Batch | None, device: torch.device) -> Sequences:
    """The model input of a micro-batch; for None, of a dummy with two tokens of which one is trained."""
    if batch is None:
        one = torch.ones(1, dtype=torch.long)
        return Sequences.of(torch.zeros(2, dtype=torch.long), one, one, device)
    return Sequences.of(
        batch.token_ids_S,
        batch.prompt_lengths_N,
        batch.response_lengths_N,
        device,
        batch.support_counts_T,
        batch.support_ids_M,
    )


def num_rollouts(batch: Batch | None) -> int:
    """Rollouts of a micro-batch; 0 for a dummy."""
    return 0 if batch is None else len(batch.response_lengths_N)


def collect(outputs: Sequence[TokenOutputs | None], column: str) -> list[Tensor | None]:
    """One column of the outputs, on the CPU, for sending back."""
    return [None if output is None else _cpu(getattr(output, column)) for output in outputs]


def _cpu(tensor: Any) -> Tensor:
    return tensor.detach().to("cpu")
