"""The machine of a run, this one or one by name, such as `8xH100-80GB`; and what no run may ask of it.
Figures of named machines are those of public data sheets, without sparsity, rates in one direction."""

from __future__ import annotations

import difflib
import os
import re

import torch

from grpo_rl.config.derived import Machine, Pool
from grpo_rl.config.schema.fields import value_of
from grpo_rl.config.schema.tree import Config
from grpo_rl.errors import ConfigError, Problems
from grpo_rl.frozen import frozen

RANKS_PER_CORE = 8  # of one role on a CPU; more only wait in collectives


def probe_machine(config: Config) -> Machine:
    """Raises ConfigError for an unknown name."""
    trainer, device_key, ray = config.trainer, config.trainer.device, config.ray_kwargs.ray_init
    if trainer.machine is not None:
        machine = named(trainer.machine)
        nodes, gpus = max(machine.nodes, trainer.nnodes), machine.gpus
        host_gib = gpus * machine.device.host_gib if trainer.machine_host_gib is None else trainer.machine_host_gib
        return Machine(
            num_gpus=gpus,
            num_cpus=ray.num_cpus or int(gpus * machine.device.cores),
            device="cuda" if device_key == "auto" else device_key,
            cluster=nodes > 1,
            gpu_memory=int(machine.device.memory_gib * 2**30),
            name=machine.name,
            nodes=nodes,
            host_memory=int(host_gib * 2**30),
        )
    num_gpus = torch.cuda.device_count() if device_key != "cpu" and torch.cuda.is_available() else 0
    return Machine(
        num_gpus=num_gpus,
        num_cpus=ray.num_cpus or len(os.sched_getaffinity(0)),
        device=device_key if device_key != "auto" else ("cuda" if num_gpus else "cpu"),
        cluster=bool(ray.address or os.environ.get("RAY_ADDRESS")),
        gpu_memory=min((torch.cuda.get_device_properties(number).total_memory for number in range(num_gpus)), default=0),
    )


def problems(config: Config, machine: Machine) -> Problems:
    """Yield what asks for more than the machine has; the nodes of a cluster cannot be counted from here."""
    trainer, rollout, scorer = config.trainer, config.rollout, config.reward.reward_model
    if trainer.machine is not None:
        yield from _too_much_for_named(config, machine)
        return
    for key in ("machine_host_gib", "mean_response_length", "response_length_spread"):
        if (value := getattr(trainer, key)) is not None:
            yield f"trainer.{key}={value:g}: describes a run on the machine of trainer.machine, which is not set; leave it out"
    if machine.cluster or machine.device != "cpu":
        return
    if rollout.cpu_threads > machine.num_cpus:
        yield (
            f"actor_rollout_ref.rollout.cpu_threads={rollout.cpu_threads}: the machine has {machine.num_cpus} cores, and more threads "
            f"than cores wait for each other; at most {machine.num_cpus}, or 0 for a fair share"
        )
    # Without a GPU n_gpus_per_node is a number of processes.
    max_ranks = RANKS_PER_CORE * machine.num_cpus
    roles: dict[str, Pool] = {"trainer": "actor"}
    if not config.is_colocated:
        roles["actor_rollout_ref.rollout"] = "rollout"
    if scorer.enable and scorer.enable_resource_pool:
        roles["reward.reward_model"] = "reward_model"
    for prefix, role in roles.items():
        pool, size = value_of(config, prefix), machine.world_size(config, role)
        if size > max_ranks:
            key = f"n_gpus_per_node={pool.n_gpus_per_node}" if pool.nnodes == 1 else f"nnodes={pool.nnodes}"
            yield (
                f"{prefix}.{key}: this run has no GPU, so these are {size} processes on {machine.num_cpus} cores, which wait for each "
                f"other at every step; at most {max_ranks}, or a machine with GPUs"
            )


# ---- machines by name, such as 8xH100-80GB --------------------------------------------------------------------------


KEY = "trainer.machine"
_NAME = re.compile(r"(?:(?:(?P<nodes>\d{1,5})x)?(?P<gpus>\d{1,4})x)?(?P<device>[a-z]\w*-\d+GB)", re.ASCII | re.IGNORECASE)


@frozen
class Device:
    source: str
    memory_gib: float  # that a program finds: ECC and the driver take some
    tflops: float  # dense bfloat16 products with float32 sums, 10^12 operations a second
    memory_gbs: float  # memory bandwidth, 10^9 bytes a second
    link_gbs: float  # between two GPUs of a machine: NVLink, else PCIe
    pcie_gbs: float  # to host memory: 64 of PCIe 5 x16, 32 of PCIe 4, 16 of PCIe 3
    nic_gbs: float  # between machines, for each GPU
    host_gib: float  # host memory for each GPU
    cores: float  # for each GPU
    products: float = 0.65
    """Share of `tflops` in matrix products of long passes; more if the data sheet is low for the device's
    power. PaLM's operations (arXiv 2204.02311, appendix B) at this share with the traffic of plan/cost.py
    give the 33 % of the peak of torchtitan's docs/performance.md for Llama 3.1 8B on H100, and half of it for
    0.5 B parameters."""
    attention: float = 0.5
    """Share of `tflops` in attention: FlashAttention 3 on Hopper, 2 on Ampere and Ada; version 2 reaches 300
    TFLOP/s on Blackwell, without its tensor cores (prime-rl's baselines of Qwen3-4B at 64k tokens on
    B200)."""
    fixed_s: float = 0.5  # of an update beside what it computes and moves: assumed
    call_s: float = 0.0
    prompt_s: float = 0.0
    token_s: float = 0.0  # seconds of Python for a pass, and for a prompt and a token of a forward pass
    decode_s: float = 0.005
    sequence_s: float = 20e-6
    request_s: float = 1.5e-4
    """Seconds of the engine's Python, beside the GPU's work: per decoding step and sequence in it, 15 ms for
    500 sequences, whatever the model; and per request with its response."""


_DGX_H100 = "DGX H100 data sheet: 8 x 400 Gb/s, 2 TB, 112 cores"
_ASSUMED = "network of 25 Gb/s, 64 GiB and 8 cores for each GPU assumed"
# Memory in GiB (as `torch.cuda.get_device_properties`, rounded down), TFLOP/s; GB/s of memory, GPU link, PCIe
# and network; host GiB and cores per GPU; shares of products and of attention; source.
_TABLE = f"""
GB200-186GB   184.0  2500 8000 900 256  50 240 36 0.65 0.12  GB200 NVL72 data sheet, half of its figures with sparsity; NVLink-C2C
B200-180GB    178.0  2250 8000 900  64  50 238 14 0.65 0.13  DGX B200 data sheet, half of its figures with sparsity
MI300X-192GB  191.4  1307 5300 448  64  50 256 24 0.65 0.30  AMD Instinct MI300X data sheet, 7 Infinity Fabric links
H200-141GB    139.8   989 4800 450  64  50 238 14 0.65 0.50  NVIDIA H200 data sheet (SXM); {_DGX_H100}
H100-80GB      79.1   989 3350 450  64  50 238 14 0.65 0.50  NVIDIA H100 data sheet (SXM); {_DGX_H100}
H800-80GB      79.1   989 3350 200  64  50 238 14 0.65 0.50  NVIDIA H800 data sheet (SXM): NVLink of 400 GB/s; {_DGX_H100}
H20-96GB       95.1   148 4000 450  64  50 238 14 0.90 0.60  NVIDIA H20 data sheet (SXM); {_DGX_H100}
H100NVL-94GB   93.1   835 3900 300  64 3.1  64  8 0.65 0.50  NVIDIA H100 data sheet (NVL); {_ASSUMED}
H100PCIE-80GB  79.1   756 2000  64  64 3.1  64  8 0.65 0.50  NVIDIA H100 PCIe product brief; {_ASSUMED}
A100-80GB      79.2   312 2039 300  32  25 238 16 0.80 0.50  NVIDIA A100 data sheet (SXM); DGX A100 data sheet: 200 Gb/s, 2 TB
A800-80GB      79.2   312 2039 200  32  25 238 16 0.80 0.50  NVIDIA A800 data sheet (SXM): NVLink of 400 GB/s
A100-40GB      39.4   312 1555 300  32  25 119 16 0.80 0.50  NVIDIA A100 data sheet (SXM); DGX A100 data sheet: 200 Gb/s, 1 TB
L40S-48GB      44.4   362  864  32  32 3.1  64  8 0.65 0.50  NVIDIA L40S data sheet; {_ASSUMED}
A6000-48GB     47.4 154.8  768  56  32 3.1  64  8 0.65 0.50  NVIDIA RTX A6000 data sheet, NVLink in pairs; {_ASSUMED}
A10-24GB       22.0   125  600  32  32 3.1  64  8 0.65 0.50  NVIDIA A10 data sheet; {_ASSUMED}
L4-24GB        22.0   121  300  32  32 3.1  64  8 0.65 0.50  NVIDIA L4 data sheet; {_ASSUMED}
RTX5090-32GB   31.3 209.5 1792  64  64 3.1  64  8 0.65 0.50  NVIDIA RTX Blackwell GPU architecture paper; {_ASSUMED}
RTX4090-24GB   23.5 165.2 1008  32  32 3.1  64  8 0.65 0.50  NVIDIA Ada GPU architecture paper; {_ASSUMED}
RTX3090-24GB   23.5    71  936  32  32 3.1  64  8 0.65 0.50  NVIDIA Ampere GA102 GPU architecture paper; {_ASSUMED}
"""
DEVICES = {
    name: Device(row[10], *map(float, row[:10]))
    for name, *row in (line.split(maxsplit=11) for line in _TABLE.strip().splitlines())
}
CORES = Device(
    "nominal; a run gives the factors",
    *(0.0, 0.2, 60, 10, 10, 1, 0, 1),
    fixed_s=0.04,
    call_s=0.035,
    prompt_s=2e-4,
    token_s=7e-6,
    decode_s=0.001,
    sequence_s=9e-5,
    request_s=6e-4,
)
"""Without a GPU small models wait for Python. Set by runs of 0.3 M parameters on two cores."""


def peak_tflops(gpu: str) -> float | None:
    """Return the dense bfloat16 TFLOP/s of torch's name of a GPU; None if unlisted, or without bfloat16."""
    words = set(re.split(r"[^a-z0-9]+", gpu.lower()))
    kinds = {re.sub("(rtx|nvl|pcie)", r" \1 ", name.partition("-")[0].lower()): row.tflops for name, row in DEVICES.items()}
    fitting = [kind for kind in kinds if words.issuperset(kind.split())]
    return (kinds[max(fitting, key=len)] if fitting else 0.0) or None


@frozen
class NamedMachine:
    name: str
    nodes: int
    gpus: int
    device: Device


def named(name: str) -> NamedMachine:
    """Raises ConfigError for a name of another form, or of an unlisted device."""
    match, known = _NAME.fullmatch(name), {device.lower(): device for device in DEVICES}
    if match is None:
        raise ConfigError(
            f"{KEY}={name}: a machine is written as its GPUs and their memory, 8xH100-80GB, several as 4x8xH100-80GB; devices: "
            + ", ".join(DEVICES)
        )
    device = known.get(match["device"].lower())
    if device is None:
        names = difflib.get_close_matches(match["device"].lower(), known, n=1)
        hint = f"; did you mean {known[names[0]]}?" if names else ""
        raise ConfigError(f"{KEY}={name}: no device {match['device']} is known here{hint} There are: {', '.join(DEVICES)}")
    nodes, gpus = (int(match[part] or 1) for part in ("nodes", "gpus"))
    if not nodes or not gpus:
        raise ConfigError(f"{KEY}={name}: a machine without GPUs; at least 1x{device}")
    return NamedMachine(f"{nodes}x{gpus}x{device}" if match["nodes"] else f"{gpus}x{device}", nodes, gpus, DEVICES[device])


def _too_much_for_named(config: Config, machine: Machine) -> Problems:
    """Yield what `trainer.machine` cannot do, and any run that is more than a plan for it."""
    trainer, planned = config.trainer, named(config.trainer.machine or "")
    if not trainer.dry_run:
        yield f"{KEY}={trainer.machine}: a machine that is named can only be planned for; set trainer.dry_run=true, or leave it out"
    num_asked = trainer.nnodes + (0 if config.is_colocated else config.rollout.nnodes)
    if planned.nodes > 1 and num_asked > planned.nodes:
        yield f"{KEY}={trainer.machine}: {num_asked} machines are asked for (trainer.nnodes={trainer.nnodes}), and it has {planned.nodes}"
    _, per_node = machine.devices(config, "actor")
    if machine.device == "cuda" and per_node > planned.gpus:
        yield f"trainer.n_gpus_per_node={per_node}: each machine of {planned.name} has {planned.gpus} GPUs"
