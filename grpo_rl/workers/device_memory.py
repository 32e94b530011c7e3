"""The part of a model and its optimizer that lies on the device: more in a phase, less between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from grpo_rl import freed_memory
from grpo_rl.checkpoint.tensors import HostMemory
from grpo_rl.models import fsdp
from grpo_rl.models.forward import PackedModel


@dataclass(eq=False)
class DeviceMemory:
    """Moves a model and its optimizer between the device and host memory.

    If other processes wait for the memory (`gives_back`, on GPUs), a phase ends by giving back what it took.
    With `in_host_memory` parameters and moments never leave host memory; FSDP brings each layer's to the
    device.
    """

    model: PackedModel
    device: torch.device
    optimizer: torch.optim.Optimizer | None = None
    param_offload: bool = False
    optimizer_offload: bool = False
    in_host_memory: bool = False

    def __post_init__(self) -> None:
        self.gives_back = self.device.type == "cuda"
        self._host = HostMemory()
        self._away = False
        """True between `vacate` and `occupy`."""

    def load_weights(self) -> None:
        """Without optimizer state, which a pass without gradients does not read."""
        if self.param_offload or self._away:
            self.move_weights(self.device)

    def load_all(self) -> None:
        self.load_weights()
        # Also if it is configured to stay there: a checkpoint is restored into the memory where the parameters are.
        if self.gives_back or self.optimizer_offload:
            self.move_moments(self.device)

    def release(self) -> None:
        """End a phase: drop gathered parameters, move what is configured to host memory, free caches."""
        if self.gives_back or self.param_offload:
            # The root keeps embedding, norm and head whole after a forward pass, and with one rank every layer does.
            fsdp.reshard(self.model)
        if self.param_offload:
            self.move_weights(torch.device("cpu"))
        if self.optimizer_offload:
            self.move_moments(torch.device("cpu"))
        self.free_cache()

    def vacate(self) -> None:
        fsdp.reshard(self.model)
        self.move_weights(torch.device("cpu"))
        self.move_moments(torch.device("cpu"))
        self.free_cache()
        self._away = True

    def occupy(self) -> None:
        """Bring back what the configuration keeps on the device between phases."""
        self._away = False
        if not self.param_offload:
            self.move_weights(self.device)
        if not self.optimizer_offload:
            self.move_moments(self.device)

    def move_weights(self, device: torch.device) -> None:
        """The parameters stay the same objects, which the optimizer refers to."""
        if self.in_host_memory:
            return
        # Under FSDP `_apply` also tells the sharding where its shards are now, as `Module.to` does.
        self.model._apply(lambda tensor: self._moved(tensor, device, id(tensor), isinstance(tensor, nn.Parameter)))
        _finish(device)

    def move_moments(self, device: torch.device) -> None:
        if self.optimizer is None or self.in_host_memory:
            return
        for parameter, state in self.optimizer.state.items():
            for key, value in state.items():
                # AdamW's step counter stays where AdamW put it.
                if isinstance(value, Tensor) and key != "step":
                    state[key] = self._moved(value, device, (id(parameter), key), True)
        _finish(device)

    def _moved(self, tensor: Tensor, device: torch.device, key: object, has_place: bool) -> Tensor:
        """A parameter or moment that leaves a GPU has its own place in host memory."""
        if device.type == "cpu" and tensor.device.type != "cpu" and has_place:
            return in_host_memory(tensor, self._host, key)
        return tensor.to(device, non_blocking=device.type != "cpu")

    def free_cache(self) -> None:
        if self.device.type == "cpu":
            freed_memory.give_back()
        else:
            # Memory that another process had mapped is kept until this process asks whether it still does.
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()


class OnDevice:
    """A rank whose models leave the device while an engine starts there, and come back."""

    memories: Sequence[DeviceMemory]

    def vacate(self) -> None:
        for memory in self.memories:
            memory.vacate()

    def occupy(self) -> None:
        for memory in self.memories:
            memory.occupy()


def in_host_memory(tensor: Tensor, host: HostMemory, key: object) -> Tensor:
    """Return a tensor whose values, or whose rank's slice of them, are in kept host memory."""
    if not isinstance(tensor, DTensor):
        return host.keep(key, tensor.detach())
    # As FSDP makes its own parameters: the slice with the description of the whole, which does not depend on the device.
    return DTensor(host.keep(key, tensor.to_local().detach()), tensor._spec, requires_grad=False)


def _finish(device: torch.device) -> None:
    if device.type == "cpu" and torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()
