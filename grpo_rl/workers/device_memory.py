"""The part of a model and its optimizer that lies on the device: more while a phase of the step works, less between phases.

Several roles and the rollout engine may share one GPU, so a phase is over only when it has given back what it took. At rest
a rank keeps its shards, and of these only what the configuration leaves on the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from grpo_rl.models import fsdp
from grpo_rl.models.forward import PackedModel


class DeviceMemory:
    """Moves a model and its optimizer between the device and host memory.

    `gives_back` says whether other processes wait for the device's memory; by default those of a GPU do. On a CPU a phase
    leaves the gathered parameters where they are: the next one reads them again, and nothing else wants their memory.
    """

    def __init__(
        self,
        model: PackedModel,
        device: torch.device,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        param_offload: bool,
        optimizer_offload: bool = False,
        gives_back: bool | None = None,
    ) -> None:
        self.model, self.device, self.optimizer = model, device, optimizer
        self.param_offload, self.optimizer_offload = param_offload, optimizer_offload
        self.gives_back = device.type == "cuda" if gives_back is None else gives_back

    # ---- what a phase calls ------------------------------------------------------------------------------

    def load_weights(self) -> None:
        """Bring the parameters to the device, and nothing else: a pass without gradients reads no optimizer state."""
        if self.param_offload:
            self.move_weights(self.device)

    def load_all(self) -> None:
        """Bring everything to the device that an optimizer step reads."""
        self.load_weights()
        # Also where it is configured to stay there: a checkpoint is restored into the memory where the parameters are.
        if self.gives_back or self.optimizer_offload:
            self.move_moments(self.device)

    def release(self) -> None:
        """End a phase: drop gathered parameters, move what is configured to host memory, free what the allocator holds."""
        if self.gives_back or self.param_offload:
            # The root keeps embedding, norm and head whole after a forward pass, and with one rank every layer does.
            fsdp.reshard(self.model)
        if self.param_offload:
            self.move_weights(torch.device("cpu"))
        if self.optimizer_offload:
            self.move_moments(torch.device("cpu"))
        self.free_cache()

    # ---- what the controller asks for while an engine is built on this device -----------------------------

    def vacate(self) -> None:
        """Move everything to host memory, whatever the configuration keeps on the device."""
        fsdp.reshard(self.model)
        self.move_weights(torch.device("cpu"))
        self.move_moments(torch.device("cpu"))
        self.free_cache()

    def occupy(self) -> None:
        """Bring back what the configuration keeps on the device between phases."""
        if not self.param_offload:
            self.move_weights(self.device)
        if not self.optimizer_offload:
            self.move_moments(self.device)

    # ---- the moves ---------------------------------------------------------------------------------------

    def move_weights(self, device: torch.device) -> None:
        """Move this rank's shards, and buffers. The parameters stay the same objects, which the optimizer refers to."""
        move_module(self.model, device)

    def move_moments(self, device: torch.device) -> None:
        """Move the optimizer's moments."""
        if self.optimizer is not None:
            move_optimizer(self.optimizer, device)

    def free_cache(self) -> None:
        """Give memory that the allocator holds and nothing uses back to the device."""
        if self.device.type == "cuda":
            # Memory that another process had mapped is kept until this process asks whether it still does.
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()


def move_module(model: nn.Module, device: torch.device) -> None:
    """Move parameters and buffers to a device."""
    model.to(device)


def move_optimizer(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move the optimizer's moments to a device."""
    for state in optimizer.state.values():
        for key, value in state.items():
            # AdamW's step counter stays where AdamW put it.
            if isinstance(value, Tensor) and key != "step":
                state[key] = _moved(value, device)


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device)
