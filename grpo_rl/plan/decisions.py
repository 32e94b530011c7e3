"""The decisions of a run, each made here: which roles start, where, with which passes and sizes. The cluster
builds the `Plan`, the dry run prints it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal, get_args

from grpo_rl.algos.advantages.registered import ADVANTAGES
from grpo_rl.algos.correction import RolloutCorrection
from grpo_rl.algos.objective import Objective
from grpo_rl.config import derived
from grpo_rl.config.derived import Machine, MicroBatchRule
from grpo_rl.config.schema.algorithm import TeacherConfig
from grpo_rl.config.schema.tree import Config, DataConfig
from grpo_rl.errors import ConfigError
from grpo_rl.frozen import frozen
from grpo_rl.installed import lacks
from grpo_rl.plan.algorithm import objective_of
from grpo_rl.plan.model_folder import ModelSize, model_size
from grpo_rl.registry import needs_of
from grpo_rl.rollout.engine import EngineSpec
from grpo_rl.schedules.registered import roles_of, schedule_of
from grpo_rl.trainer.session import Schedule

RoleName = Literal["rollout", "actor", "reference", "teacher", "critic", "reward_model"]
OldLogprobs = Literal["actor", "engine", "none"]  # who computes old log-probs


RowKind = Literal["answers", "pairs", "labelled answers", "rated steps"]  # rows trained as they stand


@frozen
class PoolPlan:
    name: str
    nnodes: int
    devices_per_node: int
    nodes_per_engine: int = 1  # nodes over which an engine spreads its weights


@frozen
class RolePlan:
    name: RoleName
    pool: str
    num_workers: int
    threads: int  # OpenMP threads of each process on a CPU
    devices_per_worker: int = 1
    calls_at_once: int = 1  # calls that a process answers side by side
    stateful: bool = False  # its state is part of checkpoints, and is restored when a process fails


@frozen
class Passes:
    old_logprobs: OldLogprobs
    old_readers: tuple[str, ...]  # readers of old log-probs beside the ratio, in words of the plan's page
    update: MicroBatchRule
    old: MicroBatchRule
    reference: MicroBatchRule
    critic: MicroBatchRule
    replays_routing: bool = False  # updates take the experts of the pass for old log-probs


@frozen
class Sizes:
    rollouts_per_step: int
    mini_batches: int  # of a batch, an optimizer step of the actor each
    updates_per_step: int  # optimizer steps of the actor: mini-batches times passes over them
    critic_warmup: int
    critic_mini_batch_size: int
    critic_epochs: int
    critic_updates_per_step: int
    num_train_rows: int | None = None  # None if they are counted only when the data is read
    total_steps: int | None = None  # None if they depend on data that is not read yet
    iteration: tuple[int, int] | None = None  # steps of the reward model and of the policy

    @property
    def policy_steps(self) -> int:
        total = self.total_steps or 0
        return total if self.iteration is None else derived.policy_steps(total, *self.iteration)

    @property
    def actor_updates(self) -> int:
        """Optimizer steps of the actor in the run, which its learning rate's schedule spans."""
        return max(0, self.policy_steps - self.critic_warmup) * self.updates_per_step

    @property
    def critic_updates(self) -> int:
        return self.policy_steps * self.critic_updates_per_step

    @property
    def reward_model_updates(self) -> int:
        total = self.total_steps or 0
        return total if self.iteration is None else total - self.policy_steps


@frozen
class RewardPlan:
    scores: bool = False
    rules: bool = False  # reward functions run, in own processes
    judge: bool = False  # a language model at an endpoint judges responses
    steps_by_rules: bool = False  # the estimator reads rewards of steps, which reward functions give


@frozen
class RoleMemory:
    """Bytes that a role needs on one device (in one process on a CPU)."""

    role: RoleName
    num_bytes: int
    at_rest: int  # kept between the phases of a step
    parts: str


@frozen
class Plan:
    """All decisions before a run starts: a plain value, which can be made for another machine."""

    config: Config
    machine: Machine
    roles: tuple[RolePlan, ...]  # roles that start, in this order
    pools: tuple[PoolPlan, ...]
    passes: Passes
    sizes: Sizes
    schedule: Schedule  # loops over the steps of a session; names the roles that it can drive
    reward: RewardPlan
    engine: EngineSpec | None  # one replica, whose model_path is the configured one; None if none starts
    objective: Objective
    advantage_needs: frozenset[str]
    rows: RowKind | None  # None if what is trained on is sampled
    critic_model: str | None  # folder of the critic's model; None for a copy of the actor's
    reference: str | None = None
    """What reads a reference, in words of the plan's page; None without one."""
    teachers: tuple[tuple[str, TeacherConfig], ...] = ()
    """Teachers by name; those with an own model are in the ranks of the role `teacher`."""
    resumes: bool = False  # the run starts with the weights of a checkpoint
    collection: Plan | None = None  # the phase before training in which the initial policy samples
    model: ModelSize | None = None  # None if the policy's folder does not contain its sizes
    memory: tuple[RoleMemory, ...] = ()  # estimates; empty if the model's sizes are unknown
    text: str = ""

    def render(self) -> str:
        """Return the plan's page for a terminal: plain text, at most 100 columns."""
        return self.text

    @property
    def base_reference(self) -> str | None:
        """What reads a reference that is the actor's base model under adapters, in the actor's ranks."""
        return self.reference if self.config.model.lora_rank else None

    def role(self, name: RoleName) -> RolePlan | None:
        return next((role for role in self.roles if role.name == name), None)

    @property
    def samples_with_vllm(self) -> bool:
        return self.role("rollout") is not None and self.config.rollout.name == "vllm"

    @property
    def lacks(self) -> str | None:
        """What this machine lacks to run the plan; engines in a cluster may be elsewhere."""
        return lacks(vllm=self.samples_with_vllm and not self.machine.cluster, device=self.machine.device)

    def num_workers(self, name: RoleName) -> int:
        return sum(role.num_workers for role in self.roles if role.name == name)

    def pool(self, name: str) -> PoolPlan:
        return next(pool for pool in self.pools if pool.name == name)

    def with_rows(self, num_rows: int) -> Plan:
        """Return the plan with the number of rows of the data, and the steps that follow."""
        sizes = dataclasses.replace(self.sizes, num_train_rows=num_rows, total_steps=_total_steps(self.config, num_rows))
        return dataclasses.replace(self, sizes=sizes)

    def with_data(self, data: DataConfig) -> Plan:
        return dataclasses.replace(self, config=dataclasses.replace(self.config, data=data))

    @property
    def overlaps(self) -> bool:
        """Responses are sampled while the policy is trained, by a schedule that looks at their age."""
        return derived.overlaps(self.config)

    @property
    def plays_episodes(self) -> bool:
        return self.role("rollout") is not None and self.config.plays_episodes

    @property
    def trains(self) -> bool:
        return not self.config.trainer.val_only

    @property
    def trains_reward_model(self) -> bool:
        role = self.role("reward_model")
        return role is not None and role.stateful

    @property
    def world_size(self) -> int:
        return self.num_workers("actor")

    @property
    def num_replicas(self) -> int:
        return self.num_workers("rollout")

    @property
    def replica_bounds(self) -> tuple[int, int]:
        rollout = self.config.rollout
        return rollout.min_replicas or self.num_replicas, rollout.max_replicas or self.num_replicas

    @property
    def colocated(self) -> bool:
        roles = {role.name: role.pool for role in self.roles}
        return roles.get("rollout") == roles.get("actor")

    @property
    def computes_alone(self) -> bool:
        """One process computes during the whole run, and has all cores."""
        return self.collection is None and sum(role.num_workers for role in self.roles) == 1

    @property
    def engine_width(self) -> int:
        return 4 if self.engine is not None and self.engine.dtype == "float32" else 2

    @property
    def engines_share_gpus(self) -> bool:
        """Another role works on the engines' GPUs, so that neither may start beside the other."""
        engines = self.role("rollout")
        other_pools = {role.pool for role in self.roles if role.name != "rollout"}
        return engines is not None and self.machine.device == "cuda" and engines.pool in other_pools

    @property
    def recomputes_old_logprobs(self) -> bool:
        return self.passes.old_logprobs == "actor"


def decide(
    config: Config,
    machine: Machine,
    *,
    num_train_rows: int | None = None,
    resumes: bool = False,
    model: ModelSize | None = None,
) -> Plan:
    """Return the plan without its page and memory estimate, of the configuration with what the schedule
    fixes. `resumes`: a checkpoint of the run exists; `model`: its sizes, if they were read before. Raises ConfigError for
    unregistered names."""
    sampled = derived.collection(config) if config.collects else None
    config = derived.settled(config)
    model = model or model_size(config.model.path)
    objective = objective_of(config)
    needs = needs_of(ADVANTAGES.get(config.algorithm.adv_estimator))
    schedule = schedule_of(config)
    driven = roles_of(schedule) - (frozenset() if config.samples_answers else {"rollout", "rewarder"})
    if not config.trains_reward_model:
        driven -= {"reward_model"}
    reference = _reference(config, objective) if "reference" in driven else None
    starts_reference = reference is not None and not config.model.lora_rank
    teachers, scores = derived.teachers_of(config), "rewarder" in driven
    if teachers and "teacher" not in driven:
        raise ConfigError(f"distillation.enabled=true: trainer.schedule={config.trainer.schedule} does not ask teachers")
    roles = tuple(
        _roles(config, machine, driven, needs_critic="values" in needs, starts_reference=starts_reference, resumes=resumes)
    )
    return Plan(
        config=config,
        machine=machine,
        roles=roles,
        pools=_pools(config, machine, {role.pool for role in roles}),
        passes=_passes(config, objective),
        sizes=_sizes(config, num_train_rows),
        schedule=schedule,
        reward=RewardPlan(
            scores,
            rules=scores and bool(config.reward.functions),
            judge=scores and config.has_judge,
            steps_by_rules="steps" in needs and not (config.plays_episodes or config.scores_steps_by_model),
        ),
        engine=_engine(config, machine, roles),
        objective=objective,
        advantage_needs=needs,
        rows=_rows(config, objective),
        critic_model=config.critic.model.path if config.critic_has_own_model else None,
        reference=reference,
        teachers=tuple(teachers.items()),
        resumes=resumes,
        collection=None if sampled is None else decide(sampled, machine, model=model),
        model=model,
    )


def _reference(config: Config, objective: Objective) -> str | None:
    """Return the purpose of a reference, None if nothing reads one. Raises ConfigError."""
    readers = {
        "the KL in the loss": config.has_kl_in_loss,
        "the KL in the reward": config.has_kl_in_reward,
        "the loss": objective.needs_ref,
    }
    purpose = next((reader for reader, reads in readers.items() if reads), None)
    model = config.model
    if objective.needs_ref and not config.has_kl_in_loss and model.lora_rank and model.lora_adapter_path is not None:
        raise ConfigError(
            f"actor_rollout_ref.model.lora_adapter_path={model.lora_adapter_path}: the loss compares with a reference, which under "
            "adapters is the base model and not the policy that this run would begin with; merge the adapter into a model and begin "
            "with that"
        )
    return purpose


def _roles(
    config: Config, machine: Machine, driven: frozenset[str], *, needs_critic: bool, starts_reference: bool, resumes: bool
) -> Iterator[RolePlan]:
    """Yield the roles of those that the schedule drives."""
    trains, rollout, ranks = "actor" in driven, config.rollout, machine.world_size(config)
    parallel = rollout.tensor_model_parallel_size
    replicas = rollout.num_replicas or machine.world_size(config, "rollout") // parallel * rollout.engines_per_device

    def cores(processes: int) -> int:
        # Roles of one pool take turns on the cores; processes of one role, and on a CPU other pools, do not.
        separate = trains and machine.device == "cpu" and not config.is_colocated
        busy = replicas + ranks if separate or derived.overlaps(config) else processes
        return max(1, machine.num_cpus // busy)

    def role(name: RoleName, pool: str, processes: int, *, stateful: bool = False) -> RolePlan:
        return RolePlan(name, pool, processes, cores(processes), stateful=stateful)

    if "rollout" in driven:
        pool = "actor" if config.is_colocated else "rollout"
        threads = (machine.device == "cpu" and rollout.cpu_threads) or cores(replicas)
        # Three calls at once: a long poll, a submission, a control call.
        yield RolePlan("rollout", pool, replicas, threads, parallel, calls_at_once=3)
    if trains or (resumes and "rollout" in driven):
        yield role("actor", "actor", ranks, stateful=True)
    if starts_reference:
        yield role("reference", "actor", ranks, stateful=config.is_iterated)
    if any(teacher.model_path is not None for teacher in derived.teachers_of(config).values()) and "teacher" in driven:
        yield role("teacher", "teacher" if config.distillation.nnodes else "actor", machine.world_size(config, "teacher"))
    if "critic" in driven and needs_critic:
        yield role("critic", "actor", ranks, stateful=True)
    is_trained, scorer = "reward_model" in driven, config.reward.reward_model
    if is_trained or ("rewarder" in driven and scorer.enable):
        pool = "reward_model" if scorer.enable_resource_pool else "actor"
        yield role("reward_model", pool, machine.world_size(config, "reward_model"), stateful=is_trained)


def _rows(config: Config, objective: Objective) -> RowKind | None:
    if config.trains_only_reward_model:
        return "rated steps" if config.reward.reward_model.train.loss == "steps" else "pairs"
    if not config.is_offline:
        return None
    if objective.needs_kl:
        return "labelled answers"
    return "pairs" if objective.needs_pairs else "answers"


def _engine(config: Config, machine: Machine, roles: Sequence[RolePlan]) -> EngineSpec | None:
    names = {role.name: role for role in roles}
    if "rollout" not in names:
        return None
    engine = EngineSpec.from_config(config, machine.device, cores=names["rollout"].threads)
    engine = dataclasses.replace(engine, num_nodes=derived.nodes_per_engine(config, machine))
    if "actor" in names:
        return engine
    # No weights travel, and no other role waits for the engine's memory.
    return dataclasses.replace(engine, weight_backend="object_store", sleep_mode=False)


def _pools(config: Config, machine: Machine, used: set[str]) -> tuple[PoolPlan, ...]:
    """The actor's is reserved first."""
    of_engines, spans = "actor" if config.is_colocated else "rollout", derived.nodes_per_engine(config, machine)
    names = [name for name in get_args(derived.Pool) if name in used]
    return tuple(PoolPlan(name, *machine.devices(config, name), spans if name == of_engines else 1) for name in names)


def _passes(config: Config, objective: Objective) -> Passes:
    """With one update per batch the updated policy is the one that sampled: the ratio is 1, and old log-probs
    are computed only for other readers. Losses over pairs have no ratio."""
    correction = RolloutCorrection.from_config(config.algorithm.rollout_correction)
    readers = {
        "the KL in the reward": config.has_kl_in_reward,
        "the correction of rollouts": correction.active,
        f"the choice of tokens by {objective.loss_mode}": objective.needs_selection,
    }
    old_readers = tuple(reader for reader, reads in readers.items() if reads)
    has_ratio = config.updates_per_step > 1 and not objective.needs_pairs
    old_logprobs: OldLogprobs = "actor" if old_readers or has_ratio else "none"
    return Passes(
        old_logprobs="engine" if correction.bypass_mode else old_logprobs,
        old_readers=old_readers,
        update=derived.pass_rule(config, "actor"),
        old=derived.pass_rule(config, "old"),
        reference=derived.pass_rule(config, "ref"),
        critic=derived.pass_rule(config, "critic"),
        replays_routing=config.actor.router_replay.mode == "R2",
    )


def _sizes(config: Config, num_train_rows: int | None) -> Sizes:
    data, actor, iterate = config.data, config.actor, config.trainer.iterate
    mini_batch_size = config.critic.ppo_mini_batch_size or actor.ppo_mini_batch_size
    epochs = config.critic.ppo_epochs or actor.ppo_epochs
    may_drop_rows = data.filter_overlong_prompts or data.on_bad_row == "skip"
    return Sizes(
        rollouts_per_step=data.train_batch_size * config.rollout.n,
        mini_batches=data.train_batch_size // actor.ppo_mini_batch_size,
        updates_per_step=config.updates_per_step,
        critic_warmup=config.trainer.critic_warmup,
        critic_mini_batch_size=mini_batch_size,
        critic_epochs=epochs,
        critic_updates_per_step=data.train_batch_size // mini_batch_size * epochs,
        num_train_rows=num_train_rows,
        total_steps=_total_steps(config, None if may_drop_rows else num_train_rows),
        iteration=(iterate.reward_model_steps, iterate.steps_per_iteration) if config.is_iterated else None,
    )


def _total_steps(config: Config, num_rows: int | None) -> int | None:
    """`total_training_steps`, or what `total_epochs` passes make; 0 if nothing is trained."""
    if config.trainer.val_only:
        return 0
    if config.trainer.total_training_steps is not None:
        return config.trainer.total_training_steps
    return None if num_rows is None else config.trainer.total_epochs * (num_rows // config.data.train_batch_size)
