"""AdamW and its learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

from grpo_rl.config.schema.tree import OptimConfig


def make_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """Return AdamW (Loshchilov & Hutter 2019) with weight decay on matrices only."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.betas[0], config.betas[1]),
        eps=config.eps,
        fused=all(p.device.type in ("cuda", "cpu") for p in trained),
    )


def make_scheduler(
    optimizer: torch.optim.Optimizer, config: OptimConfig, total_steps: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """Return the schedule over `total_steps` optimizer steps; step once after every optimizer step."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lr_factor(config, total_steps))


def lr_factor(config: OptimConfig, total_steps: int) -> Callable[[int], float]:
    """Return the share of the peak learning rate at each optimizer step, counted from 0.

    Warm-up rises linearly and reaches 1 at step `warmup`; the first step is already above 0, so that no
    update is thrown away.
    """
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
