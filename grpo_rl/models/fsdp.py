"""FSDP2 around a policy: sharding, loading into shards, and whole tensors out of them."""

from __future__ import annotations

import collections
import functools
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from grpo_rl.models import lora
from grpo_rl.models.experts import stored_tensors
from grpo_rl.models.forward import PackedModel
from grpo_rl.models.load import decoder_layers, save_lm
from grpo_rl.models.sequence_parallel import consecutive_ranks, group_of_rank
from grpo_rl.models.sharded_load import is_rearranged, name_in_files
from grpo_rl.models.shards import local_of

SHARD_BYTES = 5 << 30
"""The largest file of an exported model, and about the host memory that an export needs."""


def mesh_of(device_type: str, group_size: int, timeout_s: float) -> DeviceMesh:
    """Groups of `group_size` consecutive ranks (below 1: one, as verl's fsdp_size). A collective."""
    world_size = dist.get_world_size()
    if group_size < 1 or group_size >= world_size:
        return init_device_mesh(device_type, (world_size,))
    ranks = consecutive_ranks(group_size, "sharding over groups of")
    # Groups of our own: those that a mesh makes wait as long as the library's default says.
    groups = [group_of_rank(rows, timeout_s) for rows in (ranks.T, ranks)]
    return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=("replicate", "shard"))


def shard(
    policy: PackedModel,
    mesh: DeviceMesh,
    compute_dtype: torch.dtype,
    *,
    reshard_after_forward: bool = True,
    in_host_memory: bool = False,
    forward_prefetch: bool = False,
) -> None:
    """Shard the policy over the last dimension of `mesh`, with gradients summed over all its ranks.

    Layers compute in `compute_dtype`; all else is float32. `in_host_memory`: parameters, gradients and
    moments lie in host memory, and the optimizer steps there. `forward_prefetch`: gather a layer's parameters
    when the layer before begins.
    """
    # The inputs are cast by a hook of ours: up to torch 2.12 FSDP leaves those of a layer that is recomputed as they are.
    layer_precision = MixedPrecisionPolicy(compute_dtype, torch.float32, cast_forward_inputs=False)
    if compute_dtype == torch.float32:
        layer_precision = MixedPrecisionPolicy()
    is_single_shard = mesh.size(mesh.ndim - 1) == 1
    # Only from pinned memory do copies to a GPU run beside its kernels.
    rests = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if in_host_memory else OffloadPolicy()
    layers: list[Any] = decoder_layers(policy.lm)
    for layer in layers:
        # One rank keeps a layer's copy between passes, except of weights that rest in the computing type.
        reshard = rests_in_half(layer, compute_dtype) if is_single_shard else reshard_after_forward
        fully_shard(layer, mesh=mesh, mp_policy=layer_precision, reshard_after_forward=reshard, offload_policy=rests)
        if compute_dtype != torch.float32:
            layer.register_forward_pre_hook(functools.partial(_cast_inputs, compute_dtype), with_kwargs=True)
    fully_shard(policy, mesh=mesh, reshard_after_forward=False, offload_policy=rests)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            # Losses carry global denominators: gradients of ranks add up. One rank would divide in a pass of its own.
            if mesh.size() > 1:
                module.set_gradient_divide_factor(1.0)
            # A plain sum: gloo has no reduction that multiplies first.
            module.set_force_sum_reduction_for_comms(True)
    if forward_prefetch:
        for layer, following in itertools.pairwise(layers):
            layer.set_modules_to_forward_prefetch([following])


def _cast_inputs(
    dtype: torch.dtype, layer: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return tree_map_only(Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, (inputs, options))


def rests_in_half(layer: nn.Module, compute_dtype: torch.dtype) -> bool:
    if compute_dtype == torch.float32:
        return False
    return any(parameter.dtype == compute_dtype and not parameter.requires_grad for parameter in layer.parameters())


def materialize_from(
    policy: PackedModel, device: torch.device, read: Callable[[], None], *, in_host_memory: bool = False
) -> None:
    """What no file has starts at 0; buffers keep their values. Not a collective."""
    _to_empty(policy, device, in_host_memory)
    with torch.no_grad():
        for parameter in policy.parameters():
            local_of(parameter).zero_()
    read()


def _to_empty(policy: PackedModel, device: torch.device, in_host_memory: bool) -> None:
    """Buffers are on the device and keep their values."""
    place = torch.device("cpu") if in_host_memory else device
    policy._apply(lambda x: torch.empty_like(x, device=place) if isinstance(x, nn.Parameter) else x.to(device))


def materialize(policy: PackedModel, whole: PackedModel | None, device: torch.device, *, in_host_memory: bool) -> None:
    """Give every rank its part of rank 0's `whole` policy, and its buffers that are in no state dict."""
    _to_empty(policy, device, in_host_memory)
    full_state: dict[str, Any] = {} if whole is None else whole.state_dict()
    set_model_state_dict(policy, full_state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    buffers = {} if whole is None else dict(whole.named_buffers())
    for name, buffer in policy.named_buffers():
        if name in buffers:
            buffer.copy_(buffers[name])
        dist.broadcast(buffer, src=0)


def reshard(policy: PackedModel) -> None:
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def full_tensor(tensor: Any) -> Tensor:
    """Return the whole of a tensor. A collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def named_full_tensors(
    policy: PackedModel, *, device: torch.device | None = None, dtype: torch.dtype | None = None, aliases: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """Yield Hugging Face names with whole tensors, with `aliases` a tied LM head too. A collective.

    All ranks ask for the same tensors in the same order; one is whole at a time. With one rank they are the
    parameters themselves, not copies. Adapters are merged, in new tensors.
    """
    reshard(policy)
    embedding = policy.lm.get_input_embeddings().weight
    adapted = {f"{name}.base_layer.weight": layer for name, layer in lora.adapted_layers(policy.lm).items()}
    tied: Tensor | None = None
    for name, tensor in policy.lm.state_dict(keep_vars=True).items():
        if lora.is_adapter(name):
            continue
        if tensor is embedding and tied is not None:
            if aliases:
                yield name, tied
            continue
        layer = adapted.get(name)
        whole_tensor = _whole(tensor.detach() if layer is None else _merged(tensor.detach(), layer, device), device, dtype)
        if tensor is embedding:
            tied = whole_tensor
        yield name_in_files(name), whole_tensor
        del whole_tensor  # before the next one is put together


def whole_adapters(policy: PackedModel, device: torch.device) -> dict[str, Tensor]:
    reshard(policy)
    named = policy.lm.state_dict(keep_vars=True).items()
    return {name: _whole(tensor.detach(), device, None).to("cpu") for name, tensor in named if lora.is_adapter(name)}


def save_model(
    policy: PackedModel,
    folder: Path,
    device: torch.device | None = None,
    *,
    writes: bool = True,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a Hugging Face folder with float32 weights, by the rank that `writes`. A collective.

    No more than a file and a tensor is in host memory, unless transformers rearranges weights. Errors are
    raised at the end.
    """
    lm: Any = policy.lm
    if is_rearranged(lm):
        state = {name: tensor.to("cpu") for name, tensor in named_full_tensors(policy, device=device) if writes}
        if writes:
            save_lm(lm, folder, state)
        return
    named = stored_tensors(named_full_tensors(policy, device=device, aliases=False))
    try:
        if writes:
            save_lm(lm, folder, {})  # all but the weights
            _write_shards(named, folder, shard_bytes)
    finally:
        collections.deque(named, maxlen=0)  # the others wait in every gather that this rank leaves out


def _write_shards(named: Iterable[tuple[str, Tensor]], folder: Path, shard_bytes: int) -> None:
    files: list[list[str]] = []
    shard: dict[str, Tensor] = {}
    size = total = 0

    def write() -> None:
        files.append(sorted(shard))
        save_file(shard, folder / f"shard-{len(files)}", metadata={"format": "pt"})
        shard.clear()

    for name, tensor in named:
        if shard and size + tensor.nbytes > shard_bytes:
            write()
            size = 0
        shard[name] = tensor.detach().to("cpu").contiguous()
        size, total = size + tensor.nbytes, total + tensor.nbytes
    write()
    names = [f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)]
    if len(files) == 1:
        names = ["model.safetensors"]
    for number, name in enumerate(names, start=1):
        (folder / f"shard-{number}").rename(folder / name)
    if len(files) > 1:
        weight_map = {tensor: name for name, held in zip(names, files, strict=True) for tensor in held}
        index = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2, sort_keys=True)
        (folder / "model.safetensors.index.json").write_text(index + "\n", encoding="utf-8")


def _merged(weight: Any, layer: Any, device: torch.device | None) -> Any:
    """Return `W + (alpha / rank) B A` in float32; only A, the smallest, is gathered. A collective."""
    a_RI, b_OR = lora.factors(layer)
    whole_RI = _whole(a_RI.detach(), device, None)
    rows, factor_rows = (local_of(tensor.detach()).to(device or tensor.device) for tensor in (weight, b_OR))
    return _like(weight, torch.addmm(rows.float(), factor_rows, whole_RI, alpha=lora.scaling(layer)))


def _like(tensor: Any, rows: Tensor) -> Any:
    if not isinstance(tensor, DTensor):
        return rows
    placed = tensor.device_mesh, tensor.placements
    return DTensor.from_local(rows, *placed, run_check=False, shape=tensor.shape, stride=tensor.stride())


def _whole(tensor: Any, device: torch.device | None, dtype: torch.dtype | None) -> Tensor:
    """Return the whole of a tensor on this device and in this type (None: float32). A collective."""
    target_dtype = (dtype or torch.float32) if tensor.is_floating_point() else tensor.dtype
    if not isinstance(tensor, DTensor):
        return tensor.to(device=device or tensor.device, dtype=target_dtype)
    shard = tensor.to_local()
    cast = shard.to(device=device or shard.device, dtype=target_dtype)
    return (tensor if cast is shard else _like(tensor, cast)).full_tensor()
