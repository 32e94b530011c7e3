"""Rules between keys: what they name must exist, sizes must fit, and no setting may silently do nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from grpo_rl.config import derived, effects
from grpo_rl.config.checks import engine_arguments, inputs
from grpo_rl.config.convert import show
from grpo_rl.config.derived import OFFLINE, Machine, settled
from grpo_rl.config.schema.fields import leaves, nearest, value_of
from grpo_rl.config.schema.kinds import ITERATE, LABEL_LOSSES
from grpo_rl.config.schema.tree import Config
from grpo_rl.errors import Problems

_A, _R, _M = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_REF, _NEAR = "actor_rollout_ref.ref", 100_000
_SCORER, _TURNS = "reward.reward_model", "actor_rollout_ref.rollout.multi_turn"
_RESUMABLE = ("model", "optimizer", "extra")
SUPERVISED_LOSS = "sft"


def check(config: Config, machine: Machine) -> list[str]:
    """Return a line for each problem between keys, with key, value, rule and remedy."""
    run = settled(config)
    problems = [*_without_machine(config, run), *_machine(run, machine), *effects.problems(config, machine)]
    return list(dict.fromkeys(problems))


def _without_machine(config: Config, run: Config) -> Problems:
    for rules in (inputs.problems, _batches, _passes, _lengths, _rewards, engine_arguments.problems):
        yield from rules(run)
    for rules in (_options, _training, _sampling, _episodes, _schedule):
        yield from rules(config)


def between_sound_keys(config: Config, problems: Iterable[str]) -> Problems:
    """Yield problems between the keys that `problems` do not name. Lines that name such a key, or one that a
    misspelt key may have meant, may follow from its default alone, and are left out."""
    doubtful: set[str] = set()
    for problem in problems:
        key = re.split(r"[=:\s]", problem, maxsplit=1)[0]
        doubtful |= {name.rpartition(".")[2] for name in (key, *nearest(key))}
        if key.startswith(("recipe", "the")):
            return
    # No key that is refused on GPUs has an effect on CPUs.
    lines = [*_without_machine(config, settled(config)), *effects.problems(config, Machine(1, 1, "cuda"))]
    # What is not set may stand in the word or recipe that could not be read.
    yield from (line for line in lines if "is not set" not in line and not doubtful & set(re.findall(r"\w+", line)))


# ---- settings that contradict each other, or that the schedule cannot do ------------------------------------------


def _options(config: Config) -> Problems:
    """Yield options that Hydra's `instantiate` would read, at any depth: here nothing is made by a name."""

    def problems(value: object, key: str) -> Problems:
        if re.search(r"\._\w+_$", key):
            yield f"{key}: no function has such an option, and nothing is made by its name here; leave it out"
        if isinstance(value, Mapping):
            for name, entry in value.items():
                yield from problems(entry, f"{key}.{name}")
        elif isinstance(value, list):
            for entry in value:
                yield from problems(entry, key)

    for leaf in leaves().values():
        if leaf.kind.base is dict:
            yield from problems(value_of(config, leaf.key), leaf.key)


def _training(config: Config) -> Problems:
    algorithm, actor, model = config.algorithm, config.actor, config.model
    if algorithm.use_kl_in_reward and actor.use_kl_loss:
        yield (
            f"algorithm.use_kl_in_reward=true: the KL is in the loss already ({_A}.use_kl_loss=true, the default); set "
            f"{_A}.use_kl_loss=false, or algorithm.use_kl_in_reward=false"
        )
    for key in (f"{_A}.optim", "critic.optim", f"{_SCORER}.train.optim"):
        if len(betas := value_of(config, f"{key}.betas")) != 2:
            yield f"{key}.betas={show(betas)}: must be two numbers >= 0 and < 1, e.g. [0.9,0.999]"
    if algorithm.filter_groups.enable and config.rollout.n == 1:
        yield f"algorithm.filter_groups.enable=true: a group of one response never has a signal, and {_R}.n=1; usual is 5 to 16"
    if model.lora_rank and config.is_iterated:
        yield f"{_M}.lora_rank={model.lora_rank}: trainer.schedule=iterate moves the reference, which under adapters is the base model"
    contents = actor.checkpoint.save_contents
    missing = [name for name in _RESUMABLE if name not in contents]
    if missing and config.trainer.save_freq > 0:
        yield (
            f"{_A}.checkpoint.save_contents={show(contents)}: a run cannot resume without {' and '.join(missing)}; "
            "[model,optimizer,extra] and hf_model if wanted"
        )


def _sampling(config: Config) -> Problems:
    rollout, trainer, values = config.rollout, config.trainer, config.rollout.val_kwargs
    validates = bool(config.data.val_files or config.data.val_prompt_files)
    for key, top_k in ((_R, rollout.top_k), (f"{_R}.val_kwargs", values.top_k if validates else -1)):
        if top_k == 0:
            yield f"{key}.top_k=0: would leave no token; -1 takes all"
    cuts = [
        f"{_R}.{name}={getattr(rollout, name):g}" for name in ("top_p", "min_p") if getattr(rollout, name) != (name == "top_p")
    ]
    if rollout.name == "vllm" and rollout.top_k == -1 and cuts:
        yield (
            f"{' and '.join(cuts)}: needs {_R}.top_k: the trainer needs the tokens that could be sampled, and vllm reports "
            "the top_k likeliest ones; set top_k, e.g. 100, or rollout.name=hf"
        )
    if rollout.quantization is not None and rollout.dtype == "float32":
        yield f"{_R}.quantization={rollout.quantization}: quantizes weights of 16 bits; set {_R}.dtype=bfloat16, or leave it out"
    if not validates and trainer.val_only:
        yield "trainer.val_only=true: there is nothing to validate on; give data.val_files"
    if validates and values.n > 1 and not (values.do_sample and values.temperature):
        yield (
            f"{_R}.val_kwargs.n={values.n}: needs {_R}.val_kwargs.do_sample=true and a temperature above 0; validation is greedy, "
            "and all would be equal"
        )


def _rewards(config: Config) -> Problems:
    scorer, estimator = config.reward.reward_model, config.algorithm.adv_estimator
    separator, key = scorer.step_separator, f"{_SCORER}.step_separator"
    if config.trains_only_reward_model:
        if scorer.train.loss == "steps" and not separator:
            yield (
                f"{key} is not set: {_SCORER}.train.loss=steps reads a step at the end of the text between steps; give it, such as "
                "'\\n\\n', and the same where the model scores"
            )
    elif scorer.enable and separator == "":
        yield f"{key}='': would cut nowhere; give the text between steps, such as '\\n\\n', or null"
    elif scorer.enable and separator is not None and estimator != "grpo_process":
        yield (
            f"{key}={separator!r}: makes rewards of steps, which algorithm.adv_estimator={estimator} does not read; set "
            "algorithm.adv_estimator=grpo_process, or leave step_separator out for one score per response"
        )
    if scorer.enable_resource_pool and scorer.nnodes == 0:
        yield f"{_SCORER}.nnodes=0: {_SCORER}.enable_resource_pool=true needs the number of its nodes; 1, or more"


def _episodes(config: Config) -> Problems:
    turns = config.rollout.multi_turn
    if not turns.enable:
        return
    if turns.environment.name is None and turns.interaction_config_path is None and not (turns.tools or turns.tool_config_path):
        yield (
            f"{_TURNS}.enable=true: nothing answers the policy; name {_TURNS}.environment.name, or tools by {_TURNS}.tools or "
            "tool_config_path"
        )
    if turns.environment.name is not None and turns.interaction_config_path is not None:
        yield f"{_TURNS}.interaction_config_path: names an environment, as environment.name={turns.environment.name} does; keep one"
    if config.collects:
        yield f"{_TURNS}.enable=true: data.responses=initial_policy keeps single responses; data.responses=policy"
    if config.rollout.ignore_eos:
        yield f"{_TURNS}.enable=true: with {_R}.ignore_eos=true no turn would ever end; leave that out"


def _schedule(config: Config) -> Problems:
    loss, schedule, data = config.actor.policy_loss.loss_mode, config.trainer.schedule, config.data
    offline, pairs = config.is_offline, config.trains_pairs
    if pairs and loss in LABEL_LOSSES and data.responses != "rows":
        yield f"{_A}.policy_loss.loss_mode={loss}: learns labelled answers; data.responses=rows, with columns completion and label"
    if pairs and offline and data.truncation != "error":
        yield (
            f"data.truncation={data.truncation}: a loss over pairs compares whole answers, and a cut one would be another; "
            "drop long rows with data.filter_overlong_prompts=true"
        )
    if pairs and config.collects and config.rollout.n < 2:
        yield f"{_R}.n={config.rollout.n}: data.responses={data.responses} compares the best and the worst of a group; 2 or more"
    if schedule == OFFLINE and not offline:
        yield f"trainer.schedule={OFFLINE}: is chosen by data.responses=rows, which trains on the answers in data.train_files"
    elif loss == SUPERVISED_LOSS and not offline and ":" not in schedule:
        yield (
            f"{_A}.policy_loss.loss_mode={loss}: reads no advantages, so the reward would have no effect with "
            f"trainer.schedule={schedule}; data.responses=rows learns the answers in the data, loss_mode=reinforce weighs sampled ones"
        )
    if config.is_iterated:
        yield from _iterated(config)
    if derived.overlaps(config):
        yield from _overlapping(config)
    yield from _old_samples(config)
    if config.rollout.function is not None and not offline:
        key = f"{_R}.function={config.rollout.function}"
        if config.plays_episodes:
            yield f"{key}: makes the rollouts, and so does {_R}.multi_turn.enable=true; give one of them"
        if derived.overlaps(config):
            yield f"{key}: makes a batch at a time, and trainer.schedule={schedule} asks for single responses; trainer.schedule=sync"


def _old_samples(config: Config) -> Problems:
    correction, replay = config.algorithm.rollout_correction, f"algorithm.replay.max_age={config.algorithm.replay.max_age}"
    is_corrected = correction.rollout_is or correction.rollout_rs
    if derived.oldest_sampler(config) and correction.bypass_mode is False and not is_corrected:
        key = f"trainer.schedule={config.trainer.schedule}" if derived.max_staleness(config) else replay
        yield (
            f"algorithm.rollout_correction.bypass_mode=false: with {key} the weights that sampled a token may be older than "
            "those that it trains, and nothing would correct for that; leave it out, or set rollout_is=token beside it"
        )
    if not config.algorithm.replay.max_age:
        return
    rollout, obstacle = config.rollout, ""
    if config.plays_episodes:
        obstacle = "episodes of several turns"
    elif config.distillation.enabled:
        obstacle = "teachers, which read more of a prompt than is kept"
    elif rollout.top_p < 1 or rollout.top_k > 0 or rollout.min_p > 0:
        obstacle = "top_p, top_k and min_p, whose sets of tokens are not kept"
    if obstacle:
        yield f"{replay}: does not go with {obstacle}; leave it out"


def _overlapping(config: Config) -> Problems:
    key, asynchronous = f"trainer.schedule={config.trainer.schedule}", config.trainer.asynchronous
    if config.is_colocated and not config.trainer.val_only:
        yield (
            f"{key}: samples while it trains, and with {_R}.nnodes=0 the engines share the actor's devices; give them their own: "
            f"{_R}.nnodes=1 {_R}.n_gpus_per_node=..., beside trainer.n_gpus_per_node"
        )
    if derived.versions_ahead(config) is None and asynchronous.sync_every > asynchronous.max_staleness + 1:
        yield (
            f"trainer.asynchronous.sync_every={asynchronous.sync_every}: the weights would be older than max_staleness={asynchronous.max_staleness} "
            "before they are sent; at most max_staleness + 1"
        )


def _iterated(config: Config) -> Problems:
    """The reward of iterated training is the model's score; rules give the labels."""
    key, reward, scorer = f"trainer.schedule={ITERATE}", config.reward, config.reward.reward_model
    if not scorer.enable:
        yield f"{key}: trains on the score of a reward model; give {_SCORER}.enable=true and its model_path"
    if not reward.functions:
        yield f"{key}: needs reward.functions, whose reward labels the reward model's pairs and shows the true accuracy"
    if config.trainer.critic_warmup:
        yield f"trainer.critic_warmup={config.trainer.critic_warmup}: counts first steps, which with {key} may be the reward model's"
    if config.trainer.iterate.reward_model_steps == 0:
        return
    if config.rollout.n < 2:
        yield f"{_R}.n={config.rollout.n}: {key} compares the best and the worst of a group; 2 or more"
    if scorer.step_separator is not None or scorer.train.loss != "bradley_terry":
        yield (
            f"{key}: trains the reward model on pairs of whole responses; leave out {_SCORER}.step_separator and train.loss, or set "
            "trainer.iterate.reward_model_steps=0"
        )
    if config.trainer.val_only and (scorer.model_path or "").startswith("builtin:"):
        yield (
            f"trainer.val_only=true: {_SCORER}.model_path={scorer.model_path} has no head before {key} trains it; name a trained "
            f"one, or validate by the rules alone, without this schedule and {_SCORER}"
        )


# ---- sizes that must fit each other, and the machine ---------------------------------------------------------------


def _batches(config: Config) -> Problems:
    batch = config.data.train_batch_size
    for key in (f"{_A}.ppo_mini_batch_size", "critic.ppo_mini_batch_size"):
        mini = value_of(config, key)
        if mini is not None and batch % mini:
            yield f"{key}={mini}: must divide data.train_batch_size={batch}; nearest: {_nearest_divisors(batch, mini)}"
    steps, warmup = config.trainer.total_training_steps, config.trainer.critic_warmup
    if steps is not None and warmup >= steps:
        yield (
            f"trainer.critic_warmup={warmup}: the actor would learn in none of trainer.total_training_steps={steps}; fewer steps"
        )


def _nearest_divisors(number: int, divisor: int) -> str:
    ranges = range(min(divisor - 1, number), 0, -1), range(divisor + 1, number + 1)
    nearest_divisors = (next((str(value) for value in values if number % value == 0), "") for values in ranges)
    return " or ".join(filter(None, nearest_divisors))


def _divisors(number: int) -> str:
    return ", ".join(str(size) for size in range(1, min(number, _NEAR) + 1) if number % size == 0)


def _passes(config: Config) -> Problems:
    for prefix, of in ((f"{_A}.", "ppo_"), ("critic.", "ppo_"), (f"{_REF}.log_prob_", ""), (f"{_R}.log_prob_", "")):
        key, sizes = f"{prefix}use_dynamic_bsz", f"{prefix}{of}micro_batch_size_per_gpu"
        is_told = value_of(config, sizes) or config.actor.ppo_micro_batch_size_per_gpu
        if value_of(config, key) is False and not is_told:
            yield f"{key}=false: needs {sizes}, the rollouts per forward pass"


def _lengths(config: Config) -> Problems:
    sampled = config.data.max_prompt_length + config.data.max_response_length
    trained, actor, critic = config.longest_sequence, config.actor, config.critic
    rollout, sequence_ranks = config.rollout, actor.ulysses_sequence_parallel_size
    scorer = config.reward.reward_model
    scores = scorer.enable or config.trains_only_reward_model
    by_tokens = derived.pass_rule(config, "actor").max_tokens is not None
    budgets = {
        f"{_A}.ppo_max_token_len_per_gpu": (actor.ppo_max_token_len_per_gpu if by_tokens else None, sequence_ranks),
        f"{_REF}.log_prob_max_token_len_per_gpu": (
            config.ref.log_prob_max_token_len_per_gpu,
            derived.pass_rule(config, "ref").sequence_ranks,
        ),
        f"{_R}.log_prob_max_token_len_per_gpu": (rollout.log_prob_max_token_len_per_gpu, sequence_ranks),
        f"{_R}.max_model_len": (rollout.max_model_len, 1),
        "critic.ppo_max_token_len_per_gpu": (critic.ppo_max_token_len_per_gpu, critic.ulysses_sequence_parallel_size),
        f"{_SCORER}.max_token_len_per_gpu": (scorer.max_token_len_per_gpu if scores else None, 1),
    }
    for key, (budget, ranks) in budgets.items():
        longest = trained if key.startswith(_A) else sampled
        of = "data.max_length" if longest != sampled else "data.max_prompt_length + data.max_response_length"
        if budget is not None and budget * ranks < longest:
            split = f" on {ranks} ranks together" if ranks > 1 else ""
            yield (
                f"{key}={budget}: shorter than one sequence{split}, which may have {of} = {longest} tokens; "
                f"at least {-(-longest // ranks)}"
            )
    buffer, response = config.reward.overlong_buffer.tokens, config.data.max_response_length
    if buffer is not None and buffer > response:
        yield f"reward.overlong_buffer.len={buffer}: longer than data.max_response_length={response}; at most {response}"
    if rollout.max_num_seqs is not None and rollout.max_num_batched_tokens < rollout.max_num_seqs:
        yield (
            f"{_R}.max_num_batched_tokens={rollout.max_num_batched_tokens}: less than one token for each of "
            f"{_R}.max_num_seqs={rollout.max_num_seqs} responses; at least {rollout.max_num_seqs}"
        )


def _gpus(config: Config, machine: Machine) -> Problems:
    trainer, scorer = config.trainer, config.reward.reward_model
    pools = {"trainer": machine.devices(config, "actor")}
    if not config.is_colocated:
        pools["rollout"] = machine.devices(config, "rollout")
    if scorer.enable and scorer.enable_resource_pool:
        pools["reward_model"] = machine.devices(config, "reward_model")
    num_asked = sum(nodes * gpus for nodes, gpus in pools.values())
    if num_asked > machine.num_gpus:
        count = ", ".join(f"{name}.nnodes x n_gpus_per_node = {nodes} x {gpus}" for name, (nodes, gpus) in pools.items())
        yield (
            f"trainer.n_gpus_per_node={trainer.n_gpus_per_node or 'null'}: {num_asked} GPUs are asked for ({count}), this "
            f"machine has {machine.num_gpus}; lower them, or name a cluster in ray_kwargs.ray_init.address"
        )


def _engines(config: Config, machine: Machine) -> Problems:
    rollout, colocated = config.rollout, config.is_colocated
    (nodes, per_node), parallel = machine.devices(config, "rollout"), rollout.tensor_model_parallel_size
    spans = derived.nodes_per_engine(config, machine)
    across = rollout.name == "vllm" and machine.device == "cuda" and parallel == spans * per_node and nodes % spans == 0
    if rollout.name == "hf" and parallel > 1:
        yield f"{_R}.tensor_model_parallel_size={parallel}: rollout.name=hf runs on one device; 1, or rollout.name=vllm"
    elif per_node % parallel and not across:
        of = "trainer" if colocated or rollout.n_gpus_per_node is None else _R
        node_sizes = [str(per_node * count) for count in range(2, min(nodes, _NEAR) + 1) if nodes % count == 0]
        possible = ", ".join([_divisors(per_node), *(node_sizes if machine.device == "cuda" else [])])
        yield (
            f"{_R}.tensor_model_parallel_size={parallel}: must divide the devices of a node, {of}.n_gpus_per_node = {per_node}, or on "
            f"GPUs be all devices of several nodes, whose number divides that of the pool's nodes, {nodes}; possible: {possible}"
        )
    if rollout.engines_per_device > 1:
        setting = f"{_R}.engines_per_device={rollout.engines_per_device}"
        if parallel > 1:
            yield f"{setting}: an engine of several devices shares them with no other; {_R}.tensor_model_parallel_size=1"
        if machine.device == "cuda" and rollout.kv_cache_memory_bytes is None:
            yield f"{setting}: engines that start side by side cannot measure the GPU; set {_R}.kv_cache_memory_bytes for each"
        if machine.device == "cuda" and not colocated and rollout.checkpoint_engine.backend != "object_store":
            yield f"{setting}: NCCL has one process per GPU; {_R}.nnodes=0, or {_R}.checkpoint_engine.backend=object_store"
    room = nodes * per_node * rollout.engines_per_device // parallel
    if rollout.num_replicas is not None and rollout.num_replicas > room >= 1:
        devices = f"{parallel} device{'s' if parallel > 1 else ''}"
        yield f"{_R}.num_replicas={rollout.num_replicas}: with {devices} for each there is room for {room}"
    number, minimum, highest = rollout.num_replicas or room, rollout.min_replicas, rollout.max_replicas
    if minimum is not None and minimum > number >= 1:
        yield f"{_R}.min_replicas={minimum}: the run starts with {number}"
    if highest is not None and highest < number:
        yield f"{_R}.max_replicas={highest}: the run starts with {number}"
    if highest is not None and highest > room and (colocated or spans > 1) and machine.device == "cuda":
        why = "engines that share GPUs with ranks" if colocated else "engines that span nodes"
        yield f"{_R}.max_replicas={highest}: {why} cannot become more than {room}; {_R}.nnodes gives engines their own"


def _ranks(config: Config, ranks: int) -> Problems:
    keys = [f"{role}.ulysses_sequence_parallel_size" for role in (_A, _REF, "critic")]
    # As in verl, a group larger than all ranks is all ranks.
    fsdp = {key: value_of(config, key).fsdp_size for key in (f"{_A}.fsdp_config", f"{_REF}.fsdp_config", "critic.fsdp")}
    sizes = {key: value_of(config, key) or 1 for key in keys}
    for key, size in (sizes | {f"{key}.fsdp_size": size for key, size in fsdp.items() if 0 < size < ranks}).items():
        if ranks % size:
            yield f"{key}={size}: must divide the {ranks} ranks, trainer.nnodes x n_gpus_per_node; possible: {_divisors(ranks)}"
    if config.is_iterated and config.ref.fsdp_config.fsdp_size != config.actor.fsdp_config.fsdp_size:
        yield (
            f"{_REF}.fsdp_config.fsdp_size={config.ref.fsdp_config.fsdp_size}: with trainer.schedule=iterate the reference takes over "
            f"the actor's shards, and needs the same groups; set {_A}.fsdp_config.fsdp_size={config.actor.fsdp_config.fsdp_size} for both"
        )
    groups, mini, n = ranks // config.actor.ulysses_sequence_parallel_size, config.actor.ppo_mini_batch_size, config.rollout.n
    if mini * n < groups:
        yield (
            f"{_A}.ppo_mini_batch_size={mini}: with rollout.n={n} it makes {mini * n} rollouts, fewer than the {groups} actor ranks "
            f"that share them; at least {-(-groups // n)}"
        )
    for key, profiler in derived.profilers_of(config).items():
        if any(rank >= ranks for rank in profiler.ranks):
            yield f"{key}.ranks={profiler.ranks}: there are {ranks} ranks, from 0 to {ranks - 1}"


def _machine(config: Config, machine: Machine) -> Problems:
    if machine.device == "cuda":
        if not machine.cluster and not machine.num_gpus:
            yield "trainer.device=cuda: torch finds no GPU on this machine; trainer.device=auto runs on the CPU where there is none"
        elif not machine.cluster:
            yield from _gpus(config, machine)
        elif config.trainer.n_gpus_per_node is None and not machine.num_gpus:
            yield "trainer.n_gpus_per_node is not set: this machine has no GPU to count, so say how many each node of the cluster has"
    yield from _engines(config, machine)
    yield from _ranks(config, machine.world_size(config))
