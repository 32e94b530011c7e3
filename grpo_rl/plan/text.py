"""The plan of a run as text: a page that fits on a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

from grpo_rl.algos.advantages.registered import ADVANTAGES
from grpo_rl.algos.correction import RolloutCorrection
from grpo_rl.algos.kl import KL_ESTIMATORS
from grpo_rl.algos.losses.registered import POLICY_LOSSES
from grpo_rl.algos.losses.value import value_loss
from grpo_rl.config import effects
from grpo_rl.config.checks.inputs import INSTALL, missing_loggers
from grpo_rl.config.compose import Composed
from grpo_rl.config.convert import show
from grpo_rl.config.derived import max_staleness, oldest_sampler, processes_on, versions_ahead
from grpo_rl.config.schema.algorithm import TeacherConfig
from grpo_rl.config.schema.tree import Config
from grpo_rl.installed import untested
from grpo_rl.machine_memory import machine_memory
from grpo_rl.plan.algorithm import without_effect_on_policy
from grpo_rl.plan.cost import assumptions, predict, step_time
from grpo_rl.plan.decisions import Plan
from grpo_rl.plan.memory import TIGHT, Fit, adapter_params, checkpoint_bytes, fit_of, gib, gpu_phases, host_bytes, table
from grpo_rl.plan.proposal import HEAD, MOST_MACHINES, Proposal, divisions, propose, propose_faster
from grpo_rl.registry import coefficient_of, shown
from grpo_rl.rewards.combined import describe_models, describe_roles
from grpo_rl.rollout.engine import EngineSpec
from grpo_rl.rollout.vllm.vllm_patches import gaps
from grpo_rl.trainer.sampled.trained import estimator_options

WIDTH = 100
_LABEL = 13

Rows = Iterator[tuple[str, str]]
TABLE = "|"  # the label of a line that stays as it is: a row of a table, or a word to paste


def describe(composed: Composed, plan: Plan) -> str:
    """Return all sections of the plan, each line at most `WIDTH` columns wide."""
    config = plan.config
    judged = fit_of(plan)
    instead = None if judged is None or judged.fits else propose(plan)
    timed = instead.plan if instead else plan
    sections = {
        _title(composed): _setting(config, plan),
        "roles": _roles(config, plan),
        "one training step": _step(config, plan) if plan.trains else iter(()),
        "paradigm": components(plan) if plan.trains and plan.role("actor") else iter(()),
        "objective": _objective(config, plan) if plan.trains else iter(()),
        "memory, estimated" + (_in_all(plan) if plan.machine.device == "cpu" else ", per GPU"): _memory(plan, judged),
        f"fit on {plan.machine.name or 'this machine'}": _fit(plan, judged, instead),
        f"time of a step{' with these keys' if instead else ''}, estimated and not measured": _time(timed),
        "schedules on these GPUs, each in its best division, estimated": _schedules(timed),
        "notes": (("", note) for note in _notes(composed, plan)),
    }
    lines = []
    for title, rows in sections.items():
        block = [line for label, text in rows for line in _row(label, text)]
        if block:
            lines += [title, *block]
    return "\n".join(lines)


def _row(label: str, text: str) -> list[str]:
    """Wrap one entry; without a label it is an item of a list."""
    if label == TABLE:
        return [f"  {text}".rstrip()]
    start = f"  {label + ' ':<{_LABEL}}" if label else "  - "
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


def _setting(config: Config, plan: Plan) -> Rows:
    machine, size = plan.machine, plan.model
    cores = f"{machine.num_cpus} CPU cores"
    gpus = "the GPUs of a Ray cluster" if machine.cluster else _count(machine.num_gpus, "GPU")
    yield "machine", f"{gpus}, {cores}" if machine.device == "cuda" else f"{cores}, no GPU in use"
    described = f", {size.architecture} with {_params(size.num_params)} parameters" if size else ""
    if size and size.experts:
        described += f", {_params(size.active_params)} of them for each token"
    yield "model", config.model.path + described
    rows = plan.sizes.num_train_rows
    if plan.trains:
        yield "data", ", ".join(config.data.train_files) + ("" if rows is None else f": {rows:,} rows")
    if plan.collection is not None:
        yield "collection", _collection(plan.collection, plan.objective.needs_pairs)
    yield "validation", ", ".join(config.data.val_files) or "none"
    if config.is_offline and config.data.val_prompt_files:
        yield "answered", ", ".join(config.data.val_prompt_files)
    yield "run", _length_of_run(config, plan)


def _collection(sampling: Plan, pairs: bool) -> str:
    n, rejection = sampling.config.rollout.n, sampling.config.algorithm.rejection
    conditions = [f"those with a reward of {rejection.min_reward:g} or more", *["each once"] * rejection.deduplicate]
    if rejection.max_per_prompt is not None:
        conditions.append(f"at most {rejection.max_per_prompt} to a prompt")
    if pairs:
        conditions = ["the best and the worst of each group, where one is better"]
    return f"{_count(n, 'response')} to each prompt, sampled once before training; kept: {', '.join(conditions)}"


def _length_of_run(config: Config, plan: Plan) -> str:
    trainer = config.trainer
    if not plan.trains:
        return "validation only, of " + ("the run's checkpoint" if plan.resumes else "the model's folder")
    sizes = plan.sizes
    if sizes.total_steps is None:
        length = f"{_count(trainer.total_epochs, 'pass', 'passes')} over the {'kept responses' if config.collects else 'data'}"
    else:
        updates = sizes.actor_updates if plan.role("actor") else sizes.reward_model_updates
        length = f"{_count(sizes.total_steps, 'training step')}, {_count(updates, 'optimizer step')}"
    tests = f"validation every {trainer.test_freq}" if trainer.test_freq > 0 else "no validation in between"
    saves = f"a checkpoint every {trainer.save_freq}" if trainer.save_freq > 0 else "saved at a stop"
    if trainer.save_freq < 1 and trainer.save_at_end:
        saves += " and at the end"
    if size := checkpoint_bytes(plan):
        saves += f" ({gib(size)})"
    return f"{length}; {tests}, {saves}"


def _roles(config: Config, plan: Plan) -> Rows:
    machine = plan.machine
    device = "GPU" if machine.device == "cuda" else "process"
    ranks = _count(plan.world_size, "rank") + (f" on {config.trainer.nnodes} nodes" if config.trainer.nnodes > 1 else "")
    backend = "NCCL" if machine.device == "cuda" else "gloo"
    if plan.role("actor"):
        why = "" if plan.trains else ", for the checkpoint's weights, which it hands to the engines"
        yield "actor", f"{ranks}, FSDP2 over {backend}, one {device} each{_axes(config, plan)}{why}{_adapters(config, plan)}"
    elif not plan.trains:
        yield "actor", "not started: nothing is trained, and the engine reads the model's folder itself"
    if plan.engine is not None:
        yield "rollout", _engines(plan, plan.engine)
    if reference := plan.role("reference"):
        moves = "; the policy as it is when an iteration begins" if reference.stateful else ""
        yield "reference", f"{_count(reference.num_workers, 'rank')} on the actor's devices, for {plan.reference}{moves}"
    elif plan.base_reference is not None:
        yield "reference", f"the base model under the adapters, by the actor's ranks, for {plan.base_reference}; no second copy"
    elif plan.trains and (not config.is_offline or plan.objective.needs_ref):
        first = "the actor computes the initial policy's log-probs of all rows once, before step 1"
        yield "reference", f"not started: {first if config.is_offline else 'nothing reads one'}"
    if critic := plan.role("critic"):
        start, number = plan.critic_model or "the actor's model", _count(critic.num_workers, "rank")
        yield "critic", f"{number} on the actor's devices, FSDP2, a value head on a copy of {start}"
    if plan.trains_reward_model:
        number = _count(plan.num_workers("reward_model"), "rank")
        yield "reward model", f"{number}, FSDP2 over {backend}, one {device} each, a head of one label, trained"
    scoring = plan if plan.reward.scores else plan.collection
    if scoring is None:
        yield "engines", "none: nothing is sampled, and no reward is computed"
        return
    if scoring is plan.collection:
        assert scoring.engine is not None, "a collection samples"
        yield "engines", f"{_engines(scoring, scoring.engine)}; they and the reward end before training"
    custom = config.reward.custom_reward_function
    functions = [f"{custom.path}:{custom.name}"] if custom.path else config.reward.functions
    workers = _processes(scoring, config.reward.num_workers)
    failed = {"drop": "are dropped", "stop": "stop the run", "value": f"give {config.reward.failure_value}"}[
        config.reward.on_failure
    ]
    rules = f", {workers}, at most {config.reward.timeout_s:g} s each" if functions else ""
    summed = describe_models(config) if config.is_iterated else [*functions, *describe_models(config)]
    unsummed = f" alone; beside it {' + '.join(functions)}" if config.is_iterated else ""
    yield "reward", f"{' + '.join(summed)}{unsummed}{rules}; failures {failed}"
    played_in = _processes(scoring, config.rollout.multi_turn.environment.num_workers)
    yield from describe_roles(config, scoring.num_workers("reward_model"), played_in)


def _adapters(config: Config, plan: Plan) -> str:
    model = config.model
    if not model.lora_rank:
        return ""
    number = "" if plan.model is None else f" ({_params(adapter_params(model, plan.model))} parameters)"
    layers = ", ".join(model.target_modules) + (f" without {', '.join(model.exclude_modules)}" * bool(model.exclude_modules))
    start = f", from {model.lora_adapter_path}" if model.lora_adapter_path else ""
    if start and plan.base_reference is not None:
        start += " (the KL is to the base model without them)"
    adapters_only = plan.engine is not None and plan.engine.adapter_scaling is not None
    what = "adapters alone, and add them to the model's weights" if adapters_only else "merged weights"
    return f"; trains LoRA adapters of rank {model.lora_rank} at {layers}{number}{start}, engines get the {what}"


def _engines(plan: Plan, engine: EngineSpec) -> str:
    parallel = engine.tensor_parallel_size
    per_replica = f" of {parallel} devices" if parallel > 1 else ""
    if engine.engines_per_device > 1:
        per_replica += f", {engine.engines_per_device} per device,"
    if plan.role("actor") is None:
        place, way = "", "weights from the model's folder"
    else:
        place = ", on the actor's devices, in turn" if plan.colocated else ", on devices of their own"
        way = f"weights by {engine.weight_backend.replace('_', ' ')}"
    minimum, maximum = plan.replica_bounds
    bounds = "" if minimum == maximum else f" (from {minimum} to {maximum} while the run goes on)"
    return f"{_count(plan.num_replicas, 'replica')}{bounds}{per_replica} of {engine.name}{place}; {way}"


def _step(config: Config, plan: Plan) -> Rows:
    data, actor, sizes = config.data, config.actor, plan.sizes
    if plan.role("actor") is None or config.is_offline:
        scorer, cut = config.reward.reward_model, _micro_batches(plan)
        if plan.role("actor") is None:
            steps, cut = scorer.train.loss == "steps", [f"<= {scorer.max_token_len_per_gpu:,} tokens per rank"]
            rows, places = (
                ("solution", "the ends of the rated steps") if steps else ("pair", "the last tokens of both responses")
            )
        else:
            pairs = plan.objective.needs_pairs and not plan.objective.needs_kl
            rows, places = ("pair", "both answers of every pair") if pairs else ("row", "the tokens of the assistant's turns")
        longest = config.longest_sequence
        yield "rows", f"{_count(data.train_batch_size, rows)} of the data, at most {longest} tokens in a sequence"
        yield "update", f"1 optimizer step, on {places}"
        yield "micro-batch", "; ".join(cut)
        return
    n = config.rollout.n
    greedy = ", and a greedy one to compare with" if "baselines" in plan.advantage_needs else ""
    yield (
        "sample",
        f"{_count(data.train_batch_size, 'prompt')} x {n} responses = {sizes.rollouts_per_step:,} rollouts{greedy}, "
        f"at most {data.max_prompt_length} + {data.max_response_length} tokens each",
    )
    if plan.overlaps:
        yield "schedule", _overlap(config)
        if plan.engine is not None and plan.engine.device != "cpu" and plan.engine.engine_kwargs.get("async_scheduling"):
            yield "", "responses end before each update: so vLLM wants it with engine_kwargs.vllm.async_scheduling=true"
    yield from _selection(config)
    if sizes.iteration is not None:
        yield "iteration", _iteration(config, *sizes.iteration)
    yield (
        "update",
        f"{_count(sizes.mini_batches, 'mini-batch', 'mini-batches')} of {actor.ppo_mini_batch_size} prompts "
        f"({actor.ppo_mini_batch_size * n:,} rollouts) x {_count(actor.ppo_epochs, 'pass', 'passes')} = "
        f"{_count(sizes.updates_per_step, 'optimizer step')}",
    )
    if plan.role("critic"):
        size, epochs, warmup = sizes.critic_mini_batch_size, sizes.critic_epochs, sizes.critic_warmup
        learning = f"; it learns alone in the first {_count(warmup, 'training step')}" if warmup else ""
        yield (
            "critic",
            f"{_count(data.train_batch_size // size, 'mini-batch', 'mini-batches')} of {size} prompts x "
            f"{_count(epochs, 'pass', 'passes')} = {_count(sizes.critic_updates_per_step, 'optimizer step')}{learning}",
        )
    yield "micro-batch", "; ".join(_micro_batches(plan))
    if plan.objective.needs_pairs:
        yield (
            "pairs",
            "the best and the worst response to each prompt by reward, at most one pair each; equal rewards make none",
        )
        return
    yield "ratio", _ratio(plan)
    if plan.passes.replays_routing:
        yield "experts", "those that each token took in the pass for old log-probs (router replay R2)"
    if plan.passes.old_logprobs != "engine" and sizes.updates_per_step == 1 and (idle := without_effect_on_policy(config)):
        yield "no effect", f"with one update per batch: {', '.join(idle)}"


def _overlap(config: Config) -> str:
    asynchronous, staleness, name = config.trainer.asynchronous, max_staleness(config), config.trainer.schedule
    if versions_ahead(config) == 1:
        return f"{name}: the next batch is sampled while this one is trained, by weights of one version before"
    if staleness == 0:
        return f"{name} with max_staleness=0: as sync, every batch is sampled by the weights that it trains"
    sent = "every step" if asynchronous.sync_every == 1 else f"every {asynchronous.sync_every} steps"
    cache = "keep their keys and values" if asynchronous.keep_cache else "compute keys and values anew"
    under = f"unfinished responses go on and {cache}" if asynchronous.partial_rollout else "responses that have begun end first"
    return (
        f"{name}: {staleness + 1} batches of prompts in flight, no token more than {_count(staleness, 'version')} old; weights are "
        f"sent {sent}, {under}"
    )


def _iteration(config: Config, model_steps: int, steps: int) -> str:
    rules = " + ".join(config.reward.functions)
    learns = f"{_count(model_steps, 'step')} of the reward model on the best and worst of new groups by {rules}"
    return (
        f"reference <- policy; {learns if model_steps else 'the reward model stays as it is'}; {_count(steps, 'step')} of the policy on "
        "the model's score alone"
    )


def _selection(config: Config) -> Rows:
    groups, data = config.algorithm.filter_groups, config.data
    if groups.enable and groups.refill:
        yield (
            "keep",
            f"groups whose {groups.metric} differs, refilled by {config.gen_batch_size} prompts at a time to "
            f"{data.train_batch_size} groups, {groups.max_num_gen_batches} batches at most; epochs pass faster",
        )
    elif groups.enable:
        yield "keep", f"groups whose {groups.metric} differs; the others are not trained and count in no denominator"
    if age := config.algorithm.replay.max_age:
        yield (
            "replay",
            f"groups in which at most {config.algorithm.replay.max_success:.3g} of the responses have the highest reward, for {_count(age, 'step')}, "
            "in place of groups without a signal",
        )
    if (function := config.rollout.function) is not None:
        yield "rollouts", f"those that {function} makes of a batch of prompts"
    if data.curriculum is not None:
        yield "curriculum", f"{data.curriculum} chooses the prompts that come next"
    if data.retire_above is not None:
        yield (
            "retire",
            f"prompts with {data.retire_metric} >= {data.retire_score:g} in {data.retire_above:.4g} of their responses or more, "
            "from the next epoch on",
        )


def _ratio(plan: Plan) -> str:
    passes, updates = plan.passes, plan.sizes.updates_per_step
    if passes.old_logprobs == "engine":
        return "against the engine's log-probs; the actor computes no old ones"
    if updates > 1:
        return f"against old log-probs, recomputed by the actor before the first of {updates} updates"
    old = f"computed for {' and '.join(passes.old_readers)} only" if passes.old_logprobs == "actor" else "not computed"
    return f"exactly 1 (one update per batch); old log-probs are {old}"


def _axes(config: Config, plan: Plan) -> str:
    fsdp, sequence_ranks = config.actor.fsdp_config, plan.passes.update.sequence_ranks
    parts = []
    if 0 < fsdp.fsdp_size < plan.world_size:
        parts.append(f"sharded over {fsdp.fsdp_size}, {plan.world_size // fsdp.fsdp_size} replicas")
    if sequence_ranks > 1:
        parts.append(f"sequences split over {sequence_ranks}")
    if fsdp.offload_policy:
        parts.append("optimizer steps in host memory")
    return "".join(f"; {part}" for part in parts)


def _micro_batches(plan: Plan) -> list[str]:
    passes = plan.passes
    rules = {"update": passes.update}
    if passes.old_logprobs == "actor":
        rules["old log-probs"] = passes.old
    if plan.reference:
        rules["reference"] = passes.reference
    if plan.role("critic"):
        rules["critic"] = passes.critic
    return [f"{rule} ({', '.join(name for name in rules if rules[name] == rule)})" for rule in dict.fromkeys(rules.values())]


def _objective(config: Config, plan: Plan) -> Rows:
    algorithm = config.algorithm
    if plan.role("actor") is None:
        train = config.reward.reward_model.train
        centring = f" + {train.center_coef:g} (r_w + r_l)²" if train.center_coef else ""
        pairs = f"1/num_pairs Σ_pairs -log sigmoid(r_w - r_l - margin){centring};  r the score at the response's last token"
        steps = "1/num_steps Σ_steps -y log sigmoid(s) - (1 - y) log sigmoid(-s);  s the score at the step's end, y its label"
        yield "loss", f"= {steps if train.loss == 'steps' else pairs}"
        return
    if config.estimates_advantages:
        advantage = shown(ADVANTAGES.get(algorithm.adv_estimator), estimator_options(algorithm))
        yield "A", f"= {advantage.removeprefix('A = ')}  [{algorithm.adv_estimator}]"
    if plan.role("critic"):
        formula = shown(value_loss, {"cliprange_value": config.critic.cliprange_value})
        yield "critic loss", f"= 1/num_tokens Σ_tokens {formula};  R the returns of A"
    if algorithm.use_kl_in_reward:
        control, estimator = algorithm.kl_ctrl, KL_ESTIMATORS.get(algorithm.kl_penalty)
        target = f", steered to {control.target_kl:g}" if control.type == "adaptive" else ""
        yield (
            "R =",
            f"reward - {control.kl_coef:g} Σ_tokens KL{target};  KL = {shown(estimator, algorithm.kl_penalty_options)}  [{algorithm.kl_penalty}]",
        )
    if config.reward.overlong_buffer.tokens is not None:
        buffer = config.reward.overlong_buffer
        yield (
            "overlong",
            f"up to -{buffer.penalty_factor:g} in the reward, over the last {buffer.len} tokens of the longest response",
        )
    correction = RolloutCorrection.from_config(algorithm.rollout_correction)
    in_loss = plan.objective.correction
    if correction.bypass_mode and correction.rollout_is and (in_loss is None or in_loss.rollout_is is None):
        yield "w", "= 1: the ratio of the loss is that of the policy to the engine (rollout_correction.bypass_mode)"
    elif correction.rollout_is:
        policy = "old policy" if in_loss is None else "policy"
        level, limit = correction.rollout_is, correction.rollout_is_threshold
        yield "w", f"= ratio of {policy} to engine, by {level}" + ("" if limit is None else f", at most {limit:g}")
    for rejected in correction.rollout_rs:
        lower = "" if rejected.lower is None else f"below {rejected.lower:g} or "
        yield "rejected", f"{rejected.mode} {lower}above {rejected.upper:g}"
    if correction.bypass_mode:
        yield "old policy", "the engine's own log-probs (rollout_correction.bypass_mode)"
    if algorithm.mask_truncated:
        yield "trained", "only responses that were not cut off"
    entropy = config.actor.adaptive_entropy
    if entropy.enable:
        start = config.actor.entropy_coeff
        yield "entropy", f"coefficient from {start:g} by {entropy.delta:g} a step towards H = {entropy.target:g}; 0 above it"
    for line in plan.objective.formula().splitlines():
        name, _, value = line.partition("=")
        value = value.replace("avg(pg)", "avg(w·pg)") if correction.rollout_is else value
        yield name.strip(), f"= {value.strip()}"


def components(plan: Plan) -> Rows:
    """Yield a run as the three components that all methods share, data source, reward function and gradient coefficient, and the
    gradient that they make.

    DeepSeekMath (arXiv 2402.03300), section 5.2.1, eq. 5:

        gradient = E_{(q, o) ~ D} [ 1/|o| Σ_t GC(q, o, t, π_rf) ∇log π(o_t | q, o_<t) ]

    `docs/paradigm.md` has the components of each method with the keys that choose them.
    """
    yield "D", _data_source(plan)
    yield "π_rf", _reward_function(plan)
    for name, teacher in plan.teachers:
        yield "teacher", f"{name}: {_teacher(teacher, plan)}"
    yield "GC", f"= {_gradient_coefficient(plan)}"
    average = (
        f"mean over {'rows' if plan.objective.needs_kl else 'pairs'} of Σ_tokens"
        if plan.objective.needs_pairs
        else f"{plan.objective.loss_agg_mode} of"
    )
    entropy = " - the entropy's own gradient" if plan.objective.entropy_coeff or plan.objective.adaptive_entropy else ""
    yield "gradient", f"= {average} GC ∇log π{entropy}"


def _data_source(plan: Plan) -> str:
    config = plan.config
    kind = plan.rows or ("pairs" if plan.objective.needs_pairs else "answers")
    if config.data.responses == "rows":
        return f"the {kind} that stand in the rows (data.responses=rows)"
    n = (plan.collection or plan).config.rollout.n
    sampled = f"{n} responses to each prompt, sampled by"
    if plan.objective.needs_pairs:
        sampled = f"the best and the worst of {sampled}"
    if plan.collection is not None:
        which = "" if plan.objective.needs_pairs else ", of which the good ones are kept"
        return f"{sampled} the initial policy{which} (data.responses=initial_policy)"
    if staleness := oldest_sampler(config):
        return (
            f"{sampled} the policy of at most {staleness} training step{'s' * (staleness > 1)} before (data.responses=policy)"
        )
    return f"{sampled} the policy as it is (data.responses=policy)"


def _reward_function(plan: Plan) -> str:
    config = plan.config
    if plan.objective.needs_kl:
        return "whether an answer is desirable, as its row says"
    if config.data.responses == "rows":
        return (
            "which answer of a pair is the better one, as its row says"
            if plan.objective.needs_pairs
            else "none: each row is right"
        )
    if plan.objective.distillation is not None and not plan.objective.distillation.task:
        return "none: the teacher's distribution is the goal, and rewards are measured only"
    rules, models = config.reward.functions, describe_models(config)
    if config.is_iterated:
        trained = f", trained on samples of the policy that {' + '.join(rules)} labels" if plan.trains_reward_model else ""
        return f"{' + '.join(models)} alone{trained}"
    return " + ".join([*rules, *models]) or "the judge's scores"


def _teacher(teacher: TeacherConfig, plan: Plan) -> str:
    role = plan.role("teacher")
    ranks = "" if role is None else f" ({role.num_workers} frozen rank{'s' * (role.num_workers > 1)} in the {role.pool}'s pool)"
    policy = (
        "the policy as it is" if teacher.ema_decay is None else f"a moving average of the policy (decay {teacher.ema_decay:g})"
    )
    model = policy if teacher.model_path is None else f"{teacher.model_path}{ranks}"
    reads = "" if teacher.context is None else ", with a context that the policy does not read"
    whom = "prompts of any other data_source" if teacher.key is None else f"prompts of data_source {teacher.key}"
    shares = [peer.weight for _, peer in plan.teachers if peer.key == teacher.key]
    return f"{model}{reads}" + (f"; {teacher.weight / sum(shares):.0%} of the {whom}" if len(plan.teachers) > 1 else "")


def _gradient_coefficient(plan: Plan) -> str:
    objective = plan.objective
    taught = objective.distillation
    if taught is not None and not taught.task and not taught.as_advantage:
        return taught.coefficient()
    loss = POLICY_LOSSES.get(objective.loss_mode)
    coefficient = shown(loss, objective.loss_options, coefficient_of) or "-∂pg/∂log π"
    if coefficient.startswith("r ") and plan.sizes.updates_per_step == 1 and plan.passes.old_logprobs != "engine":
        coefficient = f"{coefficient}; r = 1, so it is A"
    if taught is not None:
        coefficient += f"; {'A' if taught.as_advantage else 'and'} {'= ' * taught.as_advantage}{taught.coefficient()}"
    if objective.kl_loss_type is None:
        return coefficient
    if objective.needs_full_kl:
        return f"{coefficient}; and - {objective.kl_loss_coef:g} ∇KL, over the whole vocabulary"
    of_kl = shown(KL_ESTIMATORS.get(objective.kl_loss_type), objective.kl_options, coefficient_of) or "∂KL/∂log π"
    return f"{coefficient}; and - {objective.kl_loss_coef:g} ({of_kl})"


def _in_all(plan: Plan) -> str:
    """Return what all processes of a run on this machine's processors need together, and what there is."""
    if not (needed := host_bytes(plan)):
        return ""
    has = machine_memory()
    return f": {gib(needed)} in all with libraries, Ray and the controller; this {has.owner} has {gib(int(has.total))}"


def _memory(plan: Plan, judged: Fit | None) -> Rows:
    """Yield what each role needs; nothing if the table of the fit has that, for GPUs whose memory is known."""
    if plan.model is None:
        yield "unknown", "the sizes of this model are known only when its weights are read"
    if plan.model is None or judged is not None:
        return
    for need in plan.memory:
        yield need.role.replace("_", " "), f"{gib(need.num_bytes)}: {need.parts}"
    if phases := gpu_phases(plan):
        tight = max(phases, key=lambda phase: phase.least)
        yield "together", f"needs a GPU of {gib(tight.least)} or more, for the {tight.what} (estimated, not run)"


def _fit(plan: Plan, judged: Fit | None, instead: Proposal | None) -> Rows:
    if judged is None:
        return
    tight = judged.tightest
    state = "yes, tightly" if judged.fits and tight.used > TIGHT else "yes" if judged.fits else "no"
    yield "fits", f"{state}: {tight.what} takes {gib(tight.needed)} of {gib(tight.there)} (estimated, not run)"
    yield from ((TABLE, line) for line in table(plan, judged))
    if plan.engine is not None:
        yield "cache", f"{judged.cache_tokens:,} tokens for each engine, {judged.cache_sequences:.3g} sequences of full length"
    if judged.fits:
        proposal, label, what = propose_faster(plan), "faster", "free memory can shorten the update"
    else:
        proposal, label, what = instead, "instead", "this fits"
    if proposal is not None:
        used = proposal.fit.tightest
        yield label, f"{what} ({used.what} takes {used.used:.0%} of its memory); add to the command:"
        yield from ((TABLE, word) for word in proposal.words())
    elif not judged.fits:
        yield label, f"no configuration was found that fits, on up to {MOST_MACHINES} machines"


def _time(plan: Plan) -> Rows:
    judged = fit_of(plan)
    estimate = step_time(plan) if judged is not None and judged.fits else None
    if estimate is None:
        # By the runs that were made on this machine.
        runs = Path(plan.config.trainer.default_local_dir).expanduser()
        phases = {} if plan.machine.name else predict(plan, runs)
        for name, seconds in phases.items():
            yield TABLE, f"{'a step' if name == 'step' else name:<30}{seconds:>10.3f} s"
        if phases:
            cut_step_s = predict(plan, runs, longest=True)["step"]
            yield (
                "assumed",
                "what a run on this machine measured (calibration.json beside the runs), and responses as long as there; "
                f"if each is as long as data.max_response_length allows, a step takes {cut_step_s:.3f} s",
            )
        return
    for name, seconds in estimate.phases.items():
        yield TABLE, f"{name:<30}{seconds:>10,.1f} s"
    yield TABLE, f"{'a step':<30}{estimate.total:>10,.1f} s, {estimate.tokens_per_gpu:,.0f} tokens a second and GPU"
    yield "limit", f"{estimate.limit}; the engines' slots are {estimate.filled:.0%} full while they sample"
    yield "assumed", assumptions(plan)


def _schedules(plan: Plan) -> Rows:
    fitting = divisions(plan)
    if not fitting:
        return
    yield from ((TABLE, line) for line in (HEAD, *(division.line() for division in fitting)))
    fastest = min(fitting, key=lambda division: division.time.total)
    words = " ".join(f"{key}={show(value)}" for key, value in fastest.changes.items())
    yield "fastest", f"{fastest.schedule}: {words}"


def _notes(composed: Composed, plan: Plan) -> Iterator[str]:
    """Yield what may surprise, and what was given and means nothing in this run, so that nothing is ignored without a word."""
    config, machine, total = plan.config, plan.machine, plan.sizes.total_steps
    optim = config.actor.optim if plan.role("actor") else config.reward.reward_model.train.optim
    if machine.device == "cpu" and plan.world_size > machine.num_cpus:
        yield f"{plan.world_size} actor processes share {machine.num_cpus} cores: trainer.n_gpus_per_node is their number on a CPU"
    if machine.cluster and machine.device == "cpu" and config.trainer.device == "auto":
        yield "trainer.device=auto looked at this machine, which has no GPU; say trainer.device=cuda if the cluster has"
    if plan.trains and total is not None and optim.lr_warmup_steps > total * plan.sizes.updates_per_step:
        yield f"optim.lr_warmup_steps={optim.lr_warmup_steps} is longer than the run: the full learning rate is never reached"
    if config.trainer.experiment_name is None and config.trainer.save_freq > 0 and plan.trains:
        yield "without trainer.experiment_name every start is a new run; name it to resume it by the same command"
    yield from composed.notes
    if packages := ", ".join(untested()):
        yield f"installed, and not tested with this program: {packages}"
    if sentence := plan.lacks:
        yield f"this machine can plan the run and not start it: {sentence}"
    if plan.samples_with_vllm:
        yield from (f"the installed vLLM is not the newest that was tested: {gap}" for gap in gaps())
    for name in missing_loggers(config):
        yield f"trainer.logger: {name} is not installed on this machine; a run needs it: {INSTALL[name]}"
    reference = "its own ranks" if plan.role("reference") else "actor" if plan.base_reference else "nobody"
    yield from effects.notes(composed.config, machine, reference=reference, old_logprobs=plan.recomputes_old_logprobs)


def _processes(plan: Plan, number: int | None) -> str:
    nodes, per_node = sum(pool.nnodes for pool in plan.pools), max(pool.devices_per_node for pool in plan.pools)
    free = plan.machine.num_cpus - (per_node if plan.machine.device == "cuda" else 1)
    where = "" if nodes == 1 and not plan.machine.cluster else f" on each of {nodes} nodes" if nodes > 1 else " on its node"
    as_there = "" if number or not plan.machine.cluster else " (by the cores of each)"
    return f"{_count(processes_on(free, number), 'process', 'processes')}{where}{as_there}"


def _count(number: int, noun: str, plural: str | None = None) -> str:
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def _params(number: int) -> str:
    for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return str(number)
