"""AdamW (Loshchilov & Hutter 2019), Muon, and the schedule of the learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from grpo_rl.config.schema.tree import OptimConfig
from grpo_rl.models.fsdp import full_tensor
from grpo_rl.models.load import decoder_layers
from grpo_rl.models.shards import local_of, rows_of


def make_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    if config.optimizer == "adamw":
        return _adamw(trained, config)
    hidden = {id(p) for layer in decoder_layers(model.lm) for p in layer.parameters() if p.ndim >= 2}
    return Muon([p for p in trained if id(p) in hidden], _adamw([p for p in trained if id(p) not in hidden], config), config)


def _adamw(parameters: list[nn.Parameter], config: OptimConfig) -> torch.optim.AdamW:
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.betas[0], config.betas[1]),
        eps=config.eps,
        fused=all(p.device.type in ("cuda", "cpu") for p in parameters),
    )


class Muon(torch.optim.Optimizer):
    """Muon for the matrices of the transformer blocks, AdamW for embeddings, head and vectors, at one
    learning rate.

    The momentum of a matrix [m, n] is brought close to the nearest matrix with orthogonal rows or columns,
    times 0.2 sqrt(max(m, n)), so that an update is about as large as AdamW's (Jordan et al., "Muon", 2024;
    arXiv 2502.16982, section 2.2, eq. 4). Each matrix of a stack of experts is taken by itself. Every rank
    gathers the matrix, computes the same update and keeps its rows.
    """

    def __init__(self, matrices: list[nn.Parameter], others: torch.optim.AdamW, config: OptimConfig) -> None:
        self._others = others
        group = {"params": matrices, "weight_decay": config.weight_decay, "momentum": config.betas[0]}
        super().__init__([group, *others.param_groups], {"lr": config.lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        # Loading a state replaces both, so that they are shared anew here.
        self._others.state, self._others.param_groups = self.state, self.param_groups[1:]
        self._others.step()
        group = self.param_groups[0]
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            momentum = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
            momentum.lerp_(parameter.grad, 1.0 - group["momentum"])
            ahead = parameter.grad.lerp(momentum, group["momentum"])  # Nesterov's
            update = orthogonal(full_tensor(ahead))
            scale = 0.2 * math.sqrt(max(parameter.shape[-2:]))
            parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
            rows = local_of(parameter)
            rows.sub_(update[slice(*rows_of(parameter))].to(rows), alpha=group["lr"] * scale)


AVERAGE = "average"


def keep_average(optimizer: torch.optim.Optimizer, decay: float) -> None:
    """Keep a moving average of the trained parameters, which starts as they are after the first step."""

    @torch.no_grad()
    def update(*_: object) -> None:
        for parameter, state in optimizer.state.items():
            if AVERAGE in state:
                state[AVERAGE].lerp_(parameter.detach(), 1.0 - decay)
            else:
                state[AVERAGE] = parameter.detach().clone()

    optimizer.register_step_post_hook(update)


@contextmanager
def averaged(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let the parameters be their moving averages, if there are any, inside of this context."""
    with torch.no_grad():
        pairs = [
            (local_of(parameter), local_of(state[AVERAGE])) for parameter, state in optimizer.state.items() if AVERAGE in state
        ]
        saved_values = [parameter.clone() for parameter, _ in pairs]
        for parameter, average in pairs:
            parameter.copy_(average)
        try:
            yield
        finally:
            for (parameter, _), values in zip(pairs, saved_values, strict=True):
                parameter.copy_(values)


def orthogonal(matrix: Tensor) -> Tensor:
    """Return each matrix [..., m, n] with its singular values brought near to 1 (0.7 to 1.2).

    Five steps of Jordan et al.'s quintic Newton-Schulz iteration (2024), in bfloat16 on a GPU.
    """
    x = matrix.to(torch.bfloat16 if matrix.is_cuda else torch.float32)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


def lr_factor(config: OptimConfig, total_steps: int) -> Callable[[int], float]:
    """Warm-up rises linearly from above 0 at step 0 and reaches 1 at step `warmup`."""
    warmup = config.lr_warmup_steps if config.lr_warmup_steps >= 0 else round(config.lr_warmup_steps_ratio * total_steps)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        if config.lr_scheduler_type == "constant":
            return 1.0
        progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
        decay = 1.0 - progress if config.lr_scheduler_type == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return config.min_lr_ratio + (1.0 - config.min_lr_ratio) * decay

    return factor
