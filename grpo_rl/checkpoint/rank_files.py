"""One rank's part of a checkpoint: its rows of a policy's weights and optimizer, and its random state.

Every rank writes its own files; any number of ranks reads them. A frozen policy has weights alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from grpo_rl.background import has_ended, in_background
from grpo_rl.checkpoint.files import Files, flush, not_written, write_file
from grpo_rl.checkpoint.manifest import TRAINING
from grpo_rl.checkpoint.tensors import HostMemory, Part, Shards, write_parts
from grpo_rl.config.derived import COPIED_BYTES
from grpo_rl.errors import CheckpointError
from grpo_rl.frozen import frozen
from grpo_rl.models import fsdp
from grpo_rl.models.forward import PackedModel
from grpo_rl.models.lora import Adapters
from grpo_rl.models.optim import AVERAGE
from grpo_rl.models.shards import is_first_replica, local_of, rows_of

NICER = 4
"""The niceness that a writing thread adds. With more, it would give the interpreter's lock back late."""
_MOMENTS = ("step", "exp_avg", "exp_avg_sq", AVERAGE)

Training = tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]


class RankFiles:
    """Saves and loads a trained rank, or without an optimizer a frozen one. Nothing here is a collective."""

    def __init__(self, policy: PackedModel, training: Training | None, rank: int, patience_s: float) -> None:
        """`patience_s` bounds waits of a save for an earlier thread, and of an optimizer step for a copy."""
        self.policy, self.training, self.rank, self.patience_s = policy, training, rank, patience_s
        self._memory = HostMemory()
        self._copied = threading.Event()
        self._copied.set()
        if training is not None:
            training[0].register_step_pre_hook(self.wait_for_copy)
        self._saving: Future[Files] | None = None

    def save(self, folder: Path, *, background: bool = False, texts: Mapping[str, str] | None = None) -> None:
        """Write this rank's files into `folder`; in the background, in a thread while the training goes on.

        It writes the state of this moment: an optimizer step waits until it is copied, or written if more
        than COPIED_BYTES are in host memory. `texts` are files that rank 0 writes too. `saved` returns the
        outcome. Raises CheckpointError if an earlier save does not end.
        """
        if self._saving is not None and not has_ended(self._saving, self.patience_s):
            raise CheckpointError(f"the save before the one into {folder} is still writing; is the disk hanging?")
        fsdp.reshard(self.policy)
        # The thread takes the share out of the list: its tensors can be freed as soon as they are copied.
        shares = [take(self.policy, self.training, self.rank)]
        texts = texts if texts and self.rank == 0 else {}
        self._copied.clear()
        tensors = [part.tensor for parts in shares[0].parts.values() for part in parts.values()]
        on_gpu = [tensor.device for tensor in tensors if tensor.is_cuda]
        if not background or (not on_gpu and sum(tensor.nbytes for tensor in tensors) > COPIED_BYTES):
            self._saving = in_background("checkpoint", lambda: self._written(folder, shares.pop(), texts))
            self._saving.add_done_callback(lambda _: self._copied.set())
            if not background:
                has_ended(self._saving, self.patience_s)
            return
        # A stream whose copies wait for the GPU's work until now, and for none that the training starts after it.
        stream = torch.cuda.Stream(on_gpu[0]) if on_gpu else None
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(on_gpu[0]))
        self._saving = in_background("checkpoint", lambda: self._copied_and_written(folder, shares, texts, stream))

    def saved(self, wait_s: float = 0.0) -> Files | None:
        """The files of the last `save`; None if it is not done within `wait_s`. Raises CheckpointError."""
        if self._saving is None:
            return {}
        return self._saving.result(0) if has_ended(self._saving, wait_s) else None

    def num_bytes(self) -> int:
        """Return about how many bytes `save` writes: weights and, unless frozen, AdamW's two moments."""
        written = [p for p in kept_parameters(self.policy).values() if is_first_replica(p)]
        return (1 if self.training is None else 3) * sum(local_of(p).nbytes for p in written)

    def load(self, folder: Path) -> None:
        """With another number of ranks, random states start anew. Raises CheckpointError if shapes differ."""
        self.wait_for_copy()
        fsdp.reshard(self.policy)
        noted = load_weights(folder, self.policy)
        if self.training is None:
            return
        optimizer, scheduler = self.training
        world_size = int(noted["world_size"])
        with Shards([_path(folder, "optimizer", number) for number in range(world_size)]) as shards:
            _load_optimizer(shards, self.policy, optimizer)
        _set_schedule(scheduler, noted["num_optimizer_steps"])
        if world_size == dist.get_world_size():
            with Shards([_path(folder, "rng", self.rank)]) as shards:
                torch.set_rng_state(shards.whole("rng_cpu"))
                if "rng_cuda" in shards.shapes and torch.cuda.is_available():
                    torch.cuda.set_rng_state(shards.whole("rng_cuda"))

    def wait_for_copy(self, *_: Any) -> None:
        """Call it before anything changes what is being copied."""
        if not self._copied.wait(self.patience_s):
            raise CheckpointError(
                f"the state of rank {self.rank} was not copied for its checkpoint within {self.patience_s:.0f} s"
            )

    def _copied_and_written(
        self, folder: Path, shares: list[Share], texts: Mapping[str, str], stream: torch.cuda.Stream | None
    ) -> Files:
        try:
            with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
                share = copied(shares.pop(), self._memory)
            if stream is not None:
                stream.synchronize()
        except Exception as error:
            raise CheckpointError(f"cannot copy what {folder} is to hold: {type(error).__name__}: {error}") from error
        finally:
            self._copied.set()
        if sys.platform == "linux":  # elsewhere niceness is the whole process's
            with contextlib.suppress(OSError):
                os.nice(NICER)
        return self._written(folder, share, texts)

    def _written(self, folder: Path, share: Share, texts: Mapping[str, str]) -> Files:
        try:
            entries = {name: write_file(folder / name, [text.encode()]) for name, text in texts.items()}
            for kind, parts in share.parts.items():
                path = _path(folder, kind, self.rank)
                entries[path.name] = write_parts(path, parts)
            if self.rank == 0:
                entries[TRAINING] = write_file(folder / TRAINING, [json.dumps(share.noted).encode()])
            flush(folder)
            return entries
        except OSError as error:
            raise not_written(folder, error, self.num_bytes()) from error
        except Exception as error:
            raise CheckpointError(f"cannot write {folder}: {type(error).__name__}: {error}") from error


@frozen
class Share:
    parts: dict[str, dict[str, Part]]
    """Tensors by the kind of their file (`weights`, `optimizer`, `rng`) and by name."""
    noted: dict[str, Any]


def kept_parameters(policy: nn.Module) -> dict[str, Any]:
    """Return the parameters that a state consists of: the trained ones, of a frozen policy all."""
    trained = {name: parameter for name, parameter in policy.named_parameters() if parameter.requires_grad}
    return trained or dict(policy.named_parameters())


@torch.no_grad()  # with gradients a shard is looked up through autograd, which takes three times as long
def take(policy: nn.Module, training: Training | None, rank: int) -> Share:
    """This rank's rows of all that decides the policy's future, in use until the next optimizer step."""
    weights: dict[str, Part] = {}
    moments: dict[str, Part] = {}
    for name, parameter in kept_parameters(policy).items():
        _keep(weights, name, parameter, rank)
        for key, value in training[0].state.get(parameter, {}).items() if training else ():
            _keep(moments, f"{key}:{name}", value, rank)
    noted: dict[str, Any] = {"num_optimizer_steps": 0, "world_size": dist.get_world_size()}
    if training is None:
        return Share({"weights": weights}, noted | {"frozen": True})
    noted["num_optimizer_steps"] = training[1].last_epoch
    if (adapters := _adapters_of(policy)) is not None:
        noted["lora"] = asdict(adapters)
    random = {"rng_cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        random["rng_cuda"] = torch.cuda.get_rng_state()
    rng = {name: Part(state, 0, tuple(state.shape)) for name, state in random.items()}
    return Share({"weights": weights, "optimizer": moments, "rng": rng}, noted)


def copied(share: Share, memory: HostMemory) -> Share:
    parts = {
        kind: {name: replace(part, tensor=memory.keep((kind, name), part.tensor)) for name, part in parts.items()}
        for kind, parts in share.parts.items()
    }
    return replace(share, parts=parts)


@torch.no_grad()
def load_weights(folder: Path, policy: nn.Module) -> dict[str, Any]:
    """Return what was noted beside the weights. Raises CheckpointError if names or shapes differ."""
    noted: dict[str, Any] = json.loads((folder / TRAINING).read_text(encoding="utf-8"))
    _check_adapters(folder, noted.get("lora"), _adapters_of(policy))
    parameters = kept_parameters(policy)
    with Shards([_path(folder, "weights", number) for number in range(int(noted["world_size"]))]) as shards:
        _check_names(folder, shards.shapes, {name: tuple(p.shape) for name, p in parameters.items()})
        for name, parameter in parameters.items():
            local_of(parameter).copy_(shards.rows(name, *rows_of(parameter)) if parameter.dim() else shards.whole(name))
    return noted


def weights_of(policy: nn.Module) -> dict[str, Tensor]:
    return {name: local_of(p.detach()).to("cpu", copy=True) for name, p in kept_parameters(policy).items()}


@torch.no_grad()
def put_weights(weights: dict[str, Tensor], policy: nn.Module) -> None:
    """From a rank of the same place in a group of the same size."""
    for name, parameter in kept_parameters(policy).items():
        local_of(parameter).copy_(weights[name])


def _path(folder: Path, kind: str, rank: int) -> Path:
    return folder / f"{kind}_rank{rank}.safetensors"


def _load_optimizer(shards: Shards, policy: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    names = {parameter: name for name, parameter in policy.named_parameters()}
    state: dict[int, dict[str, Any]] = {}
    for index, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        stored = {key: name for key in _MOMENTS if (name := f"{key}:{names[parameter]}") in shards.shapes}
        if stored:
            state[index] = {key: _moment(shards, name, parameter) for key, name in stored.items()}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _moment(shards: Shards, name: str, parameter: Any) -> Tensor:
    """AdamW's step counter is a number, other moments are sharded as their parameter."""
    if not shards.shapes[name]:
        return shards.whole(name)
    moment = torch.zeros_like(parameter, requires_grad=False)
    local_of(moment).copy_(shards.rows(name, *rows_of(parameter)))
    return moment


def _keep(into: dict[str, Part], name: str, tensor: Any, rank: int) -> None:
    """Of replicas the first writes; what every rank has as a whole is rank 0's to write."""
    if (not isinstance(tensor, DTensor) and rank != 0) or not is_first_replica(tensor):
        return
    start = rows_of(tensor)[0] if tensor.dim() else 0
    into[name] = Part(local_of(tensor).detach(), start, tuple(tensor.shape))


def _adapters_of(policy: nn.Module) -> Adapters | None:
    return getattr(policy, "adapters", None)


def _check_adapters(folder: Path, stored: dict[str, Any] | None, adapters: Adapters | None) -> None:
    ways_out = "or start anew with trainer.resume_mode=disable or another trainer.experiment_name"
    key = "actor_rollout_ref.model.lora_rank"
    if adapters is not None and stored is not None:
        adapters.check_fits(folder, stored)
    elif stored is not None:
        raise CheckpointError(
            f"{folder} has LoRA adapters and no whole model, and this run trains all weights: set {key}={stored.get('rank')}, {ways_out}"
        )
    elif adapters is not None:
        raise CheckpointError(
            f"{folder} has a whole model and no LoRA adapters, and this run trains adapters ({key}={adapters.rank}): set {key}=0, {ways_out}"
        )


def _check_names(folder: Path, stored: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]]) -> None:
    missing, extra = sorted(expected.keys() - stored.keys()), sorted(stored.keys() - expected.keys())
    shapes = sorted(name for name in expected.keys() & stored.keys() if stored[name] != expected[name])
    if missing or extra or shapes:
        raise CheckpointError(
            f"{folder} holds another model: missing {missing[:3]}, unknown {extra[:3]}, other shapes {shapes[:3]}. "
            "Use the model it was trained with, or trainer.resume_mode=disable and another trainer.experiment_name."
        )


def _set_schedule(scheduler: torch.optim.lr_scheduler.LambdaLR, num_steps: int) -> None:
    rates = [base * factor(num_steps) for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler.last_epoch, scheduler._last_lr = num_steps, rates
