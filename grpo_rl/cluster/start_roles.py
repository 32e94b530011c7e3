"""Starts the worker groups of a run in their places, all at the same time, and connects them as the plan decided."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import ray

from grpo_rl import faults
from grpo_rl.cluster.processes.environment import environment_of
from grpo_rl.cluster.processes.placement import NodeSlot, Pool, Slot, check_machines, runs_here
from grpo_rl.cluster.processes.worker_group import Worker, WorkerDied, WorkerFailed, WorkerGroup, make_worker, wait_all
from grpo_rl.cluster.recovery.replicas import Elastic, EngineOrders, Replicas
from grpo_rl.cluster.recovery.supervisor import Recoveries, Supervisor
from grpo_rl.cluster.role_specs import actor_spec, rank_of, roles_over
from grpo_rl.cluster.roles.function_host import FunctionSpec
from grpo_rl.cluster.roles.function_pool import FunctionPool
from grpo_rl.cluster.roles.rollout_pool import PoolOptions, ReplicaPool, Transfer
from grpo_rl.config.relative_paths import function_files
from grpo_rl.envs.setup import EpisodeSetup
from grpo_rl.errors import ClusterError
from grpo_rl.plan.decisions import Plan, RoleName
from grpo_rl.rollout.engine import EngineSpec
from grpo_rl.rollout.engine_environment import engine_environment
from grpo_rl.telemetry.rundir import RunDir
from grpo_rl.telemetry.terminal.console import Console
from grpo_rl.trainer.parts import Roles
from grpo_rl.workers.specs import Rank

DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}
"""The environment of trainer.deterministic: torch refuses cuBLAS's products without one workspace, and NCCL
would choose its way of adding up by message size and topology.
"""
Started = tuple[WorkerGroup, list[ray.ObjectRef]]


@dataclass(eq=False)
class Cluster:
    plan: Plan
    model_path: str
    """The policy's folder on this machine, which an embedded model has only once it is made."""
    reward_model_path: str
    log_dir: Path
    console: Console
    recoveries: Recoveries | None = None

    def __post_init__(self) -> None:
        self.config = self.plan.config
        self.worker_groups: list[WorkerGroup] = []
        self.functions: FunctionPool | None = None
        self.pools: dict[str, Pool] = {}
        self.on_shutdown: list[Callable[[], None]] = []
        self.on_engines: Callable[..., None] = lambda **fields: None
        """Called with `engines` and `workers` of status.json when engines have joined or left."""
        recoveries = self.recoveries or Recoveries(self.config.trainer, self.console.warn)
        self.supervisor = Supervisor(self.config.trainer, recoveries)

    def pool(self, name: str) -> Pool:
        """Return the devices of this pool, which are reserved by the first call."""
        if name not in self.pools:
            planned = self.plan.pool(name)
            self.pools[name] = Pool(
                planned.nnodes,
                planned.devices_per_node,
                use_gpu=self.plan.machine.device == "cuda",
                timeout_s=self.config.trainer.start_timeout_s,
                grow_s=self.config.ray_kwargs.ray_init.wait_for_nodes_s,
                nodes_per_slot=planned.nodes_per_engine,
                check=None if runs_here() else lambda nodes: check_machines(nodes, self.log_dir.parent, *self._read_in(name)),
            )
        return self.pools[name]

    def _read_in(self, pool: str) -> tuple[list[str], dict[str, str]]:
        """Return what the workers in a pool read: files of the user's functions, and folders of models with their settings."""
        parts, critic = self.config.actor_rollout_ref, self.plan.critic_model
        policy, of_policy = parts.model, {"actor", "rollout", "reference", *(["critic"] if critic is None else [])}
        read_by: list[tuple[str | None, str, set[str]]] = [
            (self.reward_model_path, "reward.reward_model.model_path", {"reward_model"}),
            (critic, "critic.model.path", {"critic"}),
            (self.model_path, "actor_rollout_ref.model.path", of_policy),
            (policy.lora_adapter_path, "actor_rollout_ref.model.lora_adapter_path", {"actor"}),
            (policy.tokenizer_path, "actor_rollout_ref.model.tokenizer_path", {"rollout"}),
            *((t.model_path, f"distillation.teacher_models.{name}.model_path", {"teacher"}) for name, t in self.plan.teachers),
        ]
        roles = {str(role.name) for role in self.plan.roles if role.pool == pool}
        models = {path: key for path, key, readers in read_by if path and roles & readers}
        actor, rollout = parts.actor, parts.rollout
        functions = [actor.policy_loss.loss_mode, actor.loss_agg_mode, actor.kl_loss_type, rollout.name]
        return function_files([*functions, asdict(self.config.reward), asdict(rollout.multi_turn)]), models

    def start(self, name: RoleName, environment: Mapping[str, str] | None = None) -> WorkerGroup:
        """Start the processes of a role that the plan has, with nothing in them yet."""
        role = self.plan.role(name)
        assert role is not None, f"the plan has no {name}"
        shared_by = self.config.rollout.engines_per_device if name == "rollout" else 1
        slots = self.pool(role.pool).slots(role.devices_per_worker, shared_by)[: role.num_workers]
        worker_group = self.worker_group(name, slots, role.threads, environment, role.calls_at_once)
        self.worker_groups.append(worker_group)
        return worker_group

    def worker_group(
        self,
        role: str,
        slots: Sequence[Slot | NodeSlot],
        threads: int,
        environment: Mapping[str, str] | None = None,
        calls_at_once: int = 1,
    ) -> WorkerGroup:
        """Start one process per slot, with nothing in it yet; `threads` are OpenMP's on a CPU."""
        common = environment_of(alone=self.plan.computes_alone)
        deterministic = DETERMINISTIC if self.config.trainer.deterministic else {}
        return WorkerGroup(
            role,
            slots,
            log_dir=self.log_dir,
            environment={
                "OMP_NUM_THREADS": str(threads),
                **common,
                **(environment or {}),
                **faults.environment(),
                **deterministic,
            },
            call_timeout_s=self.config.trainer.step_timeout_s,
            threads_per_worker=calls_at_once,
        )

    def start_functions(self, spec: FunctionSpec) -> Started:
        """Start a function host on every node of the run, and begin to build it.

        It asks Ray for a core for each of its processes, up to those that devices of this run leave on the node.
        """
        used = set().union(*(pool.nodes for pool in self.pools.values()))
        names = [node["NodeID"] for node in ray.nodes() if node["NodeID"] in used]
        slots, cores = zip(*(self._function_slot(spec, name) for name in names), strict=True)
        worker_group = self.worker_group("functions", slots, 1)  # without it the run goes on
        self.functions = FunctionPool(worker_group, spec, cores, self.supervisor)
        self.on_shutdown.append(self.functions.close)
        return worker_group, self.functions.start_build()

    def join_functions(self, node: str) -> None:
        functions = self.functions
        if functions is not None and all(worker.slot.node != node for worker in functions.worker_group.workers):
            functions.join(*self._function_slot(functions.spec, node))

    def _function_slot(self, spec: FunctionSpec, node: str) -> tuple[NodeSlot, int]:
        """Return the place of a function host and the cores that this run's devices leave to it there."""
        resources = next(known["Resources"] for known in ray.nodes() if known["NodeID"] == node)
        free = int(resources.get("CPU", 0.0) - sum(pool.cpus_on(node) for pool in self.pools.values()))
        # A local Ray has no others' jobs, and its sessions take turns on the cores as roles do.
        num_cpus = 0 if runs_here() else max(0, min(sum(spec.sizes(free).values()), free))
        return NodeSlot(node, float(num_cpus)), free

    @property
    def all_groups(self) -> list[WorkerGroup]:
        """All worker groups, those included without which the run goes on."""
        return self.worker_groups + ([] if self.functions is None else [self.functions.worker_group])

    def ranks(self, worker_group: WorkerGroup) -> list[Rank]:
        """Return each process's rank and the address where the set meets, once its processes run."""
        trainer = self.config.trainer
        places = worker_group.where(trainer.start_timeout_s)
        address, _, port = places[0]
        timeouts = trainer.collective_timeout_s, trainer.start_timeout_s
        return [
            Rank(i, len(places), address, port, self.plan.machine.device, *timeouts, trainer.deterministic, node_address)
            for i, (node_address, _, _) in enumerate(places)
        ]

    def start_ranks(self, worker_group: WorkerGroup, worker: str, spec: Any, **options: Any) -> Started:
        ranks = [(spec, rank) for rank in self.ranks(worker_group)]
        return worker_group, worker_group.start_build(partial(make_worker, worker, **options), ranks)

    def build(self, starts: Sequence[Started], began: float | None = None) -> None:
        """Wait until all workers are made. One progress line per role has the time since `began`: they start side by side."""
        for worker_group, refs in starts:
            role = "rollout engine" if worker_group.role == "rollout" else worker_group.role.replace("_", " ")
            with self.console.progress(f"starting the {role}", since=began):
                wait_all(worker_group.workers, refs, self.config.trainer.start_timeout_s, f"start {worker_group.role}")
            # Replicas are watched by those who replace them.
            for worker in worker_group.workers if worker_group.role != "rollout" else ():
                self.supervisor.watch(worker)

    @contextmanager
    def vacated(self) -> Iterator[None]:
        pools: dict[str, str] = {role.name: role.pool for role in self.plan.roles}
        shared = pools.pop("rollout")
        ranks = [worker_group for worker_group in self.worker_groups if pools.get(worker_group.role) == shared]
        try:
            for worker_group in ranks:
                worker_group.call("vacate")
            yield
        finally:
            for worker_group in ranks:
                worker_group.call("occupy")

    def pids(self) -> dict[str, int]:
        return {worker.name: worker.pid for worker_group in self.all_groups for worker in worker_group.workers if worker.pid}

    def fixed_places(self) -> dict[str, Slot]:
        """Return where the workers are without which the run cannot go on: all, but for engines whose number may change."""
        min_replicas, max_replicas = self.plan.replica_bounds
        flexible = "rollout" if min_replicas < max_replicas else ""
        fixed = (worker_group for worker_group in self.worker_groups if worker_group.role != flexible)
        return {worker.name: worker.slot for worker_group in fixed for worker in worker_group.workers}

    def shutdown(self) -> None:
        self.supervisor.close()
        for end in self.on_shutdown:
            end()
        for worker_group in self.worker_groups:
            worker_group.shutdown()
        for pool in self.pools.values():
            pool.release()


_ENGINE = partial(make_worker, "rollout.RolloutWorker")


def start_roles(
    cluster: Cluster,
    plan: Plan,
    tokenizer: Any,
    episodes: EpisodeSetup | None = None,
    functions: FunctionSpec | None = None,
) -> tuple[Roles, WorkerGroup | None]:
    """Start the roles of the plan; return them, and the processes of a reward model.

    With `episodes` the rollout role plays these. `functions` run on every node. Processes start beside each
    other, but engines on the GPUs of others are built alone: vLLM sizes its cache by what is free on the
    device, and takes every change meanwhile for its own (`gpu_worker.determine_available_memory`). They give
    their memory back if they can, and ranks come after.
    """
    engine_spec = None if plan.engine is None else replace(plan.engine, model_path=cluster.model_path)
    for planned in plan.pools:
        cluster.pool(planned.name)
    began = time.monotonic()
    hosts = [] if functions is None else [cluster.start_functions(functions)]
    engines = None if engine_spec is None else cluster.start("rollout", engine_environment(engine_spec))
    ranks: dict[RoleName, WorkerGroup] = {role.name: cluster.start(role.name) for role in plan.roles if role.name != "rollout"}

    starts = list[Started]()
    if engines is not None and engine_spec is not None:
        trainer = plan.config.trainer
        with cluster.console.progress("starting processes"):
            engines.where(trainer.start_timeout_s)
        arguments = (engine_spec, trainer.start_timeout_s, trainer.step_timeout_s)
        starts.append((engines, engines.start_build(_ENGINE, [arguments] * len(engines))))
        if plan.engines_share_gpus:
            cluster.build(starts, began)
            starts = []
            if engine_spec.sleep_mode:
                engines.call("sleep")
    actors_spec = actor_spec(plan, cluster.model_path, engine_spec)
    for name, worker_group in ranks.items():
        worker, spec, options = rank_of(name, plan, actors_spec, cluster.reward_model_path)
        starts.append(cluster.start_ranks(worker_group, worker, spec, **options))
    for worker_group, _ in hosts:
        try:
            worker_group.where(plan.config.trainer.start_timeout_s)
        except WorkerDied:
            raise
        except WorkerFailed as error:
            cores = ", ".join(f"{worker.slot.num_cpus:g}" for worker in worker_group.workers)
            raise ClusterError(
                f"{error}\n  they ask Ray for {cores} cores of their nodes, which others may hold: lower reward.num_workers or "
                "actor_rollout_ref.rollout.multi_turn.environment.num_workers, or wait for those"
            ) from error
    cluster.build([*starts, *hosts], began)
    if cluster.functions is not None:
        cluster.console.info(f"functions {cluster.functions.listen()}")

    roles = roles_over(plan, ranks, tokenizer)
    roles.recoveries = cluster.supervisor.recoveries.metrics
    if engines is not None and engine_spec is not None:
        roles.rollout = pool = _make_pool(cluster, engines, ranks.get("actor"), engine_spec)
        if episodes is not None and cluster.functions is not None:
            # It loads parts of transformers that a controller without episodes does without.
            from grpo_rl.rollout.model_info import stop_token_ids

            stop_ids = frozenset(stop_token_ids(engine_spec))
            environments = cluster.functions.environments()
            roles.rollout = episodes.pool(pool, environments, tokenizer, stop_ids, engine_spec.max_model_len)
    return roles, ranks.get("reward_model")


def _make_pool(cluster: Cluster, engines: WorkerGroup, actors: WorkerGroup | None, spec: EngineSpec) -> ReplicaPool:
    """Return the rollout role over its engines. Their weights come from the actors, if any."""
    plan, trainer = cluster.plan, cluster.config.trainer
    options = PoolOptions(
        max_num_seqs=spec.max_num_seqs,
        sleeps=spec.sleep_mode,
        step_timeout_s=trainer.step_timeout_s,
        max_staleness=None if plan.overlaps else 0,
        keep_cache=trainer.asynchronous.keep_cache,
        partial_rollout=trainer.asynchronous.partial_rollout,
        starts_asleep=plan.engines_share_gpus and spec.sleep_mode,
    )
    if actors is None:
        return ReplicaPool(Replicas(engines, cluster.supervisor), None, options)

    def build_engine(worker: Worker) -> ray.ObjectRef:
        return worker.actor.build.remote(_ENGINE, spec, trainer.start_timeout_s, trainer.step_timeout_s)

    devices, (min_replicas, max_replicas), planned = spec.tensor_parallel_size, plan.replica_bounds, plan.role("rollout")
    can_replace, elastic = cluster.supervisor.recoveries.restarts, None
    if can_replace and planned is not None and min_replicas < max_replicas:
        elastic = Elastic(min_replicas, max_replicas, cluster.pool(planned.pool), devices, cluster.join_functions)
    vacated = cluster.vacated if plan.engines_share_gpus else None
    replicas = Replicas(engines, cluster.supervisor, build_engine if can_replace else None, vacated, elastic)
    if elastic is not None:

        def tell(engines: dict[str, Any]) -> None:
            cluster.on_engines(engines=engines, workers=cluster.pids())

        cluster.on_shutdown.append(EngineOrders(replicas, elastic, RunDir(cluster.log_dir.parent).engine_orders, tell).close)
    transfer = Transfer(spec.weight_backend, actors, engines, devices, trainer.start_timeout_s, verify=spec.verify_checksum)
    return ReplicaPool(replicas, transfer, options)
