"""A sharded policy in one process of a worker group: what the actor and the reference have in common."""

from __future__ import annotations

import datetime
import functools
import ipaddress
import os
import socket
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from grpo_rl.algos.losses.distillation import NEVER
from grpo_rl.checkpoint.files import Files
from grpo_rl.checkpoint.rank_files import RankFiles
from grpo_rl.columns import Column, values
from grpo_rl.config.derived import lm_head_chunk
from grpo_rl.gpu_allocator import use_expandable_segments
from grpo_rl.models import attention, fsdp, load, lora
from grpo_rl.models.forward import PackedModel, PolicyModel
from grpo_rl.models.packing import Sequences
from grpo_rl.models.sequence_parallel import SequenceGroup
from grpo_rl.models.sharded_load import WeightFiles
from grpo_rl.types import Batch
from grpo_rl.workers.specs import PolicySpec, Rank, Rows

M = TypeVar("M", bound=PackedModel)


def join_set(rank: Rank, *, in_host_memory: bool = False) -> torch.device:
    """Return this process's device. NCCL and gloo use the interface of Ray's address for the machine.

    For gradients in host memory, ranks of GPUs have gloo too: their norm is added up there.
    """
    if rank.deterministic:
        torch.use_deterministic_algorithms(True)
    device = torch.device(rank.device, 0) if rank.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        use_expandable_segments()
    if rank.world_size == 1 and dist.is_initialized():  # several roles of one rank each, in one process
        return device
    interface = interface_of(rank.address)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        # By itself NCCL takes this for the beginning of a name.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
    timeout = datetime.timedelta(seconds=rank.timeout_s)
    dist.init_process_group(
        ("cpu:gloo,cuda:nccl" if in_host_memory else "nccl") if device.type == "cuda" else "gloo",
        # The ranks come to it while others still start.
        store=_store(rank, datetime.timedelta(seconds=rank.patience_s)),
        rank=rank.rank,
        world_size=rank.world_size,
        timeout=timeout,
    )
    return device


def interface_of(address: str) -> str | None:
    """gloo's own choice is that of the machine's name, on Debian and Ubuntu the unreachable 127.0.1.1."""
    target_address = ipaddress.ip_address(address)
    for name, addresses in psutil.net_if_addrs().items():
        for entry in addresses:
            if entry.family in (socket.AF_INET, socket.AF_INET6) and ipaddress.ip_address(entry.address) == target_address:
                return name
    return None


def _store(rank: Rank, timeout: datetime.timedelta) -> dist.TCPStore:
    """At rank 0's address alone: torch's own listens on all interfaces, and answers any client."""
    place = rank.master_address, rank.master_port
    if rank.rank != 0:
        return dist.TCPStore(*place, rank.world_size, False, timeout)
    listener = socket.create_server(place, family=socket.AF_INET6 if ":" in rank.master_address else socket.AF_INET)
    return dist.TCPStore(*place, rank.world_size, True, timeout, master_listen_fd=listener.detach())


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    return torch.bfloat16 if name == "bfloat16" or (name == "auto" and device.type == "cuda") else torch.float32


def build_policy(spec: PolicySpec, rank: Rank, device: torch.device) -> PolicyModel:
    precision: Any = spec.model.lm_head_precision
    if precision == "auto":
        precision = "tf32" if device.type == "cuda" else "float32"
    adapts = spec.train and spec.model.lora_rank > 0

    def wrap(lm: Any) -> PolicyModel:
        if adapts:
            lora.add_adapters(lm, spec.model)
        chunk_tokens = lm_head_chunk(spec.model.lm_head_chunk_tokens, len(lm.get_output_embeddings().weight))
        return PolicyModel(lm, temperature=spec.temperature, chunk_tokens=chunk_tokens, precision=precision)

    policy = build_sharded(spec, rank, device, wrap)
    if adapts:
        lora.initialize(policy.lm, spec.seed)
        if spec.model.lora_adapter_path is not None:
            lora.load_adapter(policy.lm, spec.model)
        policy.adapters = lora.describe(policy.lm, spec.model)
    return policy


def build_sharded(
    spec: PolicySpec,
    rank: Rank,
    device: torch.device,
    wrap: Callable[[Any], M],
    read: Callable[[bool], Any] | None = None,
    new: Sequence[str] = (),
) -> M:
    """`read` gives another model, on meta or not, of whose weights those in `new` may be missing, and are 0 then."""
    model, is_single_rank = spec.model, rank.world_size == 1
    attention.choose_kernel(model.flash_attention)
    read = read or functools.partial(language_model, spec)
    lm = read(not is_single_rank)
    if spec.train and model.enable_gradient_checkpointing is not False:
        load.recompute_layers(lm, inputs_in_host_memory=model.enable_activation_offload)
    if spec.compiled:
        load.compile_layers(lm)
    policy = wrap(lm)
    policy.train(spec.train)
    adapters = [name for name, _ in lm.named_parameters() if lora.is_adapter(name)]
    if not adapters:  # which are all that is trained if there are any
        policy.requires_grad_(spec.train)
    computes_in = compute_dtype(spec.dtype, device)
    if adapters and computes_in == torch.bfloat16:
        _keep_as_stored(lm, model.path, adapters)
    if is_single_rank:
        policy.to(device)
    fsdp.shard(
        policy,
        fsdp.mesh_of(device.type, spec.shard_ranks, rank.timeout_s),
        computes_in,
        reshard_after_forward=spec.reshard_after_forward,
        in_host_memory=spec.in_host_memory,
        forward_prefetch=spec.forward_prefetch,
    )
    policy.sequence_group = SequenceGroup.join(spec.sequence_ranks, rank.timeout_s)
    if is_single_rank:
        return policy
    # The folder's weights. No collective is entered meanwhile.
    files = WeightFiles.find(model.path)
    if files is not None and files.fits(lm, [*new, *adapters]):
        fsdp.materialize_from(policy, device, lambda: files.read_into(lm), in_host_memory=spec.in_host_memory)
        wait_for_all(rank)
        return policy
    # transformers has to rearrange the files' weights, which one rank reads.
    full_policy = wrap(read(False)) if rank.rank == 0 else None
    wait_for_all(rank)
    fsdp.materialize(policy, full_policy, device, in_host_memory=spec.in_host_memory)
    return policy


def _keep_as_stored(lm: Any, path: str, adapters: Sequence[str]) -> None:
    """Blocks' frozen weights stay in bfloat16: the same bits. Embedding, norm and head are float32."""
    files = WeightFiles.find(path)
    if files is None or not files.fits(lm, adapters):
        return
    stored = {id(parameter) for parameter in files.stored_as(lm, "BF16")}
    for layer in load.decoder_layers(lm):
        for parameter in layer.parameters():
            if id(parameter) in stored:
                parameter.data = parameter.data.to(torch.bfloat16)


def wait_for_all(rank: Rank) -> None:
    """Not a collective, whose time is limited otherwise."""
    store = dist.distributed_c10d._get_default_store()
    place = store.add("here", 1) - 1
    # Each time the whole set has passed makes another key.
    time_through = place // rank.world_size
    if place % rank.world_size == rank.world_size - 1:
        store.set(f"all here {time_through}", "")
    store.wait([f"all here {time_through}"], datetime.timedelta(seconds=rank.patience_s))


def language_model(spec: PolicySpec, on_meta: bool = False) -> Any:
    model, key = spec.model, spec.path_key
    config = load.load_config(model.path, trust_remote_code=model.trust_remote_code, override=model.override_config, key=key)
    return load.load_lm(model.path, config, trust_remote_code=model.trust_remote_code, on_meta=on_meta, key=key)


def optional_values(column: Column | None) -> Tensor | None:
    return None if column is None else values(column)


def rows_of(shard: Batch, rows: Rows) -> Batch | None:
    return shard.select(list(rows)) if rows else None


def sequences_of(batch: Batch | None, device: torch.device, *, share_prompts: bool) -> Sequences:
    """None gives two untrained tokens: a rank without work enters FSDP's collectives all the same."""
    if batch is None:
        nothing = torch.zeros(0, dtype=torch.long)
        zero = torch.zeros(1, dtype=torch.long)
        return Sequences.of(torch.zeros(2, dtype=torch.long), zero + 2, nothing, zero, device)
    return Sequences.of(
        values(batch.token_ids_S),
        batch.sequence_lengths_N,
        batch.positions(),
        batch.trained_lengths_N,
        device,
        optional_values(batch.support_counts_T),
        optional_values(batch.support_ids_M),
        batch.group_N if share_prompts else None,
        batch.experts_S,
    )


class Teaches:
    device: torch.device
    share_prompts: bool
    _distance = 0.0, 0

    @torch.no_grad()
    def taught(
        self,
        policy: PolicyModel,
        shard: Batch,
        micro_batches: Sequence[Rows],
        want_hidden: bool,
        top: tuple[int, int] | None = None,
    ) -> dict[str, Tensor]:
        """On the CPU. `top`: the so many likeliest tokens, of the first so many ids."""
        pieces: dict[str, list[Tensor]] = defaultdict(list)
        for rows in micro_batches:
            batch = rows_of(shard, rows)
            output = policy(
                sequences_of(batch, self.device, share_prompts=self.share_prompts), want_hidden=want_hidden, top=top
            )
            pieces["logprobs_T"].append(output.logprobs_T.cpu())
            if want_hidden:
                pieces["hidden_TD"].append(output.hidden_TD.cpu())
            if top is not None:
                # If fewer tokens could be sampled, the others are never said: a number, so that all of them are finite.
                pieces["top_logprobs_TK"].append(output.top_logprobs_TK.clamp(min=NEVER).cpu())
                pieces["top_ids_TK"].append(output.top_ids_TK.int().cpu())
            # Of this pass nothing stays on the device: the next one needs the memory, and so does the end of the phase.
            del output
        columns = {name: torch.cat(parts) for name, parts in pieces.items()}
        engine_T = shard.select([row for rows in micro_batches for row in rows]).rollout_logprobs_T
        ratio_T = (0.0 if engine_T is None else values(engine_T).double()) - columns["logprobs_T"].double()
        self._distance = float(ratio_T.sum()), len(ratio_T)
        return columns

    def distance(self) -> tuple[float, int]:
        """The sum of the last pass's log-ratios engine to model (no engine: -log-probs), and their number."""
        return self._distance


class Saves:
    """The part of a rank that writes and reads its share of checkpoints. Nothing here is a collective."""

    files: RankFiles

    def save(self, folder: str, in_background: bool = False, texts: Mapping[str, str] | None = None) -> None:
        self.files.save(Path(folder), background=in_background, texts=texts)

    def saved(self, wait_s: float) -> Files | None:
        return self.files.saved(wait_s)

    def save_bytes(self) -> int:
        return self.files.num_bytes()

    def load(self, folder: str) -> None:
        self.files.load(Path(folder))


def as_block(columns: Mapping[str, Tensor]) -> tuple[bool, dict[str, Any]]:
    """With whether all numbers are finite. numpy has no bfloat16: such columns stay tensors."""
    finite = all(bool(torch.isfinite(column).all()) for column in columns.values())
    return finite, {name: column if column.dtype == torch.bfloat16 else column.numpy() for name, column in columns.items()}
