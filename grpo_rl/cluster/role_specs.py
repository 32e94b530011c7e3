"""What the ranks of each role are built from, and the roles over them: all that the plan decides of a role, without Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from grpo_rl.algos.correction import RolloutCorrection
from grpo_rl.cluster.roles.reference_role import BaseReferenceRole, MovingReferenceRole, ReferenceRole, Teacher, TeacherRole
from grpo_rl.cluster.roles.trained_roles import ActorRole, CriticRole, TrainedRewardModelRole
from grpo_rl.config.derived import MicroBatchRule
from grpo_rl.config.schema.model import ModelConfig, RefFsdpConfig
from grpo_rl.data.prompts import Renderer
from grpo_rl.plan.decisions import Plan, RoleName
from grpo_rl.rollout.engine import EngineSpec
from grpo_rl.trainer.parts import Roles
from grpo_rl.workers.specs import ActorSpec, CriticSpec, PolicySpec, RewardModelSpec, SenderSpec, TrainedRewardModelSpec

if TYPE_CHECKING:
    from grpo_rl.cluster.processes.worker_group import WorkerGroup


def rank_of(name: RoleName, plan: Plan, actor: ActorSpec, reward_model_path: str) -> tuple[str, Any, dict[str, Any]]:
    """Return what a role's ranks are: their class in `grpo_rl.workers`, what they are built from, and its options."""
    policy = actor.policy
    if name == "actor":
        return "actor.ActorWorker", actor, {}
    if name == "critic":
        return "critic.CriticWorker", critic_spec(plan, policy), {}
    if name == "reference":
        fsdp = plan.config.ref.fsdp_config
        frozen = replace(policy.sharded_as(fsdp, plan.passes.reference.sequence_ranks), train=False)
        return "reference.ReferenceWorker", (frozen,), {"offload": fsdp.param_offload}
    if name == "teacher":
        return "reference.ReferenceWorker", teacher_specs(plan, policy), {"offload": plan.config.distillation.param_offload}
    settings, seed = plan.config.reward.reward_model, plan.config.trainer.seed
    scorer = RewardModelSpec(reward_model_path, settings.dtype, settings.trust_remote_code, settings.param_offload)
    if not plan.trains_reward_model:
        return "reward_model.RewardModelWorker", scorer, {}
    num_updates = plan.sizes.reward_model_updates
    trained = TrainedRewardModelSpec(scorer, settings.train, num_updates, seed, policy.share_prompts)
    return "reward_model.TrainedRewardModelWorker", trained, {}


def roles_over(plan: Plan, ranks: Mapping[RoleName, WorkerGroup], tokenizer: Any) -> Roles:
    actors, critics, scorers = ranks.get("actor"), ranks.get("critic"), ranks.get("reward_model")
    actor = None if actors is None else make_actor(plan, actors, tokenizer)
    size, epochs = plan.sizes.critic_mini_batch_size, plan.sizes.critic_epochs
    reward_model = None
    if scorers is not None and plan.trains_reward_model:
        settings = plan.config.reward.reward_model
        share_prompts = plan.config.actor.use_prefix_grouper is not False
        rule = MicroBatchRule(settings.max_token_len_per_gpu, None, share_prompts)
        pairs = settings.train.loss == "bradley_terry"
        reward_model = TrainedRewardModelRole(scorers, rule=rule, pairs=pairs, tokenizer=tokenizer)
    return Roles(
        actor=actor,
        reference=make_reference(plan, ranks.get("reference"), actor),
        teacher=None if actor is None else make_teacher(plan, ranks.get("teacher"), actor, tokenizer),
        critic=None if critics is None else CriticRole(critics, rule=plan.passes.critic, mini_batch_size=size, epochs=epochs),
        reward_model=reward_model,
    )


def make_actor(plan: Plan, worker_group: WorkerGroup, tokenizer: Any) -> ActorRole:
    return ActorRole(
        worker_group,
        plan.config.actor,
        train_rule=plan.passes.update,
        forward_rule=plan.passes.old,
        old_logprobs=plan.passes.old_logprobs,
        objective=plan.objective,
        tokenizer=tokenizer,
    )


def make_reference(plan: Plan, worker_group: WorkerGroup | None, actor: ActorRole | None) -> ReferenceRole | None:
    """Return the reference's role over its processes, or over the actor's if it is the base model there; else None."""
    options: dict[str, Any] = {"rule": plan.passes.reference, "want_hidden": plan.objective.needs_full_kl}
    if plan.base_reference is not None and actor is not None:
        return BaseReferenceRole(actor, **options)
    if worker_group is None:
        return None
    planned = plan.role("reference")
    return (MovingReferenceRole if planned is not None and planned.stateful else ReferenceRole)(worker_group, **options)


def teacher_specs(plan: Plan, policy: PolicySpec) -> tuple[PolicySpec, ...]:
    """Return what the teachers' models are built from, in the order of the plan; passes are cut and sampled as the policy's."""
    specs = []
    for name, teacher in plan.teachers:
        if teacher.model_path is None:
            continue
        shared = plan.config.model
        model = ModelConfig(
            path=teacher.model_path,
            flash_attention=shared.flash_attention,
            lm_head_precision=shared.lm_head_precision,
            lm_head_chunk_tokens=shared.lm_head_chunk_tokens,
        )
        frozen = replace(policy, model=model, train=False, path_key=f"distillation.teacher_models.{name}.model_path")
        specs.append(frozen.sharded_as(RefFsdpConfig(dtype=teacher.dtype), plan.passes.update.sequence_ranks))
    return tuple(specs)


def make_teacher(plan: Plan, worker_group: WorkerGroup | None, actor: ActorRole, tokenizer: Any) -> TeacherRole | None:
    distillation, number = plan.objective.distillation, 0
    if distillation is None or not plan.teachers:
        return None
    teachers = []
    for name, settings in plan.teachers:
        if settings.model_path is None or worker_group is None:
            method = "teacher_logprobs" if settings.ema_decay is None else "average_logprobs"
            teachers.append(Teacher(name, settings, actor.worker_group, method))
        else:
            teachers.append(Teacher(name, settings, worker_group, "logprobs", (number,)))
            number += 1
    # Their heads may have more rows than the tokenizer has tokens, each model its own number.
    topk = distillation.topk
    top = None if not topk else (topk if topk > 0 else len(tokenizer), len(tokenizer))
    return TeacherRole(teachers, rule=plan.passes.update, top=top, renderer=Renderer(plan.config.data, tokenizer))


def actor_spec(plan: Plan, model_path: str, engine: EngineSpec | None = None) -> ActorSpec:
    """Return what every actor rank is built from; its weights go to this engine, if there is one."""
    config, actor = plan.config, plan.config.actor
    sender = SenderSpec()
    if engine is not None:
        sends_adapters = engine.adapter_scaling is not None
        dtype = None if sends_adapters else engine.dtype
        readers = engine.engines_per_device
        sender = SenderSpec(engine.weight_backend, engine.bucket_bytes, dtype, engine.verify_checksum, sends_adapters, readers)
    policy = PolicySpec(
        model=replace(config.model, path=model_path),
        temperature=config.rollout.temperature,
        dtype=actor.fsdp_config.dtype,
        train=True,
        share_prompts=actor.use_prefix_grouper is not False,
        seed=config.trainer.seed,
    )
    return ActorSpec(
        policy=policy.sharded_as(actor.fsdp_config, actor.ulysses_sequence_parallel_size),
        objective=plan.objective,
        optim=actor.optim,
        total_optimizer_steps=plan.sizes.actor_updates,
        seed=config.trainer.seed,
        sender=sender,
        param_offload=actor.fsdp_config.param_offload,
        optimizer_offload=actor.fsdp_config.optimizer_offload,
        old_from_engine=plan.passes.old_logprobs == "engine",
        measures_engine=not RolloutCorrection.from_config(config.algorithm.rollout_correction).active,
        replays_routing=plan.passes.replays_routing,
        ema_decay=next((teacher.ema_decay for _, teacher in plan.teachers if teacher.ema_decay is not None), None),
    )


def critic_spec(plan: Plan, actor: PolicySpec) -> CriticSpec:
    """Return what every critic rank is built from; the model is the actor's unless the plan names another."""
    critic, folder = plan.config.critic, plan.critic_model
    model = replace(
        actor.model,
        enable_gradient_checkpointing=critic.model.enable_gradient_checkpointing,
        enable_activation_offload=critic.model.enable_activation_offload,
    )
    if folder is not None:
        model = replace(model, path=folder, override_config={})
    policy = actor.sharded_as(critic.fsdp, critic.ulysses_sequence_parallel_size)
    return CriticSpec(
        model=replace(policy, model=model, train=True, path_key=actor.path_key if folder is None else "critic.model.path"),
        optim=critic.optim,
        total_optimizer_steps=plan.sizes.critic_updates,
        seed=plan.config.trainer.seed,
        cliprange_value=critic.cliprange_value,
        param_offload=critic.fsdp.param_offload,
        optimizer_offload=critic.fsdp.optimizer_offload,
    )
