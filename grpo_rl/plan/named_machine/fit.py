"""The judgement whether a run fits its machine: every phase on a GPU, the engine in its share, and what lies in host memory."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_rl.plan.decisions import Plan, RoleName
from grpo_rl.plan.gpu_memory import CONTEXT, GRAPHS, gpu_phases, offloads, residents_of
from grpo_rl.plan.memory import GIB, gib, load_of, size_of_role, trains
from grpo_rl.plan.model_folder import ModelSize

HOST_OF_RANK = int(3 * GIB)
"""Assumed: host memory of a process with torch and CUDA, before any model."""
HOST_OF_RUN = int(8 * GIB)
"""Assumed: the controller, Ray's processes and its store, and reward processes."""
ENGINE_WORK = int(0.5 * GIB)
"""Assumed: tensors of an engine's passes beside its logits and the widest tensors of a layer."""
TIGHT = 0.9
"""The share of the memory from which on a phase is called tight."""


@dataclass(frozen=True, slots=True)
class Need:
    """One need for memory, beside what is there for it."""

    what: str
    needed: int
    there: int

    @property
    def share(self) -> float:
        """Return the need as a share of what is there."""
        return self.needed / max(self.there, 1)


@dataclass(frozen=True, slots=True)
class Fit:
    """All needs of a run on its machine."""

    needs: tuple[Need, ...]
    cache_tokens: int
    """Tokens whose keys and values one replica of the engine holds; 0 without an engine."""
    cache_sequences: float
    """Sequences of full length that these are."""

    @property
    def fits(self) -> bool:
        """Return whether every need finds its memory."""
        return all(need.needed <= need.there for need in self.needs)

    @property
    def tightest(self) -> Need:
        """Return the need with the largest share of what is there."""
        return max(self.needs, key=lambda need: need.share)


def fit_of(plan: Plan, size: ModelSize) -> Fit | None:
    """Return how a run fits its machine; None where the GPUs' memory was not looked up, and for runs without GPUs."""
    total = plan.machine.gpu_memory
    if plan.machine.device != "cuda" or not total or plan.role("actor") is None:
        return None
    needs = [Need(phase.name, phase.num_bytes, int(total * (1 - phase.engine_share))) for phase in gpu_phases(plan, size)]
    tokens = 0
    if plan.engine is not None:
        need, room = engine_need(plan, size), int(total * plan.engine.gpu_memory_utilization)
        needs.append(Need("engine, in its share", need + plan.engine.max_model_len * token_bytes(plan, size), room))
        tokens = max(0, room - need) // token_bytes(plan, size)
    if plan.machine.host_memory:
        needs.append(Need("host memory of a machine", host_need(plan, size), plan.machine.host_memory))
    return Fit(tuple(needs), tokens, tokens / plan.engine.max_model_len if plan.engine is not None else 0.0)


def token_bytes(plan: Plan, size: ModelSize) -> int:
    """Return the bytes of one token's keys and values on one GPU of an engine. Heads that do not suffice for all are copied."""
    assert plan.engine is not None
    parallel = min(plan.engine.tensor_parallel_size, size.kv_heads)
    return -(-size.kv_bytes_per_token(plan.engine_width) // parallel)


def engine_need(plan: Plan, size: ModelSize) -> int:
    """Return what an engine takes on each of its GPUs besides keys and values: weights, graphs, and the tensors of a pass.

    Logits are float32, twice: as they are and as log-probs, of all sequences that sample at once (vLLM 0.32, its sampler).
    """
    engine = plan.engine
    assert engine is not None
    parallel = engine.tensor_parallel_size
    weights = size.num_params * plan.engine_width // parallel
    wide = max(2 * size.intermediate // parallel, size.experts and 3 * size.expert_intermediate * size.experts_per_token)
    layer = engine.max_num_batched_tokens * plan.engine_width * (wide + 2 * size.hidden)
    logits = 2 * 4 * engine.max_num_seqs * size.vocab
    return weights + layer + logits + ENGINE_WORK + (0 if engine.enforce_eager else GRAPHS)


def host_need(plan: Plan, size: ModelSize) -> int:
    """Return the host memory that one machine needs: its processes, what is kept off the GPUs, and a checkpoint being copied."""
    nodes = max(1, plan.config.trainer.nnodes)
    config, total = plan.config, HOST_OF_RUN
    names: tuple[RoleName, ...] = ("actor", "reference", "critic", "reward_model")
    for name in names:
        role, own = plan.role(name), size_of_role(plan, size, name)
        if role is None or own is None:
            continue
        ranks, load = -(-role.num_workers // nodes), load_of(plan, own, name)
        weights, moments = offloads(plan, name)
        kept = 4 * weights + 8 * (moments and trains(plan, name))
        if load.in_host_memory:
            kept = 16 if trains(plan, name) else 4
        if trains(plan, name) and config.trainer.save_freq > 0:
            kept += 12
        inputs = own.layers * load.tokens * own.hidden * load.width if load.offloads_inputs else 0
        total += ranks * (HOST_OF_RANK + own.num_params * kept // load.ranks + inputs)
    if plan.engine is not None:
        total += HOST_OF_RANK * -(-plan.num_replicas * plan.engine.tensor_parallel_size // nodes)
    return total


def table(plan: Plan, size: ModelSize, fit: Fit) -> list[str]:
    """Return the lines of a table: each role at rest and at its peak, each phase of the step, and the host."""
    there = plan.machine.gpu_memory
    lines = [f"{'on one GPU of ' + gib(there):<32}{'at rest':>12}{'peak':>12}"]
    for one in residents_of(plan, size):
        role = one.role.replace("_", " ")
        named = role if role in one.phase else f"{role}, {one.phase}"
        lines.append(f"{named:<32}{gib(one.rest):>12}{gib(one.peak):>12}")
    if plan.engine is not None:
        share = int(there * plan.engine.gpu_memory_utilization)
        lines.append(f"{'rollout, asleep and sampling':<32}{gib(_asleep(plan)):>12}{gib(share):>12}")
    lines.append(f"{'':<32}{'needs':>12}{'there':>12}{'used':>7}")
    for need in fit.needs:
        mark = "  does not fit" if need.needed > need.there else "  tight" if need.share > TIGHT else ""
        lines.append(f"{need.what:<32}{gib(need.needed):>12}{gib(need.there):>12}{need.share:>7.0%}{mark}")
    return lines


def _asleep(plan: Plan) -> int:
    assert plan.engine is not None
    if not plan.colocated or not plan.engine.sleep_mode:
        return int(plan.machine.gpu_memory * plan.engine.gpu_memory_utilization)
    return CONTEXT + GRAPHS
