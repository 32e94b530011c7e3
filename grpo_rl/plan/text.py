"""The plan of a run as text: a page that fits on a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

from grpo_rl.algos.advantages.registered import ADVANTAGES
from grpo_rl.algos.correction import RolloutCorrection
from grpo_rl.algos.kl import KL_ESTIMATORS
from grpo_rl.algos.losses.registered import POLICY_LOSSES, selection_of
from grpo_rl.algos.losses.value import value_loss
from grpo_rl.algos.objective import Objective
from grpo_rl.config import derived
from grpo_rl.config.compose import Composed
from grpo_rl.config.schema.tree import Config
from grpo_rl.plan.algorithm import advantage_formula, without_effect_on_policy
from grpo_rl.plan.memory import ModelSize, gib, memory_by_role, model_size
from grpo_rl.registry import needs_of, shown
from grpo_rl.rewards.combined import describe_models, describe_roles
from grpo_rl.trainer import selection

if TYPE_CHECKING:
    from grpo_rl.plan.decisions import Plan

WIDTH = 100
_LABEL = 12

Rows = Iterator[tuple[str, str]]


def describe(composed: Composed, plan: Plan) -> str:
    """All sections of the plan, each line at most `WIDTH` columns wide."""
    config = composed.config
    size = model_size(config.actor_rollout_ref.model.path)
    sections = {
        _title(composed): _setting(config, plan, size),
        "who does what": _roles(config, plan),
        "one training step": _step(config, plan),
        "objective": _objective(config, plan),
        "memory, estimated" + ("" if plan.machine.device == "cpu" else ", per GPU"): _memory(config, plan, size),
        "notes": _notes(config, plan),
    }
    lines = []
    for title, rows in sections.items():
        block = [line for label, text in rows for line in _row(label, text)]
        if block:
            lines += [title, *block]
    return "\n".join(lines)


def _row(label: str, text: str) -> list[str]:
    """One entry, wrapped; without a label it is an item of a list."""
    start = f"  {label:<{_LABEL}}" if label else "  - "
    return textwrap.wrap(
        text,
        width=WIDTH,
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _title(composed: Composed) -> str:
    if composed.recipe_is_default:
        return f"plan: recipe {composed.recipe}, the embedded one, as neither a model nor data were named"
    return f"plan: recipe {composed.recipe}" if composed.recipe else "plan"


def _setting(config: Config, plan: Plan, size: ModelSize | None) -> Rows:
    machine = plan.machine
    cores = f"{machine.num_cpus} CPU cores"
    gpus = "the GPUs of a Ray cluster" if machine.cluster else _count(machine.num_gpus, "GPU")
    yield "machine", f"{gpus}, {cores}" if machine.device == "cuda" else f"{cores}, no GPU in use"
    described = f", {size.architecture} with {_params(size.num_params)} parameters" if size else ""
    yield "model", config.actor_rollout_ref.model.path + described
    rows = "" if plan.num_train_rows is None else f": {plan.num_train_rows:,} rows"
    yield "data", ", ".join(config.data.train_files) + rows
    yield "validation", ", ".join(config.data.val_files) or "none"
    yield "run", _length_of_run(config, plan)


def _length_of_run(config: Config, plan: Plan) -> str:
    trainer = config.trainer
    if trainer.val_only:
        return "validation only"
    if plan.total_steps is None:
        length = f"{_count(trainer.total_epochs, 'pass', 'passes')} over the data"
    else:
        updates = (plan.total_steps - trainer.critic_warmup) * plan.updates_per_step
        length = f"{_count(plan.total_steps, 'training step')}, {_count(updates, 'optimizer step')}"
    tests = f"validation every {trainer.test_freq}" if trainer.test_freq > 0 else "no validation in between"
    saves = f"a checkpoint every {trainer.save_freq}" if trainer.save_freq > 0 else "no checkpoints"
    return f"{length}; {tests}, {saves}"


def _roles(config: Config, plan: Plan) -> Rows:
    machine, rollout = plan.machine, config.actor_rollout_ref.rollout
    device = "GPU" if machine.device == "cuda" else "process"
    ranks = _count(plan.world_size, "rank") + (f" on {config.trainer.nnodes} nodes" if config.trainer.nnodes > 1 else "")
    backend = "NCCL" if machine.device == "cuda" else "gloo"
    yield "actor", f"{ranks}, FSDP2 over {backend}, one {device} each"
    parallel = rollout.tensor_model_parallel_size
    per_replica = f" of {parallel} devices" if parallel > 1 else ""
    place = "on the actor's devices, in turn" if plan.colocated else "on devices of their own"
    way = plan.weight_backend.replace("_", " ")
    replicas = _count(plan.num_replicas, "replica")
    yield "rollout", f"{replicas}{per_replica} of {rollout.name}, {place}; weights by {way}"
    if plan.uses_reference:
        why = "the KL in the reward" if derived.has_kl_in_reward(config) else "the loss"
        why = "the KL in the loss" if derived.has_kl_in_loss(config) else why
        yield "reference", f"{_count(plan.world_size, 'rank')} on the actor's devices, for {why}"
    else:
        yield "reference", "not started: no KL term has a weight above 0"
    if plan.uses_critic:
        own = config.critic.model.path if derived.critic_has_own_model(config) else "the actor's model"
        yield "critic", f"{_count(plan.world_size, 'rank')} on the actor's devices, FSDP2, a value head on a copy of {own}"
    custom = config.reward.custom_reward_function
    functions = [f"{custom.path}:{custom.name}"] if custom.path else config.reward.functions
    workers = _count(config.reward.num_workers, "process", "processes")
    failed = {"drop": "are dropped", "stop": "stop the run", "value": f"give {config.reward.failure_value}"}[
        config.reward.on_failure
    ]
    rules = f", {workers}, at most {config.reward.timeout_s:g} s each" if functions else ""
    yield "reward", f"{' + '.join([*functions, *describe_models(config)])}{rules}; failures {failed}"
    yield from describe_roles(config, derived.num_reward_model_ranks(config, machine))


def _step(config: Config, plan: Plan) -> Rows:
    data, actor = config.data, config.actor_rollout_ref.actor
    n = config.actor_rollout_ref.rollout.n
    greedy = (
        ", and a greedy one to compare with" if "baselines" in needs_of(ADVANTAGES.get(config.algorithm.adv_estimator)) else ""
    )
    yield (
        "sample",
        f"{_count(data.train_batch_size, 'prompt')} x {n} responses = {derived.rollouts_per_step(config):,} rollouts{greedy}, "
        f"at most {data.max_prompt_length} + {data.max_response_length} tokens each",
    )
    mini_batches = data.train_batch_size // actor.ppo_mini_batch_size
    yield from selection.describe(config)
    yield (
        "update",
        f"{_count(mini_batches, 'mini-batch', 'mini-batches')} of {actor.ppo_mini_batch_size} prompts "
        f"({actor.ppo_mini_batch_size * n:,} rollouts) x {_count(actor.ppo_epochs, 'pass', 'passes')} = "
        f"{_count(plan.updates_per_step, 'optimizer step')}",
    )
    if plan.uses_critic:
        size, epochs = derived.critic_mini_batch_size(config), derived.critic_epochs(config)
        warmup = config.trainer.critic_warmup
        alone = f"; it learns alone in the first {_count(warmup, 'training step')}" if warmup else ""
        yield (
            "critic",
            f"{_count(data.train_batch_size // size, 'mini-batch', 'mini-batches')} of {size} prompts x "
            f"{_count(epochs, 'pass', 'passes')} = {_count(derived.critic_updates_per_step(config), 'optimizer step')}{alone}",
        )
    yield "micro-batch", "; ".join(_micro_batches(config, plan))
    if config.algorithm.rollout_correction.bypass_mode:
        yield "ratio", "against the engine's log-probs; the actor computes no old ones"
    elif plan.updates_per_step == 1:
        ratio = "exactly 1 (one update per batch)"
        old = f"computed for {_old_readers(config)} only" if plan.recomputes_old_logprobs else "not computed"
        yield "ratio", f"{ratio}; old log-probs are {old}"
        if idle := without_effect_on_policy(config):
            yield "no effect", f"with one update per batch: {', '.join(idle)}"
    else:
        yield "ratio", f"against old log-probs, recomputed by the actor before the first of {plan.updates_per_step} updates"


def _old_readers(config: Config) -> str:
    """What reads old log-probs where the ratio does not."""
    readers = ["the KL in the reward"] if derived.has_kl_in_reward(config) else []
    loss = config.actor_rollout_ref.actor.policy_loss.loss_mode
    if RolloutCorrection.from_config(config.algorithm.rollout_correction).active:
        readers.append("the correction of rollouts")
    return " and ".join(readers + ([f"the choice of tokens by {loss}"] if _chooses(loss) else []))


def _chooses(loss_mode: str) -> bool:
    return selection_of(POLICY_LOSSES.get(loss_mode)) is not None


def _micro_batches(config: Config, plan: Plan) -> list[str]:
    """How each pass over the rollouts is cut, passes of the same rule together."""
    uses: dict[derived.MicroBatchRule, list[str]] = {derived.update_rule(config): ["update"]}
    if plan.recomputes_old_logprobs:
        uses.setdefault(derived.logprob_rule(config, "rollout"), []).append("old log-probs")
    if plan.uses_reference:
        uses.setdefault(derived.logprob_rule(config, "ref"), []).append("reference")
    if plan.uses_critic:
        uses.setdefault(derived.critic_rule(config), []).append("critic")
    return [f"{rule} per rank ({', '.join(passes)})" for rule, passes in uses.items()]


def _objective(config: Config, plan: Plan) -> Rows:
    algorithm = config.algorithm
    yield "A", f"= {advantage_formula(config)}  [{algorithm.adv_estimator}]"
    if plan.uses_critic:
        formula = shown(value_loss, {"cliprange_value": config.critic.cliprange_value})
        yield "critic loss", f"= 1/num_tokens Σ_tokens {formula};  R the returns of A"
    if algorithm.use_kl_in_reward:
        control, estimator = algorithm.kl_ctrl, KL_ESTIMATORS.get(algorithm.kl_penalty)
        target = f", steered to {control.target_kl:g}" if control.type == "adaptive" else ""
        yield (
            "R =",
            f"reward - {control.kl_coef:g} Σ_tokens KL{target};  KL = {shown(estimator, algorithm.kl_penalty_options)}  [{algorithm.kl_penalty}]",
        )
    if config.reward.overlong_buffer.len is not None:
        buffer = config.reward.overlong_buffer
        yield (
            "overlong",
            f"up to -{buffer.penalty_factor:g} in the reward, over the last {buffer.len} tokens of the longest response",
        )
    correction = RolloutCorrection.from_config(algorithm.rollout_correction)
    if correction.rollout_is:
        level, limit = correction.rollout_is, correction.rollout_is_threshold
        yield "w", f"= ratio of old policy to engine, by {level}" + ("" if limit is None else f", at most {limit:g}")
    for rejected in correction.rollout_rs:
        lower = "" if rejected.lower is None else f"below {rejected.lower:g} or "
        yield "rejected", f"{rejected.mode} {lower}above {rejected.upper:g}"
    if correction.bypass_mode:
        yield "old policy", "the engine's own log-probs (rollout_correction.bypass_mode)"
    if algorithm.mask_truncated:
        yield "trained", "only responses that were not cut off"
    entropy = config.actor_rollout_ref.actor.adaptive_entropy
    if entropy.enable:
        start = config.actor_rollout_ref.actor.entropy_coeff
        yield "entropy", f"coefficient from {start:g} by {entropy.delta:g} a step towards H = {entropy.target:g}; 0 above it"
    objective = Objective.from_config(config.actor_rollout_ref.actor, config.data.max_response_length)
    for line in objective.formula().splitlines():
        name, _, value = line.partition("=")
        value = value.replace("avg(pg)", "avg(w·pg)") if correction.rollout_is else value
        yield name.strip(), f"= {value.strip()}"


def _memory(config: Config, plan: Plan, size: ModelSize | None) -> Rows:
    if size is None:
        yield "unknown", "the size of this model is told by its weights only"
        return
    for need in memory_by_role(config, plan.machine, size, with_reference=plan.uses_reference, with_critic=plan.uses_critic):
        yield need.role, f"{gib(need.num_bytes)}: {need.parts}"


def _notes(config: Config, plan: Plan) -> Rows:
    machine, rollout = plan.machine, config.actor_rollout_ref.rollout
    optim = config.actor_rollout_ref.actor.optim
    if machine.device == "cpu" and plan.world_size > machine.num_cpus:
        yield (
            "-",
            f"{plan.world_size} actor processes share {machine.num_cpus} cores: trainer.n_gpus_per_node is their number on a CPU",
        )
    if machine.cluster and machine.device == "cpu" and config.trainer.device == "auto":
        yield "", "trainer.device=auto looked at this machine, which has no GPU; say trainer.device=cuda if the cluster has"
    if machine.device == "cuda" and (rollout.kv_cache_gib != 1.0 or rollout.cpu_threads):
        yield "", "rollout.kv_cache_gib and rollout.cpu_threads are for CPUs and have no effect here"
    if plan.total_steps is not None and optim.lr_warmup_steps > plan.total_steps * plan.updates_per_step:
        yield (
            "-",
            f"optim.lr_warmup_steps={optim.lr_warmup_steps} is longer than the run: the full learning rate is never reached",
        )
    if config.trainer.experiment_name is None and config.trainer.save_freq > 0:
        yield "", "without trainer.experiment_name every start is a new run; name it to resume it by the same command"


def _count(number: int, noun: str, plural: str | None = None) -> str:
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def _params(number: int) -> str:
    for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return str(number)
