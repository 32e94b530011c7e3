"""Which keys a run does not read, and why: no setting may silently do nothing.

A key's own needs stand in the schema (`kinds.field`), what follows from several keys in the rules here. The
plan is made of `as_read`, the configuration without unread keys, so that no process sees them. Unread keys
that were set are refused, harmless ones noted: verl's commands give sizes to passes that do not exist.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache

from grpo_rl.config import derived
from grpo_rl.config.convert import show
from grpo_rl.config.derived import Machine
from grpo_rl.config.function_options import WITHOUT_DUAL_CLIP
from grpo_rl.config.schema.fields import Leaf, groups_around, leaves, replaced, value_of
from grpo_rl.config.schema.kinds import LABEL_LOSSES, REWARD_MODEL
from grpo_rl.config.schema.tree import Config
from grpo_rl.errors import Problems

A, R, REF, M = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "ref", "model"))
SCORER, JUDGE, RAY = "reward.reward_model", "reward.judge", "ray_kwargs.ray_init"
DISTANCE = "distillation.distillation_loss"

Rule = tuple[bool, str, str]
"""If true, these keys, and those of these parts of a run, have no effect, for this reason."""

_BY_TOKEN = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
ESTIMATES = (*_BY_TOKEN, *(f"{name}+" for name in _BY_TOKEN), "k3_unbiased")
"""Distances to a teacher by the sampled token: the names of KL estimators."""


def problems(config: Config, machine: Machine) -> Problems:
    """Yield a line for each unread key that was set and may have been meant to change what is learned."""
    for key, reason in _unread(config, machine).items():
        if not (leaf := leaves()[key]).harmless:
            remedy = f"leave it out, or set it to {show(leaf.default)} where the recipe has it"
            yield f"{key}={show(value_of(config, key))}: has no effect in this run: {reason}; {remedy}"


def notes(config: Config, machine: Machine, *, reference: str, old_logprobs: bool) -> Problems:
    """Yield a line for each harmless unread key that was set. `reference`: who computes its log-probs (its
    own ranks, the actor, nobody); `old_logprobs`: the actor makes a pass for them."""
    of_plan = [
        (reference == "actor", f"{REF}.fsdp_config.* {REF}.ulysses_*", "the reference is the base model in the actor's ranks"),
        (reference == "nobody", f"{REF}.*", "no reference runs"),
        (
            not old_logprobs,
            f"{R}.log_prob_*",
            "no pass computes old log-probs: a step has one update, for which they are the engine's",
        ),
    ]
    for key, reason in _unread(config, machine, of_plan).items():
        if leaves()[key].harmless:
            yield f"{key}={show(value_of(config, key))}: has no effect in this run: {reason}"
    rollout = config.rollout
    if rollout.name in rollout.engine_kwargs and (engines := sorted(set(rollout.engine_kwargs) - {rollout.name})):
        yield f"{R}.engine_kwargs.{','.join(engines)}: has no effect in this run: the engine is {rollout.name}"


def as_read(config: Config, machine: Machine) -> Config:
    """Every key without an effect has its default here."""
    return replaced(config, {key: leaves()[key].default for key in _unread(config, machine)})


def refusals(config: Config, names: str, reason: str) -> list[str]:
    """Return refusals of the keys among a rule's `names` that were set."""
    return [
        f"{leaf.key}={show(value_of(config, leaf.key))}: has no effect in this run: {reason}; leave it out"
        for leaf in _set_keys(config)
        if _is_named(leaf, names)
    ]


def _set_keys(config: Config) -> list[Leaf]:
    return [leaf for leaf in leaves().values() if value_of(config, leaf.key) != leaf.default]


def _unread(config: Config, machine: Machine, of_plan: Iterable[Rule] = ()) -> dict[str, str]:
    """Return the unread keys that were set, each with its first reason: by a rule, a need, or the plan."""
    rules = rules_of(config, machine)
    facts = replaced(config, {"trainer.device": machine.device})
    reasons: dict[str, str] = {}
    for leaf in _set_keys(config):
        needs = (full_need(section, need) for section, need in leaf.needs)
        missing = (reason for condition, reason in needs if not _is_met(facts, condition))
        if reason := _reason(rules, leaf) or next(missing, None) or _reason(of_plan, leaf):
            reasons[leaf.key] = reason
    return reasons


def rules_of(config: Config, machine: Machine) -> list[Rule]:
    """The first rule that holds for a key gives the reason."""
    mode = _of_reward_model(config) if config.trains_only_reward_model else _of_schedule(config)
    return [*mode, *_of_learning(config), *_of_sampling_and_rewards(config, machine), *_of_sizes(config, machine)]


def _reason(rules: Iterable[Rule], leaf: Leaf) -> str | None:
    return next((reason for is_unread, names, reason in rules if is_unread and _is_named(leaf, names)), None)


def _is_named(leaf: Leaf, names: str) -> bool:
    """`KEYS*` among the names stands for all keys that begin so."""
    return any(
        leaf.key.startswith(name[:-1]) if name.endswith("*") else name in (leaf.key, leaf.part) for name in names.split()
    )


@cache
def full_need(section: str, need: str) -> tuple[str, str]:
    """Return a need's condition with full keys, and the reason if it is not met."""

    def full_key(match: re.Match[str]) -> str:
        name = match[1]
        keys = (f"{group}.{name}" for group in (section, *groups_around(section)))
        return next((key for key in keys if key in leaves()), name)

    condition, _, reason = need.partition(" | ")
    condition = re.sub(r"([\w.]+)", full_key, condition)
    return condition, re.sub(r"\{([\w.]+)\}", full_key, reason) or f"needs {condition}"


def _is_met(config: Config, needed: str) -> bool:
    key = ""
    for condition in needed.split(" or "):
        value_text = condition
        if "." in condition:
            key, _, value_text = condition.partition("=")
        name, above, _ = key.partition(" above ")
        value = value_of(config, name)
        if not value_text:
            holds = value > 0 if above else bool(value)
        elif isinstance(value, list):
            holds = value_text in value
        else:
            # A user's own function, `file.py:name`, may read anything.
            holds = value_text == show(value) or (":" in str(value) and value_text != "null")
        if holds:
            return True
    return False


def _of_reward_model(config: Config) -> list[Rule]:
    loss = config.reward.reward_model.train.loss
    unread_columns = f"{SCORER}.step_separator" if loss == "bradley_terry" else "pairs"
    return [
        (True, _all_but_reward_models(), f"trainer.schedule={REWARD_MODEL} trains no policy"),
        (True, unread_columns, f"{SCORER}.train.loss={loss} does not read it"),
        (config.data.max_length is not None, "lengths", "data.max_length is the longest sequence"),
    ]


@cache
def _all_but_reward_models() -> str:
    scorer = "train. model_path tokenizer_path trust_remote_code step_separator max_token_len_per_gpu dtype param_offload"
    read = (*(f"{SCORER}.{name}" for name in scorer.split()), f"{A}.checkpoint.", "data.", "trainer.", "ray_kwargs.")
    unread = "data.truncation data.responses data.val_prompt_files trainer.iterate.* trainer.asynchronous.*"
    unread += " answers source samples policy critic"
    return " ".join(
        leaf.key
        for leaf in leaves().values()
        if leaf.key != "trainer.schedule" and (not leaf.key.startswith(read) or _is_named(leaf, unread))
    )


def _of_schedule(config: Config) -> list[Rule]:
    loss, data = config.actor.policy_loss.loss_mode, config.data
    offline, collects, pairs = config.is_offline, config.collects, config.trains_pairs
    of_training = (not config.trains_reward_model, f"{SCORER}.train.*", f"it is of trainer.schedule={REWARD_MODEL}")
    if not offline and ":" in config.trainer.schedule:
        return [of_training]
    source = "samples before training" if collects else "trains on the answers in the data"
    fixed = f"data.responses={data.responses} {source}"
    mini = config.actor.ppo_mini_batch_size
    registered, silent = offline and ":" not in loss, offline and not collects and not config.samples_answers
    return [
        of_training,
        (
            not offline,
            "answers pairs data.val_prompt_files data.max_length",
            "it is of data.responses=rows and initial_policy",
        ),
        (
            pairs and collects,
            "algorithm.rejection.*",
            f"loss_mode={loss} compares the best with the worst response, however good",
        ),
        (offline, "policy kl_loss advantages rewards critic", fixed),
        (offline and not collects, "samples", fixed),
        (offline and mini != data.train_batch_size, f"{A}.ppo_mini_batch_size", f"{fixed}, one optimizer step on each batch"),
        (loss in LABEL_LOSSES, "pairs", f"loss_mode={loss} reads the columns completion and label"),
        (registered and pairs, "answers", f"loss_mode={loss} reads rows with pairs"),
        (registered and not pairs, "pairs", f"loss_mode={loss} reads rows with answers to learn"),
        (silent, "sampling source", "needs data.val_prompt_files: nothing else is sampled and scored"),
        (silent and data.max_length is not None, "lengths", "data.max_length is the longest row"),
    ]


def _of_learning(config: Config) -> list[Rule]:
    actor, algorithm, teacher = config.actor, config.algorithm, config.distillation.distillation_loss
    loss, groups, pairs = actor.policy_loss.loss_mode, algorithm.filter_groups, config.trains_pairs
    teachers_only = config.learns_from_teachers_alone
    samples_alone, reason = (
        teachers_only and not config.is_offline,
        f"{DISTANCE}.use_task_rewards=false learns from teachers alone",
    )
    no_critic = not pairs and not config.may_have_critic
    of_critic = (
        "critic"
        if config.critic.enable is not False
        else (
            "critic.model.* critic.optim.* critic.fsdp.* critic.profiler.* critic.ppo_* critic.use_dynamic_bsz "
            "critic.ulysses_* critic.cliprange_value trainer.critic_warmup"
        )
    )
    return [
        (teachers_only, f"{DISTANCE}.distillation_loss_coef", reason),
        (samples_alone, "rewards critic", reason),
        (samples_alone and not teacher.use_policy_gradient, f"{A}.clip_ratio* {A}.policy_loss.*", reason),
        (
            teacher.loss_mode in ESTIMATES,
            f"{DISTANCE}.topk",
            f"loss_mode={teacher.loss_mode} looks at the sampled token alone",
        ),
        (
            pairs,
            "advantages rewards critic algorithm.replay.*",
            f"loss_mode={loss} compares pairs and reads no advantages",
        ),
        (
            groups.enable and groups.refill and derived.overlaps(config),
            "algorithm.replay.*",
            f"algorithm.filter_groups.refill=true fills a batch of trainer.schedule={config.trainer.schedule} with new groups",
        ),
        (pairs, "kl_loss", f"loss_mode={loss} has the reference in it and no KL term"),
        (no_critic, of_critic, f"algorithm.adv_estimator={algorithm.adv_estimator} needs no critic"),
        # A weight of 0 switches off what is off.
        (not actor.use_kl_loss and actor.kl_loss_coef > 0, f"{A}.kl_loss_coef", f"needs {A}.use_kl_loss=true"),
        (
            not algorithm.use_kl_in_reward and algorithm.kl_ctrl.kl_coef > 0,
            "algorithm.kl_ctrl.kl_coef",
            "needs algorithm.use_kl_in_reward=true",
        ),
        (
            actor.clip_ratio_low is not None and actor.clip_ratio_high is not None,
            f"{A}.clip_ratio",
            f"{A}.clip_ratio_low and clip_ratio_high are both there",
        ),
        (loss in WITHOUT_DUAL_CLIP, f"{A}.clip_ratio_c", f"the loss {loss} clips no second time"),
    ]


def _of_sampling_and_rewards(config: Config, machine: Machine) -> list[Rule]:
    rollout, reward, engine = config.rollout, config.reward, config.rollout.name
    is_float32 = rollout.dtype == "float32" or (rollout.dtype == "auto" and machine.device == "cpu")
    prompts = "val_prompt_files" if config.is_offline else "val_files"
    # Without `judge` among the audits a judge would be part of the reward.
    audits = "judge" in reward.audit or not (config.trainer.val_only or config.is_offline)
    scores = reward.reward_model.enable or config.trains_only_reward_model
    by_model = config.is_iterated or config.scores_steps_by_model
    on_gpus = config.model.lm_head_precision in ("tf32", "bfloat16")
    is_local = config.ray_kwargs.ray_init.address is None and not machine.cluster
    return [
        (on_gpus and machine.device == "cpu", f"{M}.lm_head_precision", "it is faster on GPUs only, and this run has none"),
        (is_float32, f"{R}.fp32_lm_head", "everything in the engine is float32"),
        (engine not in rollout.engine_kwargs, f"{R}.engine_kwargs", f"it names engines other than {R}.name={engine}"),
        (not getattr(config.data, prompts), f"{R}.val_kwargs.*", f"needs data.{prompts}: only validation reads it"),
        (not audits, "reward.audit reward.audit_share", "no policy is trained on responses that it samples"),
        ("judge" in reward.audit, f"{JUDGE}.weight", "the judge is in reward.audit, and no part of the reward"),
        (not scores, f"{SCORER}.*", f"needs {SCORER}.enable=true"),
        (by_model and reward.judge.base_url is not None, f"{JUDGE}.*", "the reward is the reward model's score alone"),
        (not is_local, f"{RAY}.num_cpus {RAY}.object_store_memory", "it is for a local cluster"),
        (is_local, f"{RAY}.wait_for_nodes_s", f"needs {RAY}.address; a local cluster has one node"),
    ]


def _of_sizes(config: Config, machine: Machine) -> list[Rule]:
    """verl's commands say 8 GPUs wherever they run."""
    update, max_tokens = derived.pass_rule(config, "actor"), config.actor.ppo_max_token_len_per_gpu
    pass_rules = {
        f"{REF}.log_prob": derived.pass_rule(config, "ref"),
        f"{R}.log_prob": derived.pass_rule(config, "old"),
        "critic.ppo": derived.pass_rule(config, "critic"),
    }
    by_rollouts, by_tokens = "its passes are cut by rollouts", "its passes are cut by tokens (use_dynamic_bsz=true)"
    passes, ranks = (update, *pass_rules.values()), machine.world_size(config)
    rules = [
        (
            all(rule.max_tokens != max_tokens * rule.sequence_ranks for rule in passes),
            f"{A}.ppo_max_token_len_per_gpu",
            "micro-batches are cut by rollouts",
        ),
        (all(rule.max_rollouts is None for rule in passes), f"{A}.ppo_micro_batch_size_per_gpu", by_tokens),
    ]
    for key, rule in pass_rules.items():
        rules.append((rule.max_tokens is None, f"{key}_max_token_len_per_gpu", by_rollouts))
        rules.append((rule.max_tokens is not None, f"{key}_micro_batch_size_per_gpu", by_tokens))
    for key in (f"{A}.fsdp_config", f"{REF}.fsdp_config", "critic.fsdp"):
        is_larger, why = (
            value_of(config, key).fsdp_size > ranks,
            f"there are {ranks} ranks, and a larger group is all of them, as in verl",
        )
        rules.append((is_larger, f"{key}.fsdp_size", why))
    return rules
