"""One rank's share of a policy's state as plain host tensors, from which a new process goes on bit by bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from grpo_rl.checkpoint.policy_state import kept_parameters, rng_state, set_rng_state, set_schedule
from grpo_rl.models.sharded_load import local_of

RankState = dict[str, Any]


def num_bytes(policy: nn.Module, *, moments: bool = True) -> int:
    """Size of this rank's share: its weights, and with `moments` AdamW's two of each, in their own type."""
    kept = kept_parameters(policy).values()
    return sum((3 if moments else 1) * local_of(p).numel() * p.element_size() for p in kept)


def weights_of(policy: nn.Module) -> dict[str, Tensor]:
    """Return a copy of this rank's share of the weights that are trained, of a frozen policy of all. Not a collective."""
    return {name: _copy(parameter) for name, parameter in kept_parameters(policy).items()}


@torch.no_grad()
def put_weights(weights: dict[str, Tensor], policy: nn.Module) -> None:
    """Give a rank, of the same place in a set of the same size, the weights of another. Not a collective."""
    for name, parameter in kept_parameters(policy).items():
        local_of(parameter).copy_(weights[name])


def take(policy: nn.Module, optimizer: torch.optim.Optimizer, scheduler: torch.optim.lr_scheduler.LambdaLR) -> RankState:
    """A copy of everything that decides this rank's future. Not a collective."""
    moments: dict[str, dict[str, Tensor]] = {}
    for name, parameter in kept_parameters(policy).items():
        moments[name] = {key: _copy(value) for key, value in optimizer.state.get(parameter, {}).items()}
    return {"weights": weights_of(policy), "moments": moments, "num_steps": scheduler.last_epoch, "rng": rng_state()}


@torch.no_grad()
def put_back(
    state: RankState, policy: nn.Module, optimizer: torch.optim.Optimizer, scheduler: torch.optim.lr_scheduler.LambdaLR
) -> None:
    """Give a newly built rank, of the same place in a group of the same size, what `take` took. Not a collective."""
    put_weights(state["weights"], policy)
    by_parameter = {parameter: name for name, parameter in policy.named_parameters()}
    entries: dict[int, dict[str, Any]] = {}
    ordered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in enumerate(ordered):
        stored = state["moments"][by_parameter[parameter]]
        if stored:
            entries[index] = {key: _like(value, parameter) for key, value in stored.items()}
    optimizer.load_state_dict({"state": entries, "param_groups": optimizer.state_dict()["param_groups"]})
    set_schedule(scheduler, state["num_steps"])
    set_rng_state(state["rng"])


def _copy(tensor: Any) -> Tensor:
    return local_of(tensor.detach()).to("cpu", copy=True)


def _like(value: Tensor, parameter: Any) -> Tensor:
    """The moment as the optimizer holds it: sharded as its parameter is; AdamW's step counter is a number."""
    if value.dim() == 0:
        return value
    like = torch.zeros_like(parameter)
    local_of(like).copy_(value)
    return like
