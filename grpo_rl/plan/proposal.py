"""Keys to paste for a named machine: the nearest configuration that fits, less in memory before more
machines, and each schedule's best division of its GPUs into sampling and training."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from grpo_rl.config import derived
from grpo_rl.config.checks.all_rules import check
from grpo_rl.config.convert import show
from grpo_rl.config.derived import Machine
from grpo_rl.config.schema.fields import replaced, value_of
from grpo_rl.frozen import frozen
from grpo_rl.machine_memory import machine_memory
from grpo_rl.plan.cost import StepTime, step_time
from grpo_rl.plan.decisions import Plan, decide
from grpo_rl.plan.memory import TIGHT, Fit, engine_need, fit_of, host_bytes, memory_by_role, token_bytes

Changes = dict[str, Any]  # values of keys
A, R, REF, M = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "ref", "model"))
MOST_MACHINES = 64
ENOUGH = 32  # full sequences in a cache: more GPUs per engine are not worth their copies


@frozen
class Proposal:
    changes: Changes
    plan: Plan
    fit: Fit

    def words(self) -> list[str]:
        """Return what to add to the command line; more machines of a name by their name."""
        words = {key: f"{key}={show(value)}" for key, value in self.changes.items()}
        if "trainer.nnodes" in words and self.plan.machine.name:
            words["trainer.nnodes"] = f"machine={self.plan.machine.name}"
        return list(words.values())


def propose(plan: Plan) -> Proposal | None:
    """Return the configuration that fits with the fewest and smallest changes."""
    machine, nodes = plan.machine, plan.config.trainer.nnodes
    machine_changes: Changes = {}
    while nodes <= MOST_MACHINES:
        for changes in _by_cost(plan):
            if (proposal := _fitting(plan, machine_changes | changes, machine)) is not None:
                return proposal
        nodes *= 2
        machine_changes = {"trainer.nnodes": nodes}
        single_name = plan.machine.name.split("x", 1)[1] if plan.machine.nodes > 1 else plan.machine.name
        machine = dataclasses.replace(machine, nodes=nodes, cluster=True, name=single_name and f"{nodes}x{single_name}")
    return None


CHUNKS = 16_384, 8_192, 4_096
LONG_RUN = 50  # steps that are worth minutes of compilation


ROOMY = 0.8  # share of memory that the plan spends by itself


def chosen_by_memory(plan: Plan) -> Changes:
    """Return values that the configuration leaves to the plan: kept activations and, on GPUs, head chunks."""
    if plan.machine.device == "cpu":
        changes: Changes = {f"{M}.enable_gradient_checkpointing": False}
        if plan.model is None or not plan.trains or not _fits_on_cpus(plan, changes):
            return {}
    else:
        faster = propose_faster(plan, ROOMY)
        changes = {} if faster is None else faster.changes
    decidable = [f"{M}.enable_gradient_checkpointing", f"{M}.lm_head_chunk_tokens"]
    return {key: changes[key] for key in decidable if key in changes and value_of(plan.config, key) is None}


def _fits_on_cpus(plan: Plan, changes: Changes) -> bool:
    """Return whether all processes fit into this machine's memory; of a cluster, one of each role."""
    tried = decide(replaced(plan.config, changes), plan.machine, model=plan.model)
    tried = dataclasses.replace(tried, memory=memory_by_role(tried))
    needed = host_bytes(tried) or sum(need.num_bytes for need in tried.memory)
    return needed <= ROOMY * machine_memory().total


def propose_faster(plan: Plan, share: float = TIGHT) -> Proposal | None:
    """Return keys that spend memory, up to `share` of a GPU's, on shorter updates."""
    judged, size, config = fit_of(plan), plan.model, plan.config
    if size is None or judged is None or not judged.fits or not plan.trains or not plan.role("actor"):
        return None
    chunk = derived.lm_head_chunk(config.model.lm_head_chunk_tokens, size.vocab)
    chunks: list[Changes] = [{f"{M}.lm_head_chunk_tokens": tokens} for tokens in CHUNKS if tokens > chunk]
    keeping: list[Changes] = []
    if config.model.enable_gradient_checkpointing is not False and not config.model.enable_activation_offload:
        keeping = [{f"{M}.enable_gradient_checkpointing": False}]
    compiled: Changes = {}
    is_long = plan.sizes.total_steps is None or plan.sizes.total_steps >= LONG_RUN
    if is_long and not config.actor.fsdp_config.use_torch_compile and not size.experts_per_token:
        compiled = {f"{A}.fsdp_config.use_torch_compile": True}
    for keeps, large in itertools.product([*keeping, {}], [*chunks, {}]):
        changes = keeps | large | compiled
        tried, fit = _tried(plan, changes, plan.machine)
        if changes and fit.fits and fit.tightest.used <= share and not refuses(plan, changes, plan.machine):
            return Proposal(changes, tried, fit)
    return None


def _fitting(plan: Plan, changes: Changes, machine: Machine) -> Proposal | None:
    """Return these changes with an engine that fits beside them, if any."""
    roomy = None
    for parallel in _engines(plan):
        attempt = changes | parallel
        tried, fit = _tried(plan, attempt, machine)
        lacking = {need.what for need in fit.needs if need.needed > need.there}
        if lacking - {"sampling", "engine, in its share"}:
            continue
        if lacking:  # the engine's share settles both
            attempt[f"{R}.gpu_memory_utilization"] = _share(tried, fit)
            tried, fit = _tried(plan, attempt, machine)
        if not fit.fits or refuses(plan, attempt, machine):
            continue
        proposal = Proposal(attempt, tried, fit)
        if plan.engine is None or fit.cache_sequences >= ENOUGH:
            return proposal
        if roomy is None or fit.cache_sequences > roomy.fit.cache_sequences:
            roomy = proposal
    return roomy


def _tried(plan: Plan, changes: Changes, machine: Machine) -> tuple[Plan, Fit]:
    tried = decide(replaced(plan.config, changes), machine, model=plan.model)
    fit = fit_of(tried)
    assert fit is not None, "on GPUs whose memory is known"
    return tried, fit


def refuses(plan: Plan, changes: Changes, machine: Machine) -> bool:
    """Return whether rules refuse these changes for more than they refuse now."""
    problems = set(check(replaced(plan.config, changes), machine))
    return bool(problems) and not problems <= set(check(plan.config, plan.machine))


def _share(plan: Plan, fit: Fit) -> float:
    """Return the engine's share of a GPU, as near to the configured one as there is room."""
    assert plan.engine is not None
    total = plan.machine.gpu_memory
    resting = next((need.needed for need in fit.needs if need.what == "sampling"), 0)
    least = (engine_need(plan) + plan.engine.max_model_len * token_bytes(plan)) / total
    share = max(plan.engine.gpu_memory_utilization, -(-int(least * 1000) // 50) / 20 + 0.05)
    return round(max(0.05, min(int((0.95 - resting / total) * 20) / 20, share)), 2)


def _engines(plan: Plan) -> Iterator[Changes]:
    """Yield the configured engine, then ones over more GPUs of a machine."""
    if plan.engine is None:
        yield {}
        return
    parallel = plan.engine.tensor_parallel_size
    yield {}
    while (parallel := 2 * parallel) <= plan.machine.num_gpus:
        yield {f"{R}.tensor_model_parallel_size": parallel}


def _by_cost(plan: Plan) -> list[Changes]:
    """Return combinations of changes to what ranks hold, the nearest first."""
    combined = itertools.product(*([(0, {}), *option] for option in _options(plan)))
    nearest = sorted(combined, key=lambda choice: sum(cost for cost, _ in choice))
    return [{key: value for _, part in choice for key, value in part.items()} for choice in nearest]


def _options(plan: Plan) -> Iterator[list[tuple[float, Changes]]]:
    """Yield each kind of change as a list, with costs that order by loss of speed."""
    config = plan.config
    fsdp, model = config.actor.fsdp_config, config.model
    yield _smaller_passes(plan)
    if model.enable_gradient_checkpointing is False:
        yield [(1.5, {f"{M}.enable_gradient_checkpointing": True})]
    if plan.role("reference") and not (config.ref.fsdp_config.param_offload or config.ref.fsdp_config.offload_policy):
        yield [(1, {f"{REF}.fsdp_config.param_offload": True})]
    if not fsdp.offload_policy:
        is_offloaded = {f"{A}.fsdp_config.{key}": getattr(fsdp, key) for key in ("optimizer_offload", "param_offload")}
        offloads = {key: True for key, offloaded in is_offloaded.items() if not offloaded}
        cleared = {key: False for key, offloaded in is_offloaded.items() if offloaded}
        policy = cleared | {f"{A}.fsdp_config.offload_policy": True}
        yield [(2, dict(list(offloads.items())[:1])), (3, offloads), (8, policy)]
    if config.rollout.free_cache_engine is False and plan.colocated:
        yield [(1, {f"{R}.free_cache_engine": True})]
    if not model.enable_activation_offload:
        recomputing = {f"{M}.enable_gradient_checkpointing": True} if model.enable_gradient_checkpointing is False else {}
        yield [(4, recomputing | {f"{M}.enable_activation_offload": True})]


def _smaller_passes(plan: Plan) -> list[tuple[float, Changes]]:
    """Return halves of the configured micro-batch, down to one sequence."""
    rule, actor = plan.passes.update, plan.config.actor
    key, value, least = "ppo_micro_batch_size_per_gpu", actor.ppo_micro_batch_size_per_gpu or 1, 1
    if rule.max_tokens is not None:
        key, value = "ppo_max_token_len_per_gpu", rule.max_tokens // rule.sequence_ranks
        least = -(-plan.config.longest_sequence // rule.sequence_ranks)
    sizes = []
    while value > least:
        sizes.append(value := max(least, value // 2))
    return [(halvings, {f"{A}.{key}": size}) for halvings, size in enumerate(sizes, start=1)]


# ---- how many GPUs sample and how many train --------------------------------------------------------------------------

MOST_DIVISIONS = 16
STALENESS = (1, 2, 4)


@frozen
class Division:
    schedule: str
    changes: Changes
    plan: Plan
    time: StepTime

    def line(self) -> str:
        plan, time = self.plan, self.time
        split = "shared" if plan.colocated else f"{time.gpus - plan.world_size}:{plan.world_size}"
        shares = (min(1.0, time.phases["sampling"] / time.total), time.filled, min(1.0, time.training / time.total))
        return (
            f"{self.schedule:<18}{split:>13}{time.total:>10,.1f}{''.join(f'{share:>10.0%}' for share in shares)}  {time.limit}"
        )


HEAD = f"{'schedule':<18}{'sample:train':>13}{'s a step':>10}{'sampling':>10}{'slots':>10}{'training':>10}  limit"


def divisions(plan: Plan) -> list[Division]:
    """Return each schedule with its best division that fits; empty if nothing can be divided."""
    machine = plan.machine
    if not machine.name or machine.num_gpus * machine.nodes < 2 or step_time(plan) is None:
        return []
    shared = {"trainer.nnodes": machine.nodes, "trainer.n_gpus_per_node": machine.num_gpus, f"{R}.nnodes": 0}
    splits_apart = list(_splits(machine))
    ages = sorted({*STALENESS, plan.config.trainer.asynchronous.max_staleness} - {0})
    runs: dict[str, Changes] = {
        name: {"trainer.schedule": name.partition(",")[0]} for name in ("sync", "sync, apart", "one_step_off")
    }
    runs |= {
        f"async, {age} old": {"trainer.schedule": derived.ASYNC, "trainer.asynchronous.max_staleness": age} for age in ages
    }
    best = []
    for name, keys in runs.items():
        splits = [shared] if name == "sync" else splits_apart
        divided = [division for split in splits if (division := _divided(plan, name, keys | split)) is not None]
        if divided:
            best.append(min(divided, key=lambda division: division.time.total))
    return best


def _splits(machine: Machine) -> Iterator[Changes]:
    """Yield keys that give part of the machines, or of one machine's GPUs, to engines."""
    parts = machine.nodes if machine.nodes > 1 else machine.num_gpus
    for share in sorted({round(parts * place / MOST_DIVISIONS) for place in range(1, MOST_DIVISIONS)} - {0, parts}):
        if machine.nodes > 1:
            changes = {"trainer.nnodes": parts - share, f"{R}.nnodes": share, "trainer.n_gpus_per_node": machine.num_gpus}
            yield changes | {f"{R}.n_gpus_per_node": machine.num_gpus}
        else:
            yield {"trainer.n_gpus_per_node": parts - share, f"{R}.nnodes": 1, f"{R}.n_gpus_per_node": share}


def _divided(plan: Plan, name: str, changes: Changes) -> Division | None:
    """Return the run of these keys; None if it is refused or does not fit."""
    if refuses(plan, changes, plan.machine):
        return None
    tried, fit = _tried(plan, changes, plan.machine)
    time = step_time(tried) if fit.fits else None
    return None if time is None else Division(name, changes, tried, time)
