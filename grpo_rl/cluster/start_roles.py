"""Starts the worker groups of a run in their places, all at the same time, and connects them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ray

from grpo_rl import faults
from grpo_rl.algos.objective import Objective
from grpo_rl.cluster.processes.forks import ENVIRONMENT
from grpo_rl.cluster.processes.placement import Pool, Slot
from grpo_rl.cluster.processes.worker_sets import Worker, WorkerGroup, wait_all
from grpo_rl.cluster.recovery.replicas import Replicas
from grpo_rl.cluster.recovery.supervised_sets import SupervisedGroup
from grpo_rl.cluster.recovery.supervisor import Supervisor
from grpo_rl.cluster.roles.actor_role import ActorGroup, ReferenceGroup, actor_factory, reference_factory, rollout_factory
from grpo_rl.cluster.roles.critic_role import CriticGroup, critic_factory, critic_spec, make_critic
from grpo_rl.cluster.roles.reward_model_role import reward_model_factory, reward_model_spec
from grpo_rl.cluster.roles.rollout_pool import PoolOptions, ReplicaPool
from grpo_rl.cluster.roles.weight_sync import Transfer
from grpo_rl.config import derived
from grpo_rl.config.derived import Machine
from grpo_rl.config.schema.tree import Config
from grpo_rl.plan.algorithm import needs_critic, recomputes_old_logprobs
from grpo_rl.rollout.engine import EngineSpec
from grpo_rl.rollout.engine_environment import engine_environment
from grpo_rl.telemetry.console import Console
from grpo_rl.workers.specs import ActorSpec, PolicySpec, Rank, SenderSpec


class Cluster:
    """The processes of a run: pools of devices, and the worker groups placed in them."""

    def __init__(
        self,
        config: Config,
        machine: Machine,
        model_path: str,
        log_dir: Path,
        console: Console,
        on_restart: Callable[[str, int | None], None] = lambda worker, pid: None,
    ) -> None:
        self.config = config
        self.machine = machine
        self.model_path = model_path
        self.log_dir = log_dir
        self.console = console
        self.groups: list[SupervisedGroup] = []
        self.pools: list[Pool] = []
        self.supervisor = Supervisor(config.trainer, console, on_restart)

    def actor_pool(self) -> Pool:
        """The pool that the actor, the reference and colocated engines share."""
        if not self.pools:
            per_node = derived.ranks_per_node(self.config, self.machine)
            self.pools.append(self._pool(self.config.trainer.nnodes, per_node))
        return self.pools[0]

    def rollout_slots(self) -> list[Slot]:
        """One slot per engine replica, in the actor's pool or in one of their own."""
        rollout = self.config.actor_rollout_ref.rollout
        if derived.is_colocated(self.config):
            return self.actor_pool().slots(rollout.tensor_model_parallel_size)
        pool = self._pool(rollout.nnodes, derived.rollout_devices_per_node(self.config, self.machine))
        self.pools.append(pool)
        return pool.slots(rollout.tensor_model_parallel_size)

    def reward_model_slots(self) -> list[Slot]:
        """One slot per rank of the reward model, in the actor's pool or in one of its own."""
        own = self.config.reward.reward_model
        if not own.enable_resource_pool:
            return self.actor_pool().slots()
        pool = self._pool(own.nnodes, derived.reward_model_ranks_per_node(self.config, self.machine))
        self.pools.append(pool)
        return pool.slots()

    def group(
        self,
        role: str,
        slots: Sequence[Slot],
        threads: int,
        environment: Mapping[str, str] = MappingProxyType({}),
        calls_at_once: int = 1,
        *,
        stateful: bool = False,
    ) -> SupervisedGroup:
        """Processes for a role, started but with nothing in them yet; `threads` are OpenMP's on a CPU."""
        environment = {"OMP_NUM_THREADS": str(threads)} | ENVIRONMENT | dict(environment) | faults.environment()
        group = SupervisedGroup(
            role,
            slots,
            log_dir=self.log_dir,
            environment=environment,
            call_timeout_s=self.config.trainer.step_timeout_s,
            threads_per_worker=calls_at_once,
            supervisor=self.supervisor,
            stateful=stateful,
        )
        self.groups.append(group)
        return group

    def ranks(self, group: WorkerGroup) -> list[Rank]:
        """Each process's rank and the address where the group meets, once its processes run."""
        places = group.where(self.config.trainer.start_timeout_s)
        address, _, port = places[0]
        if all(place[0] == address for place in places):
            address = "127.0.0.1"
        timeout_s = self.config.trainer.collective_timeout_s
        return [Rank(i, len(group), address, port, self.machine.device, timeout_s) for i in range(len(group))]

    def cores_for(self, num_processes: int) -> int:
        """Cores for each of so many processes of one role: roles take turns, processes of a role do not."""
        return max(1, self.machine.num_cpus // num_processes)

    def build(self, starts: Sequence[tuple[WorkerGroup, list[ray.ObjectRef], str]]) -> None:
        """Wait until all workers are made, one progress line per role."""
        for group, refs, title in starts:
            with self.console.progress(title):
                wait_all(group.workers, refs, self.config.trainer.start_timeout_s, f"start {group.role}")

    def pids(self) -> dict[str, int]:
        """The process id of every worker, by its name."""
        timeout_s = self.config.trainer.start_timeout_s
        return {
            worker.name: pid
            for group in self.groups
            for worker, (_, pid, _) in zip(group.workers, group.where(timeout_s), strict=True)
        }

    def slots(self) -> dict[str, Slot]:
        """Where every worker is, by its name."""
        return {worker.name: worker.place.slot for group in self.groups for worker in group.workers}

    def shutdown(self) -> None:
        """End all processes and give the devices back."""
        self.supervisor.close()
        for group in self.groups:
            group.shutdown()
        for pool in self.pools:
            pool.release()

    def _pool(self, nnodes: int, per_node: int) -> Pool:
        return Pool(
            nnodes,
            per_node,
            use_gpu=self.machine.device == "cuda",
            timeout_s=self.config.trainer.start_timeout_s,
            grow_s=self.config.ray_kwargs.ray_init.wait_for_nodes_s,
        )


def start_roles(
    cluster: Cluster, tokenizer: Any, total_steps: int
) -> tuple[ActorGroup, ReferenceGroup | None, CriticGroup | None, ReplicaPool, WorkerGroup | None]:
    """Actor, reference (where a KL term reads it), critic (where the estimator does), rollout pool and reward model, ready to work."""
    config = cluster.config
    objective = Objective.from_config(config.actor_rollout_ref.actor, config.data.max_response_length)
    slots = cluster.actor_pool().slots()
    threads = cluster.cores_for(len(slots))

    engine_slots = cluster.rollout_slots()
    cores = cluster.cores_for(len(engine_slots))
    engine_spec = EngineSpec.from_config(config, cluster.machine.device, model_path=cluster.model_path, cores=cores)
    # All processes first: they start beside each other. Three calls at once: a long poll, a submission, a control call.
    engines = cluster.group("rollout", engine_slots, engine_spec.threads, engine_environment(engine_spec), calls_at_once=3)
    actors = cluster.group("actor", slots, threads, stateful=True)
    references = cluster.group("reference", slots, threads) if derived.needs_reference(config) else None
    critics = cluster.group("critic", slots, threads, stateful=True) if needs_critic(config) else None
    scorers = None
    if derived.has_reward_model(config):
        places = cluster.reward_model_slots()
        scorers = cluster.group("reward_model", places, cluster.cores_for(len(places)))

    engines.where(config.trainer.start_timeout_s)
    starts = [(engines, engines.start_build(rollout_factory, [(engine_spec,)] * len(engines)), "starting the rollout engine")]
    spec = actor_spec(config, cluster.model_path, objective, total_steps, sender_spec(engine_spec))
    ranked: list[tuple[SupervisedGroup, Callable[..., Any], tuple[Any, ...], tuple[Any, ...]]]
    ranked = [(actors, actor_factory, (spec,), ())]
    if references is not None:
        fsdp = config.actor_rollout_ref.ref.fsdp_config
        policy = replace(spec.policy, dtype=fsdp.dtype, train=False)
        ranked.append((references, reference_factory, (policy,), (fsdp.param_offload,)))
    if critics is not None:
        ranked.append((critics, critic_factory, (critic_spec(config, spec.policy, total_steps),), ()))
    if scorers is not None:
        ranked.append((scorers, reward_model_factory, (reward_model_spec(config.reward.reward_model),), ()))
    starts += [(entry[0], _begin(cluster, *entry), f"starting the {entry[0].role.replace('_', ' ')}") for entry in ranked]
    cluster.build(starts)
    for group, *_ in ranked:
        group.built()

    pool = _make_pool(cluster, engines, actors, engine_spec)
    actor = make_actor(config, actors, objective, tokenizer)
    reference = None
    if references is not None:
        rule, splits = derived.logprob_rule(config, "ref"), config.trainer.on_out_of_memory == "split"
        reference = ReferenceGroup(references, rule=rule, want_hidden=objective.needs_full_kl, splits=splits)
    return actor, reference, None if critics is None else make_critic(config, critics), pool, scorers


def _make_pool(cluster: Cluster, engines: SupervisedGroup, actors: SupervisedGroup, spec: EngineSpec) -> ReplicaPool:
    """The rollout role over its engines, which take their weights from the actors."""
    transfer = Transfer(spec.weight_backend, actors, engines, spec.tensor_parallel_size)

    def build_engine(worker: Worker) -> ray.ObjectRef:
        return worker.actor.build.remote(rollout_factory, spec)

    can_replace = transfer.can_lose_engines and cluster.supervisor.restarts
    replicas = Replicas(engines, build_engine if can_replace else None, cluster.supervisor)
    rollout = cluster.config.actor_rollout_ref.rollout
    options = PoolOptions(
        max_num_seqs=rollout.max_num_seqs,
        sleeps=spec.sleep_mode,
        verify_checksum=rollout.checkpoint_engine.verify_checksum,
        step_timeout_s=cluster.config.trainer.step_timeout_s,
    )
    return ReplicaPool(replicas, transfer, options)


def make_actor(config: Config, group: SupervisedGroup, objective: Objective, tokenizer: Any) -> ActorGroup:
    """The actor's role over its group."""
    return ActorGroup(
        group,
        config.actor_rollout_ref.actor,
        train_rule=derived.update_rule(config),
        forward_rule=derived.logprob_rule(config, "rollout"),
        always_old=recomputes_old_logprobs(config),
        old_from_engine=config.algorithm.rollout_correction.bypass_mode,
        objective=objective,
        tokenizer=tokenizer,
        splits=config.trainer.on_out_of_memory == "split",
    )


def actor_spec(
    config: Config, model_path: str, objective: Objective, total_steps: int, sender: SenderSpec | None = None
) -> ActorSpec:
    """What every actor rank is told."""
    actor = config.actor_rollout_ref.actor
    return ActorSpec(
        policy=PolicySpec(
            model=replace(config.actor_rollout_ref.model, path=model_path),
            temperature=config.actor_rollout_ref.rollout.temperature,
            dtype=actor.fsdp_config.dtype,
            reshard_after_forward=actor.fsdp_config.reshard_after_forward,
            train=True,
        ),
        objective=objective,
        optim=actor.optim,
        total_optimizer_steps=(total_steps - config.trainer.critic_warmup) * derived.updates_per_step(config),
        seed=config.trainer.seed,
        sender=sender or SenderSpec(),
        param_offload=actor.fsdp_config.param_offload,
        optimizer_offload=actor.fsdp_config.optimizer_offload,
        old_from_engine=config.algorithm.rollout_correction.bypass_mode,
    )


def sender_spec(engine: EngineSpec) -> SenderSpec:
    """The actor's side of the engines' weight updates."""
    return SenderSpec(engine.weight_backend, engine.bucket_bytes, engine.dtype, engine.verify_checksum)


def decoder(tokenizer: Any) -> Callable[[Sequence[int]], str]:
    """Response tokens as the text that a reward function sees."""
    return lambda token_ids: tokenizer.decode(list(token_ids), skip_special_tokens=True)


def _begin(
    cluster: Cluster, group: SupervisedGroup, factory: Callable[..., Any], before: tuple[Any, ...], after: tuple[Any, ...]
) -> list[ray.ObjectRef]:
    """Start building the ranks of a group, which meet at a new address every time they are built."""
    return group.begin(lambda: group.start_build(factory, [(*before, rank, *after) for rank in cluster.ranks(group)]))
