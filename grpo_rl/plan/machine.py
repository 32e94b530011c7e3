"""The machine of a run: its devices, and what no run may ask of it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

from grpo_rl.config import derived
from grpo_rl.config.derived import Machine
from grpo_rl.config.schema.tree import Config
from grpo_rl.plan.devices import planned_machine, refused

_GPU_DRIVERS = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/kfd")
RANKS_PER_CORE = 8
"""Processes of one role on a CPU, per core. Beyond that they only wait for each other in every collective operation."""
CORES_PER_CORE = 8
"""The number of cores a run may pretend to have for each that is there: it decides the threads of every process."""


def probe_machine(config: Config) -> Machine:
    """Return what this machine has, or the one that `trainer.machine` names. torch is imported only where there may be a GPU.

    Raises ConfigError for a name that no machine has.
    """
    if (named := planned_machine(config)) is not None:
        return named
    wanted = config.trainer.device
    num_gpus = gpu_memory = 0
    if wanted != "cpu" and _may_have_gpu():
        import torch

        num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        gpu_memory = min((torch.cuda.get_device_properties(number).total_memory for number in range(num_gpus)), default=0)
    device = wanted if wanted != "auto" else ("cuda" if num_gpus else "cpu")
    return Machine(
        num_gpus=num_gpus,
        num_cpus=config.ray_kwargs.ray_init.num_cpus or available_cores(),
        device=device,
        cluster=bool(config.ray_kwargs.ray_init.address or os.environ.get("RAY_ADDRESS")),
        gpu_memory=gpu_memory,
    )


def available_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def multiplies_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool | None:
    """Return whether this processor multiplies matrices of bfloat16 in its own instructions; None where that cannot be read."""
    try:
        lines = cpuinfo.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))), None)
    return None if flags is None else bool({"amx_bf16", "avx512_bf16", "bf16"} & set(flags))


def _may_have_gpu() -> bool:
    """Return whether a driver is there: a device file of the common ones, or the library that torch would load."""
    if any(Path(driver).exists() for driver in _GPU_DRIVERS):
        return True
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def problems(config: Config, machine: Machine) -> Iterator[str]:
    """Yield what asks for more than the machine has, with the reason. The nodes of a cluster cannot be counted from here."""
    yield from refused(config, machine)
    if machine.cluster or machine.name:
        return
    num_cpus = config.ray_kwargs.ray_init.num_cpus
    most = CORES_PER_CORE * available_cores()
    # A machine that was named, and is not this one, has as many cores as its description says.
    if num_cpus is not None and machine.num_cpus == num_cpus > most:
        yield (
            f"ray_kwargs.ray_init.num_cpus={num_cpus}: this machine has {available_cores()} cores, and their number decides how many "
            f"threads each process starts; leave it out, or at most {most}"
        )
    threads = config.actor_rollout_ref.rollout.cpu_threads
    if machine.device == "cpu" and threads > machine.num_cpus:
        yield (
            f"actor_rollout_ref.rollout.cpu_threads={threads}: the machine has {machine.num_cpus} cores, and more threads than cores "
            f"wait for each other; at most {machine.num_cpus}, or 0 for a fair share"
        )
    if machine.device == "cpu":
        yield from _too_many_processes(config, machine)


def _too_many_processes(config: Config, machine: Machine) -> Iterator[str]:
    """Refuse worlds that only GPUs could carry: without one, n_gpus_per_node is a number of processes."""
    trainer, rollout, own = config.trainer, config.actor_rollout_ref.rollout, config.reward.reward_model
    most = RANKS_PER_CORE * machine.num_cpus
    worlds = [("trainer", trainer.nnodes, trainer.n_gpus_per_node, machine.world_size(config))]
    if not derived.is_colocated(config):
        worlds.append(
            (
                "actor_rollout_ref.rollout",
                rollout.nnodes,
                rollout.n_gpus_per_node,
                derived.num_rollout_devices(config, machine),
            )
        )
    if derived.has_reward_model(config) and own.enable_resource_pool:
        worlds.append(("reward.reward_model", own.nnodes, own.n_gpus_per_node, derived.num_reward_model_ranks(config, machine)))
    for prefix, nnodes, per_node, size in worlds:
        if size > most:
            key = f"{prefix}.n_gpus_per_node={per_node}" if nnodes == 1 else f"{prefix}.nnodes={nnodes}"
            yield (
                f"{key}: this run has no GPU, so these are {size} processes on {machine.num_cpus} cores, which wait for each other at "
                f"every step; at most {most}, or a machine with GPUs"
            )
