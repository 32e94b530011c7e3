"""Rates of the cluster model: from data sheets and published measurements (cluster_profiles.yaml)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from cluster_model import ClusterRates, EngineRates, TrainerRates

PROFILES = Path(__file__).with_name("cluster_profiles.yaml")
BYTES = 2
"""Bytes of a weight, of a number in the cache, and of a gradient that is sent: bfloat16."""
GPUS_OF_A_NODE = 8


@dataclass(frozen=True)
class Model:
    """A dense transformer: the sizes that decide its cost."""

    name: str
    parameters: float
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    tensor_parallel: int
    """GPUs of one replica."""

    @property
    def cache_bytes(self) -> float:
        """The bytes of keys and values of one token."""
        return 2.0 * self.layers * self.kv_heads * self.head_dim * BYTES

    def training_flops(self, context: float) -> float:
        """Return the FLOPs of forward and backward pass per token: 6 P + 12 layers * width * context.

        PaLM (arXiv 2204.02311), appendix B, which torchtitan's utilisation counts by as well.
        """
        return 6.0 * self.parameters + 12.0 * self.layers * self.heads * self.head_dim * context


@dataclass(frozen=True)
class Lengths:
    """The lengths that decide what a batch costs, in tokens."""

    prompt: int
    mean: float
    longest: int

    @property
    def sequence(self) -> float:
        """The mean length of a prompt with its response."""
        return self.prompt + self.mean


@dataclass(frozen=True)
class Pools:
    """The numbers of GPUs that sample and that train; shared ones do both in turns."""

    rollout: int
    trainer: int
    shared: bool = False

    @property
    def gpus(self) -> int:
        return self.trainer if self.shared else self.rollout + self.trainer


class Profiles:
    """The numbers of cluster_profiles.yaml."""

    def __init__(self, path: Path = PROFILES) -> None:
        self.content: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))

    def value(self, *names: str) -> float:
        """Return one number."""
        entry: Any = self.content
        for name in names:
            entry = entry[name]
        return float(entry["value"])

    def model(self, name: str) -> Model:
        """Return a model. Raises KeyError with the names that there are."""
        if name not in self.content["models"]:
            raise KeyError(f"no model {name!r} in {PROFILES.name}; there are {', '.join(self.content['models'])}")
        sizes = self.content["models"][name]
        # YAML 1.1 reads 8.2e9, which has no sign, as text.
        return Model(name, **sizes | {"parameters": float(sizes["parameters"])})

    def sources(self) -> list[str]:
        """Return each number with its source, one per line."""
        lines = []
        for section in ("efficiency", "seconds"):
            for name, entry in self.content[section].items():
                lines.append(f"{section} {name} = {entry['value']:g}: {entry['source']}")
        return lines


def engine_rates(profiles: Profiles, machine: str, model: Model, lengths: Lengths, most_sequences: int) -> EngineRates:
    """Return the rates of one replica of `model.tensor_parallel` GPUs. Raises ValueError where the weights do not fit."""
    gpus = model.tensor_parallel
    memory = profiles.value("machines", machine, "memory_bytes_s") * profiles.value("efficiency", "memory") * gpus
    flops = profiles.value("machines", machine, "flops") * profiles.value("efficiency", "computing") * gpus
    free = profiles.value("machines", machine, "memory_gb") * 1e9 * gpus - model.parameters * BYTES
    if free <= 0:
        raise ValueError(f"{model.name} does not fit into {gpus} GPUs of {machine}")
    fitting = int(free * profiles.value("efficiency", "cache_share") / (model.cache_bytes * lengths.sequence))
    reduces = 2 * model.layers * profiles.value("seconds", "all_reduce") if gpus > 1 else 0.0
    return EngineRates(
        overhead_s=profiles.value("seconds", "decode_overhead") + reduces,
        sequence_s=2.0 * model.parameters / flops,
        weights_s=model.parameters * BYTES / memory,
        context_s=model.cache_bytes / memory,
        prefill_token_s=2.0 * model.parameters / flops,
        max_sequences=max(1, min(most_sequences, fitting)),
    )


def trainer_rates(
    profiles: Profiles, machine: str, model: Model, lengths: Lengths, gpus: int, forward_passes: int, micro_tokens: int
) -> TrainerRates:
    """Return the rates of so many FSDP ranks; `forward_passes` come besides the update: old log-probs, the reference."""
    speed = profiles.value("machines", machine, "flops") * profiles.value("efficiency", "training")
    rank_token_s = model.training_flops(lengths.sequence) * (1 + forward_passes / 3) / speed
    link = "nvlink_bytes_s" if gpus <= GPUS_OF_A_NODE else "network_bytes_s"
    bandwidth = profiles.value("machines", machine, link) * profiles.value("efficiency", "network")
    # Weights are gathered for the forward and for the backward pass, and gradients reduced: three times, every other pass once.
    moved = (3 + forward_passes) * model.parameters * BYTES * (gpus - 1) / gpus
    return TrainerRates(
        fixed_s=profiles.value("seconds", "training_step"),
        token_s=rank_token_s / gpus,
        rank_token_s=rank_token_s,
        micro_batch_s=moved / bandwidth,
        micro_batch_tokens=float(micro_tokens * gpus),
    )


def cluster_rates(
    profiles: Profiles,
    machine: str,
    model: Model,
    lengths: Lengths,
    pools: Pools,
    *,
    forward_passes: int = 1,
    micro_tokens: int = 32768,
    most_sequences: int = 512,
    recomputes_cache: bool = True,
) -> ClusterRates:
    """Return the rates of a cluster. The weights travel once, through one rank's link, to all replicas at the same time."""
    link = "nvlink_bytes_s" if pools.shared or pools.gpus <= GPUS_OF_A_NODE else "network_bytes_s"
    bandwidth = profiles.value("machines", machine, link) * profiles.value("efficiency", "network")
    engine = engine_rates(profiles, machine, model, lengths, most_sequences)
    return ClusterRates(
        engine,
        trainer_rates(profiles, machine, model, lengths, pools.trainer, forward_passes, max(micro_tokens, lengths.longest)),
        num_replicas=max(1, pools.rollout // model.tensor_parallel),
        transfer_s=profiles.value("seconds", "transfer") + model.parameters * BYTES / bandwidth,
        controller_rollout_s=profiles.value("seconds", "controller_rollout") * max(1.0, lengths.mean / 4096),
        reward_s=profiles.value("seconds", "reward"),
        switch_s=profiles.value("seconds", "switch"),
        recomputes_cache=recomputes_cache,
    )


def candidates(total: int, tensor_parallel: int, parts: int = 16) -> list[Pools]:
    """Return ways to divide `total` GPUs, in whole replicas and, above one node, in whole nodes where they are many."""
    unit = math.lcm(tensor_parallel, GPUS_OF_A_NODE) if total >= 8 * GPUS_OF_A_NODE else tensor_parallel
    found = {max(unit, round(total * part / parts / unit) * unit) for part in range(1, parts)}
    return [Pools(rollout, total - rollout) for rollout in sorted(found) if total - rollout >= 1]
