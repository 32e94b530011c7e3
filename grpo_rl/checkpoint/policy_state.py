"""A policy's weights, optimizer, schedule and random state as safetensors and JSON, independent of the number of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from grpo_rl.errors import CheckpointError
from grpo_rl.models.fsdp import full_tensor

WEIGHTS = "weights.safetensors"
OPTIMIZER = "optimizer.safetensors"
TRAINING = "training.json"


def save(
    folder: Path,
    policy: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LambdaLR,
    rank: int,
) -> None:
    """Write everything that decides the policy's future into `folder`, which rank 0 has made. A collective.

    Whole tensors are gathered one at a time; only rank 0 keeps and writes them.
    """
    weights: dict[str, Tensor] = {}
    moments: dict[str, Tensor] = {}
    for name, parameter in policy.named_parameters():
        _keep(weights, name, parameter, rank)
        for key, value in optimizer.state.get(parameter, {}).items():
            _keep(moments, f"{key}:{name}", value, rank)
    save_file({f"rng_{key}": value for key, value in rng_state().items()}, folder / f"rng_rank{rank}.safetensors")
    if rank == 0:
        save_file(weights, folder / WEIGHTS)
        save_file(moments, folder / OPTIMIZER)
        (folder / TRAINING).write_text(
            json.dumps({"num_optimizer_steps": scheduler.last_epoch, "world_size": dist.get_world_size()})
        )
    dist.barrier()


def load(
    folder: Path,
    policy: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LambdaLR,
    rank: int,
) -> None:
    """Restore what `save` wrote; every rank reads the files and keeps its shards.

    Random states are per rank, so with another number of ranks they start from the run's seed again.

    Raises CheckpointError when names or shapes are not those of this policy.
    """
    training = json.loads((folder / TRAINING).read_text())
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        _check_names(folder, set(file.keys()), {name: tuple(p.shape) for name, p in policy.named_parameters()}, file)
        with torch.no_grad():
            for name, parameter in policy.named_parameters():
                _local(parameter).copy_(_local(_like(file.get_tensor(name), parameter)))
    _load_optimizer(folder / OPTIMIZER, policy, optimizer)
    set_schedule(scheduler, training["num_optimizer_steps"])
    if training["world_size"] == dist.get_world_size():
        with safe_open(folder / f"rng_rank{rank}.safetensors", framework="pt") as file:
            set_rng_state({key.removeprefix("rng_"): file.get_tensor(key) for key in file.keys()})  # noqa: SIM118


def _load_optimizer(path: Path, policy: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    state: dict[int, dict[str, Any]] = {}
    names = {parameter: name for name, parameter in policy.named_parameters()}
    index = 0
    with safe_open(path, framework="pt") as file:
        stored = set(file.keys())
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                entry = {}
                for key in ("step", "exp_avg", "exp_avg_sq"):
                    stored_name = f"{key}:{names[parameter]}"
                    if stored_name in stored:
                        value = file.get_tensor(stored_name)
                        entry[key] = value if key == "step" else _like(value, parameter)
                if entry:
                    state[index] = entry
                index += 1
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _keep(into: dict[str, Tensor], name: str, tensor: Any, rank: int) -> None:
    whole = full_tensor(tensor.detach())
    if rank == 0:
        into[name] = whole.to("cpu", copy=True).contiguous()


def _like(whole: Tensor, parameter: Any) -> Tensor:
    """This rank's part of `whole`, sharded and placed as `parameter` is; no communication."""
    whole = whole.to(parameter.device)
    if isinstance(parameter, DTensor):
        return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return whole


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _check_names(folder: Path, stored: set[str], expected: dict[str, tuple[int, ...]], file: Any) -> None:
    missing, extra = sorted(expected.keys() - stored), sorted(stored - expected.keys())
    shapes = [name for name in expected.keys() & stored if tuple(file.get_slice(name).get_shape()) != expected[name]]
    if missing or extra or shapes:
        raise CheckpointError(
            f"{folder} holds another model: missing {missing[:3]}, unknown {extra[:3]}, other shapes {shapes[:3]}. "
            "Use the model it was trained with, or trainer.resume_mode=disable and another trainer.experiment_name."
        )


def set_schedule(scheduler: torch.optim.lr_scheduler.LambdaLR, num_steps: int) -> None:
    """Continue the configured schedule after `num_steps` steps: the rates are the configuration's, not the checkpoint's."""
    rates = [base * factor(num_steps) for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    position = {"last_epoch": num_steps, "_step_count": num_steps + 1, "_last_lr": rates}
    scheduler.load_state_dict(position | {"lr_lambdas": [None] * len(rates)})


def rng_state() -> dict[str, Tensor]:
    """The random state of this process: of the CPU's generator, and of its GPU's."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Tensor]) -> None:
    """Go on drawing from `rng_state`."""
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
