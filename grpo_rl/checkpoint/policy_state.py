"""A policy's weights, optimizer, schedule and random state in files: every rank writes its own, any number of ranks reads them.

A frozen policy, which has neither optimizer nor schedule, has weights alone.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from grpo_rl.checkpoint.files import Files, flush, write_file
from grpo_rl.checkpoint.manifest import TRAINING
from grpo_rl.checkpoint.tensors import HostMemory, Part, Shards, write_parts
from grpo_rl.errors import CheckpointError
from grpo_rl.models.lora import Adapters
from grpo_rl.models.optim import AVERAGE
from grpo_rl.models.sharded_load import is_first_replica, local_of, rows_of

_MOMENTS = ("step", "exp_avg", "exp_avg_sq", AVERAGE)


@dataclass(frozen=True, slots=True)
class Share:
    """The tensors that one rank writes into a checkpoint."""

    rank: int
    world_size: int
    num_optimizer_steps: int
    weights: dict[str, Part]
    moments: dict[str, Part]
    rng: dict[str, Part]
    frozen: bool = False
    """True where there are weights alone."""
    adapters: Adapters | None = None
    """The adapters that the weights are, where they are not the whole model's."""


def kept_parameters(policy: nn.Module) -> dict[str, Any]:
    """Return the parameters that a state consists of, by name: those that are trained, and of a frozen policy all.

    The frozen weights under adapters are the base model's, which are read from its own files.
    """
    trained = {name: parameter for name, parameter in policy.named_parameters() if parameter.requires_grad}
    return trained or dict(policy.named_parameters())


Training = tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]
"""The optimizer and the schedule of a policy that is trained."""


@torch.no_grad()  # with gradients a shard is looked up through autograd, which takes three times as long
def take(policy: nn.Module, training: Training | None, rank: int) -> Share:
    """This rank's rows of everything that decides the policy's future, of a frozen one of its weights; not a collective.

    Weights and moments are the ones in use, until the next optimizer step: see `copied`. The parameters must be
    sharded (see `fsdp.reshard`).
    """
    weights: dict[str, Part] = {}
    moments: dict[str, Part] = {}
    for name, parameter in kept_parameters(policy).items():
        _keep(weights, name, parameter, rank)
        for key, value in training[0].state.get(parameter, {}).items() if training else ():
            _keep(moments, f"{key}:{name}", value, rank)
    if training is None:
        return Share(rank, dist.get_world_size(), 0, weights, {}, {}, frozen=True)
    rng = {f"rng_{key}": Part(value, 0, tuple(value.shape)) for key, value in rng_state().items()}
    return Share(rank, dist.get_world_size(), training[1].last_epoch, weights, moments, rng, adapters=_adapters_of(policy))


def copied(share: Share, memory: HostMemory) -> Share:
    """The share in this host memory, where it stays what it is while training goes on."""
    return replace(share, weights=memory.copy("weights", share.weights), moments=memory.copy("moments", share.moments))


def write(folder: Path, share: Share) -> Files:
    """Write the share into `folder`, which is there; the files that were written, all of them flushed."""
    entries: Files = {}
    kinds = {"weights": share.weights} | ({} if share.frozen else {"optimizer": share.moments, "rng": share.rng})
    for kind, parts in kinds.items():
        path = _path(folder, kind, share.rank)
        entries[path.name] = write_parts(path, parts)
    if share.rank == 0:
        training: dict[str, Any] = {"num_optimizer_steps": share.num_optimizer_steps, "world_size": share.world_size}
        training |= {"frozen": True} if share.frozen else {}
        training |= {"lora": asdict(share.adapters)} if share.adapters is not None else {}
        entries[TRAINING] = write_file(folder / TRAINING, [json.dumps(training).encode()])
    flush(folder)
    return entries


def load(folder: Path, policy: nn.Module, training: Training | None, rank: int) -> None:
    """Restore what `write` wrote; every rank reads its own rows, whatever files they are in.

    Random states are per rank, so with another number of ranks they start from the run's seed again.

    Raises CheckpointError when names or shapes are not those of this policy.
    """
    noted = load_weights(folder, policy)
    if training is None:
        return
    optimizer, scheduler = training
    world_size = int(noted["world_size"])
    with Shards([_path(folder, "optimizer", number) for number in range(world_size)]) as shards:
        _load_optimizer(shards, policy, optimizer)
    set_schedule(scheduler, noted["num_optimizer_steps"])
    if world_size == dist.get_world_size():
        with Shards([_path(folder, "rng", rank)]) as shards:
            set_rng_state({name.removeprefix("rng_"): shards.whole(name) for name in shards.shapes})


@torch.no_grad()
def load_weights(folder: Path, policy: nn.Module) -> dict[str, Any]:
    """Restore the weights that `write` wrote, and return what else it noted. Raises as `load`."""
    training: dict[str, Any] = json.loads((folder / TRAINING).read_text(encoding="utf-8"))
    _check_adapters(folder, training.get("lora"), _adapters_of(policy))
    kept = kept_parameters(policy)
    with Shards([_path(folder, "weights", number) for number in range(int(training["world_size"]))]) as shards:
        _check_names(folder, shards.shapes, {name: tuple(p.shape) for name, p in kept.items()})
        for name, parameter in kept.items():
            local_of(parameter).copy_(shards.rows(name, *rows_of(parameter)) if parameter.dim() else shards.whole(name))
    return training


def weights_of(policy: nn.Module) -> dict[str, Tensor]:
    """Return a copy of this rank's share of the weights that are trained, of a frozen policy of all. Not a collective."""
    return {name: local_of(p.detach()).to("cpu", copy=True) for name, p in kept_parameters(policy).items()}


@torch.no_grad()
def put_weights(weights: dict[str, Tensor], policy: nn.Module) -> None:
    """Give a rank, of the same place in a group of the same size, the weights of another. Not a collective."""
    for name, parameter in kept_parameters(policy).items():
        local_of(parameter).copy_(weights[name])


def share_bytes(share: Share) -> int:
    """Size of the tensors in a share."""
    parts = [*share.weights.values(), *share.moments.values(), *share.rng.values()]
    return sum(part.tensor.numel() * part.tensor.element_size() for part in parts)


def state_bytes(policy: nn.Module, *, frozen: bool = False) -> int:
    """Return about how many bytes this rank writes: its rows of the weights and, unless frozen, of AdamW's two moments of each."""
    written = [p for p in kept_parameters(policy).values() if is_first_replica(p)]
    return sum((1 if frozen else 3) * local_of(p).numel() * p.element_size() for p in written)


def _path(folder: Path, kind: str, rank: int) -> Path:
    return folder / f"{kind}_rank{rank}.safetensors"


def _load_optimizer(shards: Shards, policy: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    names = {parameter: name for name, parameter in policy.named_parameters()}
    state: dict[int, dict[str, Any]] = {}
    for index, parameter in enumerate(one for group in optimizer.param_groups for one in group["params"]):
        stored = {key: f"{key}:{names[parameter]}" for key in _MOMENTS if f"{key}:{names[parameter]}" in shards.shapes}
        if stored:
            state[index] = {key: _moment(shards, name, parameter) for key, name in stored.items()}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _moment(shards: Shards, name: str, parameter: Any) -> Tensor:
    """The moment as the optimizer holds it: sharded as its parameter is; AdamW's step counter is a number."""
    if not shards.shapes[name]:
        return shards.whole(name)
    moment = torch.zeros_like(parameter, requires_grad=False)
    local_of(moment).copy_(shards.rows(name, *rows_of(parameter)))
    return moment


def _keep(into: dict[str, Part], name: str, tensor: Any, rank: int) -> None:
    """Note this rank's rows of the tensor. Of replicas the first writes; what every rank has as a whole is rank 0's to write."""
    if (not isinstance(tensor, DTensor) and rank != 0) or not is_first_replica(tensor):
        return
    rows = local_of(tensor).detach()
    start = rows_of(tensor)[0] if tensor.dim() else 0
    into[name] = Part(rows, start, tuple(tensor.shape))


def _adapters_of(policy: nn.Module) -> Adapters | None:
    return getattr(policy, "adapters", None)


def _check_adapters(folder: Path, stored: dict[str, Any] | None, own: Adapters | None) -> None:
    """Raise CheckpointError for adapters where the whole model is trained, for the reverse, and for adapters of another kind."""
    ways_out = "or start anew with trainer.resume_mode=disable or another trainer.experiment_name"
    key = "actor_rollout_ref.model.lora_rank"
    if own is None and stored is not None:
        raise CheckpointError(
            f"{folder} has LoRA adapters and no whole model, and this run trains all weights: set {key}={stored.get('rank')}, {ways_out}"
        )
    if own is not None and stored is None:
        raise CheckpointError(
            f"{folder} has a whole model and no LoRA adapters, and this run trains adapters ({key}={own.rank}): set {key}=0, {ways_out}"
        )
    if own is not None and stored is not None:
        own.check_fits(folder, stored)


def _check_names(folder: Path, stored: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]]) -> None:
    missing, extra = sorted(expected.keys() - stored.keys()), sorted(stored.keys() - expected.keys())
    shapes = sorted(name for name in expected.keys() & stored.keys() if stored[name] != expected[name])
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
