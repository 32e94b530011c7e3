"""The roles of a run added up on one GPU, phase by phase: the least GPU on which each phase finds its memory.

Estimates, from the model's sizes: no GPU has confirmed them. What cannot be computed is assumed, and said below.
"""

from __future__ import annotations

from dataclasses import dataclass

from grpo_rl.plan.decisions import Plan, RoleName
from grpo_rl.plan.memory import GIB, gib, load_of, size_of_role
from grpo_rl.plan.model_folder import ModelSize
from grpo_rl.plan.rank_memory import at_rest, peak

CONTEXT = int(0.6 * GIB)
"""Assumed: what CUDA and its libraries take in each process, before any tensor."""
NCCL_BUFFERS = int(0.4 * GIB)
"""Assumed: NCCL's buffers in a process of a set of several ranks."""
GRAPHS = int(0.8 * GIB)
"""Assumed: CUDA graphs and their pool, which a sleeping engine keeps."""
SLACK = 1.1
"""Assumed: memory that torch's allocator holds for tensors of other sizes, as a factor of what tensors take."""


@dataclass(frozen=True, slots=True)
class GpuPhase:
    """A phase of a step on one GPU: what all processes there take together."""

    name: str
    num_bytes: int
    engine_share: float = 0.0
    """The share of the whole GPU that the engine takes besides."""

    @property
    def least_gpu(self) -> int:
        """Return the memory of the smallest GPU on which it fits."""
        return int(self.num_bytes / (1 - self.engine_share))


@dataclass(frozen=True, slots=True)
class Resident:
    """A set of ranks on the GPU: the bytes that it keeps between phases, and those at its peak."""

    role: RoleName
    phase: str
    """The phase of the step that is its largest."""
    rest: int
    peak: int


def gpu_phases(plan: Plan, size: ModelSize) -> tuple[GpuPhase, ...]:
    """Return the phases of a step on a GPU of the actor's pool; none on CPUs, and without an actor."""
    if plan.machine.device != "cuda" or plan.role("actor") is None:
        return ()
    residents = residents_of(plan, size)
    resting = sum(one.rest for one in residents)
    phases = []
    asleep = 0.0
    if plan.engine is not None and plan.colocated:
        weights = size.num_params * plan.engine_width // plan.engine.tensor_parallel_size
        asleep = CONTEXT + GRAPHS if plan.engine.sleep_mode else 0.0
        cache = plan.engine.kv_cache_memory_bytes
        if cache is None:
            awake = plan.engine.gpu_memory_utilization
            share = 0.0 if plan.engine.sleep_mode else awake
            phases.append(GpuPhase("sampling", resting, awake))
        else:
            # A cache of a fixed size: nothing of the engine's is a share of the GPU.
            engine, share = weights + cache + CONTEXT + GRAPHS, 0.0
            asleep = asleep or engine
            phases.append(GpuPhase("sampling", resting + engine))
        bucket = 2 * plan.engine.bucket_bytes + _largest(size) * (4 + plan.engine_width)
        sync = resting + int(asleep + (weights if plan.engine.sleep_mode else 0) + bucket)
        phases.append(GpuPhase("weight transfer", sync, share))
    else:
        share = 0.0
    for one in residents:
        phases.append(GpuPhase(one.phase, int(resting - one.rest + one.peak + asleep), share))
    return tuple(phases)


def lines(plan: Plan, size: ModelSize) -> list[tuple[str, str]]:
    """Return what the plan's page says of the phases: the largest, and the least GPU for all of them."""
    phases = gpu_phases(plan, size)
    if not phases:
        return []
    parts = [f"{one.name} {gib(one.num_bytes)}" + (f" + {one.engine_share:.0%}" if one.engine_share else "") for one in phases]
    tight = max(phases, key=lambda one: one.least_gpu)
    verdict = f"needs a GPU of {gib(tight.least_gpu)} or more, for the {tight.name}"
    there = plan.machine.gpu_memory
    if there and tight.least_gpu > there:
        verdict += f"; these have {gib(there)}: {_advice(plan, tight)}"
    return [("together", f"{verdict}; {', '.join(parts)} (estimated, not run)")]


def _advice(plan: Plan, phase: GpuPhase) -> str:
    actor = "actor_rollout_ref.actor"
    if phase.name == "sampling":
        return f"lower rollout.gpu_memory_utilization, or set {actor}.fsdp_config.param_offload and optimizer_offload"
    return f"more GPUs, {actor}.fsdp_config.param_offload and optimizer_offload, or lower ppo_max_token_len_per_gpu"


def residents_of(plan: Plan, size: ModelSize) -> list[Resident]:
    """Return the sets of ranks that share a GPU of the actor's pool."""
    names: tuple[RoleName, ...] = ("actor", "reference", "critic", "reward_model")
    return [one for name in names if (one := _resident(plan, size, name)) is not None]


def _resident(plan: Plan, size: ModelSize, name: RoleName) -> Resident | None:
    """Return what the ranks of a role take on one GPU of the actor's pool; None where there are none."""
    role, own = plan.role(name), size_of_role(plan, size, name)
    if role is None or own is None or role.pool != "actor":
        return None
    load = load_of(plan, own, name)
    weights_away, moments_away = offloads(plan, name)
    rest = at_rest(own, load, weights=not weights_away, moments=not moments_away)
    process = CONTEXT + (NCCL_BUFFERS if role.num_workers > 1 else 0)
    phase = {"actor": "update", "reference": "reference", "critic": "critic's update", "reward_model": "reward model"}[name]
    return Resident(name, phase, int(rest * SLACK) + process, int(peak(own, load) * SLACK) + process)


def offloads(plan: Plan, name: RoleName) -> tuple[bool, bool]:
    """Return whether a role's weights, and its optimizer's moments, lie in host memory between phases."""
    parts, critic, scorer = plan.config.actor_rollout_ref, plan.config.critic.fsdp, plan.config.reward.reward_model
    actor, ref = parts.actor.fsdp_config, parts.ref.fsdp_config
    return {
        "actor": (actor.param_offload, actor.optimizer_offload),
        "reference": (ref.param_offload, True),
        "critic": (critic.param_offload, critic.optimizer_offload),
        "reward_model": (scorer.param_offload, scorer.train.optimizer_offload),
        "rollout": (False, False),
    }[name]


def _largest(size: ModelSize) -> int:
    return size.vocab * size.hidden
