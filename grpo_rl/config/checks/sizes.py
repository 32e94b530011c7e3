"""Sizes that must fit each other, and the machine."""

from __future__ import annotations

from collections.abc import Iterator

from grpo_rl.config import derived
from grpo_rl.config.derived import Machine
from grpo_rl.config.schema.fields import value_of
from grpo_rl.config.schema.tree import Config

_NEAR = 100_000
_A, _R, _REF = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
_SCORER = "reward.reward_model"


def problems(config: Config, machine: Machine) -> Iterator[str]:
    """Yield sizes that do not fit the machine, each with the nearest that do."""
    if machine.device == "cpu":
        if config.global_profiler.tool == "torch_memory":
            yield "global_profiler.tool=torch_memory: is for GPUs, whose allocator keeps the history; on CPUs take torch"
    elif machine.cluster or not machine.num_gpus:
        if machine.cluster and config.trainer.n_gpus_per_node is None and not machine.num_gpus:
            yield "trainer.n_gpus_per_node is not set: this machine has no GPU to count, so say how many each node of the cluster has"
        if not machine.cluster:
            yield "trainer.device=cuda: torch finds no GPU on this machine; trainer.device=auto runs on the CPU where there is none"
    else:
        yield from _gpus(config, machine)
    yield from _engines(config, machine)
    yield from _ranks(config, machine.world_size(config))


def problems_without_machine(config: Config) -> Iterator[str]:
    """Yield sizes that fit on no machine."""
    yield from _batches(config)
    yield from _passes(config)
    yield from _lengths(config)


def _batches(config: Config) -> Iterator[str]:
    batch, critic = config.data.train_batch_size, config.critic
    mini = config.actor_rollout_ref.actor.ppo_mini_batch_size
    if mini > batch:
        yield f"{_A}.ppo_mini_batch_size={mini}: larger than the batch it is taken from, data.train_batch_size={batch}; at most {batch}"
    elif batch % mini:
        below = batch // mini * mini
        yield (
            f"data.train_batch_size={batch}: must be a multiple of {_A}.ppo_mini_batch_size={mini}; nearest: "
            f"train_batch_size={below} or {below + mini}, or ppo_mini_batch_size={_nearest_divisors(batch, mini)}"
        )
    own = critic.ppo_mini_batch_size
    if own is not None and (own > batch or batch % own):
        nearest = _nearest_divisors(batch, own)
        yield f"critic.ppo_mini_batch_size={own}: must divide data.train_batch_size={batch}; nearest: {nearest}"
    steps, warmup = config.trainer.total_training_steps, config.trainer.critic_warmup
    if steps is not None and warmup >= steps:
        yield (
            f"trainer.critic_warmup={warmup}: the actor would learn in none of trainer.total_training_steps={steps}; fewer steps"
        )


def _nearest_divisors(number: int, wanted: int) -> str:
    """Return the divisors of `number` just below and above `wanted`."""
    below = next((value for value in range(min(wanted - 1, number), 0, -1) if number % value == 0), None)
    above = next((value for value in range(wanted + 1, number + 1) if number % value == 0), None)
    return " or ".join(str(value) for value in (below, above) if value is not None)


def _divisors(number: int) -> str:
    return ", ".join(str(size) for size in range(1, min(number, _NEAR) + 1) if number % size == 0)


def _passes(config: Config) -> Iterator[str]:
    """Yield passes that are to be cut by rollouts and are not told by how many."""
    parts = config.actor_rollout_ref
    dynamic = {
        f"{_A}.use_dynamic_bsz": parts.actor.use_dynamic_bsz,
        f"{_REF}.log_prob_use_dynamic_bsz": parts.ref.log_prob_use_dynamic_bsz,
        f"{_R}.log_prob_use_dynamic_bsz": parts.rollout.log_prob_use_dynamic_bsz,
        "critic.use_dynamic_bsz": config.critic.use_dynamic_bsz,
    }
    for key, is_dynamic in dynamic.items():
        sizes = f"{key.removesuffix('log_prob_use_dynamic_bsz')}log_prob_micro_batch_size_per_gpu"
        if not key.endswith("log_prob_use_dynamic_bsz"):
            sizes = key.replace("use_dynamic_bsz", "ppo_micro_batch_size_per_gpu")
        if is_dynamic is False and value_of(config, sizes) is None and parts.actor.ppo_micro_batch_size_per_gpu is None:
            yield f"{key}=false: needs {sizes}, the rollouts per forward pass"


def _lengths(config: Config) -> Iterator[str]:
    sampled = config.data.max_prompt_length + config.data.max_response_length
    trained, parts, critic = derived.longest_sequence(config), config.actor_rollout_ref, config.critic
    rollout, together = parts.rollout, parts.actor.ulysses_sequence_parallel_size
    scorer = config.reward.reward_model
    scores = scorer.enable or derived.trains_only_reward_model(config)
    by_tokens = derived.update_rule(config).max_tokens is not None
    budgets = {
        f"{_A}.ppo_max_token_len_per_gpu": (parts.actor.ppo_max_token_len_per_gpu if by_tokens else None, together),
        f"{_REF}.log_prob_max_token_len_per_gpu": (
            parts.ref.log_prob_max_token_len_per_gpu,
            derived.reference_sequence_ranks(config),
        ),
        f"{_R}.log_prob_max_token_len_per_gpu": (rollout.log_prob_max_token_len_per_gpu, together),
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


def _gpus(config: Config, machine: Machine) -> Iterator[str]:
    """Yield more GPUs than this machine has, and weights on a way that its GPUs do not have."""
    trainer, rollout, scorer = config.trainer, config.actor_rollout_ref.rollout, config.reward.reward_model
    pools = {"trainer": (trainer.nnodes, derived.ranks_per_node(config, machine))}
    if not derived.is_colocated(config):
        pools["rollout"] = (rollout.nnodes, derived.rollout_devices_per_node(config, machine))
    if scorer.enable and scorer.enable_resource_pool:
        pools["reward_model"] = (scorer.nnodes, derived.reward_model_ranks_per_node(config, machine))
    asked = sum(nodes * gpus for nodes, gpus in pools.values())
    if asked > machine.num_gpus:
        count = ", ".join(f"{name}.nnodes x n_gpus_per_node = {nodes} x {gpus}" for name, (nodes, gpus) in pools.items())
        yield (
            f"trainer.n_gpus_per_node={trainer.n_gpus_per_node or 'null'}: {asked} GPUs are asked for ({count}), this "
            f"machine has {machine.num_gpus}; lower them, or name a cluster in ray_kwargs.ray_init.address"
        )


def _engines(config: Config, machine: Machine) -> Iterator[str]:
    rollout, colocated = config.actor_rollout_ref.rollout, derived.is_colocated(config)
    per_node, parallel = derived.rollout_devices_per_node(config, machine), rollout.tensor_model_parallel_size
    nodes, spans = config.trainer.nnodes if colocated else rollout.nnodes, derived.nodes_per_engine(config, machine)
    across = rollout.name == "vllm" and machine.device == "cuda" and parallel == spans * per_node and nodes % spans == 0
    if per_node % parallel and not across:
        of = "trainer" if colocated or rollout.n_gpus_per_node is None else _R
        whole = [str(per_node * count) for count in range(2, min(nodes, _NEAR) + 1) if nodes % count == 0]
        possible = ", ".join([_divisors(per_node), *(whole if machine.device == "cuda" else [])])
        yield (
            f"{_R}.tensor_model_parallel_size={parallel}: must divide the devices of a node, {of}.n_gpus_per_node = {per_node}, or on "
            f"GPUs be all devices of several nodes, whose number divides that of the pool's nodes, {nodes}; possible: {possible}"
        )
    most = derived.num_rollout_devices(config, machine) // parallel
    if rollout.num_replicas is not None and rollout.num_replicas > most >= 1:
        each = f"{parallel} device{'s' if parallel > 1 else ''}"
        yield f"{_R}.num_replicas={rollout.num_replicas}: with {each} for each there is room for {most}"
    number, fewest, highest = rollout.num_replicas or most, rollout.min_replicas, rollout.max_replicas
    if fewest is not None and fewest > number >= 1:
        yield f"{_R}.min_replicas={fewest}: the run starts with {number}"
    if highest is not None and highest < number:
        yield f"{_R}.max_replicas={highest}: the run starts with {number}"
    if highest is not None and highest > most and (colocated or spans > 1) and machine.device == "cuda":
        why = "engines that share GPUs with ranks" if colocated else "engines that span nodes"
        yield f"{_R}.max_replicas={highest}: {why} cannot become more than {most}; {_R}.nnodes gives engines their own"


def _ranks(config: Config, ranks: int) -> Iterator[str]:
    """Yield groups of ranks that do not divide the ranks, a batch too small for them, and ranks that are not there."""
    parts = config.actor_rollout_ref
    keys = [f"{role}.ulysses_sequence_parallel_size" for role in (_A, _REF, "critic")]
    # As in verl, a group that is larger than the set is the set.
    fsdp = {key: value_of(config, key).fsdp_size for key in (f"{_A}.fsdp_config", f"{_REF}.fsdp_config", "critic.fsdp")}
    sizes = {key: value_of(config, key) or 1 for key in keys}
    for key, size in (sizes | {f"{key}.fsdp_size": size for key, size in fsdp.items() if 0 < size < ranks}).items():
        if ranks % size:
            yield f"{key}={size}: must divide the {ranks} ranks, trainer.nnodes x n_gpus_per_node; possible: {_divisors(ranks)}"
    if derived.is_iterated(config) and parts.ref.fsdp_config.fsdp_size != parts.actor.fsdp_config.fsdp_size:
        yield (
            f"{_REF}.fsdp_config.fsdp_size={parts.ref.fsdp_config.fsdp_size}: with trainer.schedule=iterate the reference takes over "
            f"the actor's shards, and needs the same groups; set {_A}.fsdp_config.fsdp_size={parts.actor.fsdp_config.fsdp_size} for both"
        )
    groups, mini, n = ranks // parts.actor.ulysses_sequence_parallel_size, parts.actor.ppo_mini_batch_size, parts.rollout.n
    if mini * n < groups:
        yield (
            f"{_A}.ppo_mini_batch_size={mini}: with rollout.n={n} it makes {mini * n} rollouts, fewer than the {groups} actor ranks "
            f"that share them; at least {-(-groups // n)}"
        )
    for key, profiler in derived.profilers_of(config).items():
        if any(rank >= ranks for rank in profiler.ranks):
            yield f"{key}.ranks={profiler.ranks}: there are {ranks} ranks, from 0 to {ranks - 1}"
