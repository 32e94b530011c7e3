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
from grpo_rl.cluster.critic import CriticGroup, critic_factory, critic_spec, make_critic
from grpo_rl.cluster.groups import WorkerGroup, wait_all
from grpo_rl.cluster.placement import Pool, Slot
from grpo_rl.cluster.pool import PoolOptions, ReplicaPool
from grpo_rl.cluster.roles import ActorGroup, ReferenceGroup, actor_factory, reference_factory, rollout_factory
from grpo_rl.cluster.transfer import Transfer
from grpo_rl.config import derived
from grpo_rl.config.derived import Machine
from grpo_rl.config.schema import Config
from grpo_rl.plan_algorithm import needs_critic, recomputes_old_logprobs
from grpo_rl.rollout.engine import EngineSpec
from grpo_rl.rollout.environment import SPIN_COUNT, engine_environment
from grpo_rl.telemetry.console import Console
from grpo_rl.workers.actor import ActorSpec, SenderSpec
from grpo_rl.workers.policy import PolicySpec, Rank


class Cluster:
    """The processes of a run: pools of devices, and the worker groups placed in them."""

    def __init__(self, config: Config, machine: Machine, model_path: str, log_dir: Path, console: Console) -> None:
        self.config = config
        self.machine = machine
        self.model_path = model_path
        self.log_dir = log_dir
        self.console = console
        self.groups: list[WorkerGroup] = []
        self.pools: list[Pool] = []

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

    def group(
        self,
        role: str,
        slots: Sequence[Slot],
        threads: int,
        environment: Mapping[str, str] = MappingProxyType({}),
        calls_at_once: int = 1,
    ) -> WorkerGroup:
        """Processes for a role, started but with nothing in them yet; `threads` are OpenMP's on a CPU."""
        environment = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"} | ENVIRONMENT | dict(environment)
        environment |= faults.environment()
        group = WorkerGroup(
            role,
            slots,
            log_dir=self.log_dir,
            environment=environment,
            call_timeout_s=self.config.trainer.step_timeout_s,
            threads_per_worker=calls_at_once,
        )
        self.groups.append(group)
        return group

    def ranks(self, group: WorkerGroup) -> list[Rank]:
        """Each process's rank and the address where the group meets, once its processes run."""
        places = group.where(self.config.trainer.start_timeout_s)
        address, _, port = places[0]
        if all(place[0] == address for place in places):
            address = "127.0.0.1"
        timeout_s = self.config.trainer.step_timeout_s
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

    def shutdown(self) -> None:
        """End all processes and give the devices back."""
        for group in self.groups:
            group.shutdown()
        for pool in self.pools:
            pool.release()

    def _pool(self, nnodes: int, per_node: int) -> Pool:
        return Pool(nnodes, per_node, use_gpu=self.machine.device == "cuda", timeout_s=self.config.trainer.start_timeout_s)


ENVIRONMENT = {
    "GOMP_SPINCOUNT": str(SPIN_COUNT),
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}


def start_roles(
    cluster: Cluster, tokenizer: Any, total_steps: int
) -> tuple[ActorGroup, ReferenceGroup | None, CriticGroup | None, ReplicaPool]:
    """Actor, reference (where a KL term reads it), critic (where the estimator does) and rollout pool, ready to work."""
    config = cluster.config
    actor_config, rollout_config = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    objective = Objective.from_config(actor_config, config.data.max_response_length)
    slots = cluster.actor_pool().slots()
    threads = cluster.cores_for(len(slots))

    engine_slots = cluster.rollout_slots()
    cores = cluster.cores_for(len(engine_slots))
    engine_spec = EngineSpec.from_config(config, cluster.machine.device, model_path=cluster.model_path, cores=cores)
    # Three calls at once: a long poll, a submission beside it, and a control call.
    engines = cluster.group("rollout", engine_slots, engine_spec.threads, engine_environment(engine_spec), calls_at_once=3)
    starts = [(engines, engines.start_build(rollout_factory, [(engine_spec,)] * len(engines)), "starting the rollout engine")]

    actors = cluster.group("actor", slots, threads)
    spec = actor_spec(config, cluster.model_path, objective, total_steps, sender_spec(engine_spec))
    starts.append(
        (actors, actors.start_build(actor_factory, [(spec, rank) for rank in cluster.ranks(actors)]), "starting the actor")
    )

    references = None
    if derived.needs_reference(config):
        references = cluster.group("reference", slots, threads)
        starts.append((references, _start_reference(cluster, references, spec), "starting the reference"))
    critics = None
    if needs_critic(config):
        critics = cluster.group("critic", slots, threads)
        arguments = [(critic_spec(config, spec.policy, total_steps), rank) for rank in cluster.ranks(critics)]
        starts.append((critics, critics.start_build(critic_factory, arguments), "starting the critic"))
    cluster.build(starts)

    transfer = Transfer(engine_spec.weight_backend, actors, engines, engine_spec.tensor_parallel_size)
    options = PoolOptions(
        max_num_seqs=rollout_config.max_num_seqs,
        sleeps=engine_spec.sleep_mode,
        verify_checksum=rollout_config.checkpoint_engine.verify_checksum,
        step_timeout_s=config.trainer.step_timeout_s,
    )
    pool = ReplicaPool(engines, transfer, decoder(tokenizer), options)
    actor = make_actor(config, actors, objective, tokenizer)
    reference = None
    if references is not None:
        rule = derived.logprob_rule(config, "ref")
        reference = ReferenceGroup(references, rule=rule, want_hidden=objective.needs_full_kl)
    return actor, reference, None if critics is None else make_critic(config, critics), pool


def make_actor(config: Config, group: WorkerGroup, objective: Objective, tokenizer: Any) -> ActorGroup:
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


def _start_reference(cluster: Cluster, group: WorkerGroup, actor: ActorSpec) -> list[ray.ObjectRef]:
    fsdp = cluster.config.actor_rollout_ref.ref.fsdp_config
    spec = replace(actor.policy, dtype=fsdp.dtype, train=False)
    return group.start_build(reference_factory, [(spec, rank, fsdp.param_offload) for rank in cluster.ranks(group)])
