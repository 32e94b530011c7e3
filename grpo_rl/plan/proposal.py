"""The nearest configuration that fits its machine, as keys to paste: fewer things in memory before more machines."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from grpo_rl.config.checks.all_rules import check
from grpo_rl.config.convert import show
from grpo_rl.config.derived import Machine, longest_sequence
from grpo_rl.config.schema.tree import Config
from grpo_rl.plan.decisions import Plan, decide
from grpo_rl.plan.memory import Fit, engine_need, fit_of, token_bytes
from grpo_rl.plan.model_folder import ModelSize

A, R, REF, M = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "ref", "model"))
MOST_MACHINES = 64
ENOUGH = 32
"""Sequences of full length in an engine's cache from which on more GPUs for each engine are not worth their copies."""
Changes = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Proposal:
    """Keys that make a run fit, and the machine that it takes."""

    changes: dict[str, Any]
    plan: Plan
    fit: Fit

    def words(self) -> list[str]:
        """Return what to add to the command line; of more machines with a name the name."""
        words = {key: f"{key}={show(value)}" for key, value in self.changes.items()}
        if "trainer.nnodes" in words and self.plan.machine.name:
            words["trainer.nnodes"] = f"machine={self.plan.machine.name}"
        return list(words.values())


def propose(plan: Plan, size: ModelSize) -> Proposal | None:
    """Return the nearest configuration that fits: with as few and as small changes as possible; None where none was found.

    First on the machines that are named, then on twice as many, and so on.
    """
    nodes = plan.config.trainer.nnodes
    while nodes <= MOST_MACHINES:
        for changes in _by_cost(plan):
            if nodes != plan.config.trainer.nnodes:
                changes = {"trainer.nnodes": nodes, **changes}
            found = _fitting(plan, size, changes)
            if found is not None:
                return found
        nodes *= 2
    return None


def changed(config: Config, changes: Changes) -> Config:
    """Return a configuration with other values of these keys."""
    for key, value in changes.items():
        config = _replaced(config, key.split("."), value)
    return config


def _replaced(node: Any, path: list[str], value: Any) -> Any:
    inner = value if len(path) == 1 else _replaced(getattr(node, path[0]), path[1:], value)
    return dataclasses.replace(node, **{path[0]: inner})


def _fitting(plan: Plan, size: ModelSize, changes: dict[str, Any]) -> Proposal | None:
    """Return the proposal of these changes with an engine that fits beside them; None where nothing does."""
    nodes = changes.get("trainer.nnodes", plan.config.trainer.nnodes)
    machine = plan.machine
    if "trainer.nnodes" in changes:
        name = f"{nodes}x{machine.name.split('x', 1)[1]}" if machine.nodes > 1 else f"{nodes}x{machine.name}"
        machine = dataclasses.replace(machine, nodes=nodes, cluster=True, name=name if machine.name else "")
    roomy = None
    for parallel in _engines(plan):
        attempt = {**changes, **parallel}
        config = changed(plan.config, attempt)
        tried = decide(config, machine)
        fit = fit_of(tried, size)
        assert fit is not None
        lacking = {need.what for need in fit.needs if need.needed > need.there}
        if lacking - {"sampling", "engine, in its share"}:
            continue
        if lacking:  # the engine's share of a GPU settles both
            attempt[f"{R}.gpu_memory_utilization"] = _share(tried, size, fit)
            config = changed(plan.config, attempt)
            tried = decide(config, machine)
            fit = fit_of(tried, size)
        if fit is None or not fit.fits or refuses(plan, config, machine):
            continue
        found = Proposal(attempt, dataclasses.replace(tried, model=size), fit)
        if plan.engine is None or fit.cache_sequences >= ENOUGH:
            return found
        if roomy is None or fit.cache_sequences > roomy.fit.cache_sequences:
            roomy = found
    return roomy


def refuses(plan: Plan, config: Config, machine: Machine) -> bool:
    """Return whether the rules between keys refuse a changed configuration for something that they allow as it is."""
    before = set(check(plan.config, plan.machine))
    return bool(set(check(config, machine)) - before)


def _share(plan: Plan, size: ModelSize, fit: Fit) -> float:
    """Return the engine's share of a GPU, as near to the configured one as the others leave room."""
    assert plan.engine is not None
    total = plan.machine.gpu_memory
    beside = next((need.needed for need in fit.needs if need.what == "sampling"), 0)
    least = (engine_need(plan, size) + plan.engine.max_model_len * token_bytes(plan, size)) / total
    wanted = max(plan.engine.gpu_memory_utilization, -(-int(least * 1000) // 50) / 20 + 0.05)
    return round(max(0.05, min(int((0.95 - beside / total) * 20) / 20, wanted)), 2)


def _engines(plan: Plan) -> Iterator[dict[str, Any]]:
    """Yield engines over more and more GPUs of one machine, beginning with the configured one."""
    if plan.engine is None:
        yield {}
        return
    parallel = plan.engine.tensor_parallel_size
    yield {}
    while (parallel := 2 * parallel) <= plan.machine.num_gpus:
        yield {f"{R}.tensor_model_parallel_size": parallel}


def _by_cost(plan: Plan) -> list[dict[str, Any]]:
    """Return combinations of changes to what the ranks hold, the nearest first."""
    options = [list(option) for option in _options(plan)]
    combined: list[tuple[float, int, dict[str, Any]]] = []
    for choice in itertools.product(*options):
        changes: dict[str, Any] = {}
        for _, part in choice:
            changes |= part
        combined.append((sum(cost for cost, _ in choice), len(combined), changes))
    return [changes for _, _, changes in sorted(combined, key=lambda entry: entry[:2])]


def _options(plan: Plan) -> Iterator[list[tuple[float, dict[str, Any]]]]:
    """Yield the ways of each kind of change with their costs, no change first.

    The costs order by what a change costs in speed: smaller micro-batches and recomputation before copies over PCIe.
    """
    parts = plan.config.actor_rollout_ref
    fsdp, model = parts.actor.fsdp_config, parts.model
    yield _smaller_passes(plan)
    if not model.enable_gradient_checkpointing:
        yield [(0, {}), (1.5, {f"{M}.enable_gradient_checkpointing": True})]
    if plan.role("reference") and not (parts.ref.fsdp_config.param_offload or parts.ref.fsdp_config.offload_policy):
        yield [(0, {}), (1, {f"{REF}.fsdp_config.param_offload": True})]
    if not fsdp.offload_policy:
        keys = {key: f"{A}.fsdp_config.{key}" for key in ("optimizer_offload", "param_offload")}
        kept = {path: True for key, path in keys.items() if not getattr(fsdp, key)}
        cleared = {path: False for key, path in keys.items() if getattr(fsdp, key)}
        policy = {**cleared, f"{A}.fsdp_config.offload_policy": True}
        yield [(0, {}), (2, dict(list(kept.items())[:1])), (3, kept), (8, policy)]
    if parts.rollout.free_cache_engine is False and plan.colocated:
        yield [(0, {}), (1, {f"{R}.free_cache_engine": True})]
    if not model.enable_activation_offload:
        checkpointing = {} if model.enable_gradient_checkpointing else {f"{M}.enable_gradient_checkpointing": True}
        yield [(0, {}), (4, {**checkpointing, f"{M}.enable_activation_offload": True})]


def _smaller_passes(plan: Plan) -> list[tuple[float, dict[str, Any]]]:
    """Return the configured micro-batch and halves of it, down to one sequence."""
    rule, actor = plan.passes.update, plan.config.actor_rollout_ref.actor
    key, value, least = "ppo_micro_batch_size_per_gpu", actor.ppo_micro_batch_size_per_gpu or 1, 1
    if rule.max_tokens is not None:
        longest = longest_sequence(plan.config)
        key, value, least = (
            "ppo_max_token_len_per_gpu",
            rule.max_tokens // rule.sequence_ranks,
            -(-longest // rule.sequence_ranks),
        )
    ways: list[tuple[float, dict[str, Any]]] = [(0, {})]
    while value > least:
        value = max(least, value // 2)
        ways.append((len(ways), {f"{A}.{key}": value}))
    return ways
