"""Sizes that must fit each other, and the machine."""

from __future__ import annotations

from collections.abc import Iterator

from grpo_rl.config import derived
from grpo_rl.config.derived import Machine
from grpo_rl.config.effects import profilers_of
from grpo_rl.config.schema.model import FsdpConfig, RefFsdpConfig
from grpo_rl.config.schema.tree import Config

_NEAR = 100_000
_MOST_ROLLOUTS = 2**24
"""The most rollouts of a step: above it the responses of one step alone (a few kB each) fill the memory of any machine."""
_PARTS = "actor_rollout_ref"
_BACKEND = "actor_rollout_ref.rollout.checkpoint_engine.backend"


def problems(config: Config, machine: Machine) -> Iterator[str]:
    """Yield sizes that do not fit the machine, each with the nearest that do."""
    yield from _devices(config, machine)
    yield from _placement(config, machine)
    yield from _profiled_ranks(config, machine)


def problems_without_machine(config: Config) -> Iterator[str]:
    """Yield sizes that fit on no machine."""
    yield from _batches(config)
    yield from _micro_batches(config)
    yield from _critic(config)
    yield from _lengths(config)


def _batches(config: Config) -> Iterator[str]:
    batch, mini = config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size
    rollouts = batch * config.actor_rollout_ref.rollout.n
    if rollouts > _MOST_ROLLOUTS:
        yield (
            f"data.train_batch_size={batch}: with actor_rollout_ref.rollout.n={config.actor_rollout_ref.rollout.n} a step has "
            f"{rollouts} responses, which the controller holds at once; at most {_MOST_ROLLOUTS}"
        )
    if mini > batch:
        yield (
            f"actor_rollout_ref.actor.ppo_mini_batch_size={mini}: larger than the batch it is taken from, "
            f"data.train_batch_size={batch}; at most {batch}"
        )
    elif batch % mini:
        below = batch // mini * mini
        divisors = _nearest_divisors(batch, mini)
        yield (
            f"data.train_batch_size={batch}: must be a multiple of actor_rollout_ref.actor.ppo_mini_batch_size={mini}; "
            f"nearest: train_batch_size={below} or {below + mini}, or ppo_mini_batch_size={divisors}"
        )


def _critic(config: Config) -> Iterator[str]:
    critic, batch, mini = config.critic, config.data.train_batch_size, derived.critic_mini_batch_size(config)
    if critic.ppo_mini_batch_size is not None and (mini > batch or batch % mini):
        yield (
            f"critic.ppo_mini_batch_size={mini}: must divide data.train_batch_size={batch}; "
            f"nearest: {_nearest_divisors(batch, mini)}"
        )
    if critic.use_dynamic_bsz is False and derived.critic_rule(config).max_rollouts is None:
        yield "critic.use_dynamic_bsz=false: needs critic.ppo_micro_batch_size_per_gpu, the rollouts per forward pass"
    steps, warmup = config.trainer.total_training_steps, config.trainer.critic_warmup
    if steps is not None and warmup >= steps:
        yield (
            f"trainer.critic_warmup={warmup}: the actor would learn in none of trainer.total_training_steps={steps}; fewer steps"
        )


def _nearest_divisors(number: int, wanted: int) -> str:
    """Return the divisors of `number` just below and above `wanted`."""
    # A mistyped size may have nineteen digits: look near the wanted one only.
    above_it = range(wanted + 1, min(number, wanted + _NEAR) + 1)
    below = next((value for value in range(wanted - 1, max(0, wanted - _NEAR), -1) if number % value == 0), None)
    above = next((value for value in above_it if number % value == 0), None)
    return " or ".join(str(value) for value in (below, above) if value is not None) or str(number)


def _micro_batches(config: Config) -> Iterator[str]:
    actor = config.actor_rollout_ref.actor
    prefix = "actor_rollout_ref.actor."
    if actor.use_dynamic_bsz is False and actor.ppo_micro_batch_size_per_gpu is None:
        yield f"{prefix}use_dynamic_bsz=false: needs {prefix}ppo_micro_batch_size_per_gpu, the rollouts per forward pass"
    for role in ("ref", "rollout"):
        settings = getattr(config.actor_rollout_ref, role)
        prefix = f"actor_rollout_ref.{role}."
        rollouts = settings.log_prob_micro_batch_size_per_gpu
        dynamic = settings.log_prob_use_dynamic_bsz
        if dynamic is False and rollouts is None and actor.ppo_micro_batch_size_per_gpu is None:
            yield f"{prefix}log_prob_use_dynamic_bsz=false: needs {prefix}log_prob_micro_batch_size_per_gpu"


def _lengths(config: Config) -> Iterator[str]:
    sampled = config.data.max_prompt_length + config.data.max_response_length
    trained = derived.longest_sequence(config)
    rollout = config.actor_rollout_ref.rollout
    actor, ref, critic = config.actor_rollout_ref.actor, config.actor_rollout_ref.ref, config.critic
    by_tokens, together = derived.update_rule(config).max_tokens is not None, actor.ulysses_sequence_parallel_size
    budgets = {
        f"{_PARTS}.actor.ppo_max_token_len_per_gpu": (actor.ppo_max_token_len_per_gpu if by_tokens else None, together),
        f"{_PARTS}.ref.log_prob_max_token_len_per_gpu": (
            ref.log_prob_max_token_len_per_gpu,
            derived.reference_sequence_ranks(config),
        ),
        f"{_PARTS}.rollout.log_prob_max_token_len_per_gpu": (rollout.log_prob_max_token_len_per_gpu, together),
        f"{_PARTS}.rollout.max_model_len": (rollout.max_model_len, 1),
        "critic.ppo_max_token_len_per_gpu": (critic.ppo_max_token_len_per_gpu, critic.ulysses_sequence_parallel_size),
    }
    for key, (budget, ranks) in budgets.items():
        longest = trained if ".actor." in key else sampled
        of = "data.max_length" if longest != sampled else "data.max_prompt_length + data.max_response_length"
        if budget is not None and budget * ranks < longest:
            split = f" on {ranks} ranks together" if ranks > 1 else ""
            yield (
                f"{key}={budget}: shorter than one sequence{split}, which may have {of} = {longest} tokens; "
                f"at least {-(-longest // ranks)}"
            )
    buffer = config.reward.overlong_buffer.tokens
    if buffer is not None and buffer > config.data.max_response_length:
        yield (
            f"reward.overlong_buffer.len={buffer}: longer than data.max_response_length={config.data.max_response_length}; "
            f"at most {config.data.max_response_length}"
        )
    if rollout.max_num_seqs is not None and rollout.max_num_batched_tokens < rollout.max_num_seqs:
        yield (
            f"actor_rollout_ref.rollout.max_num_batched_tokens={rollout.max_num_batched_tokens}: less than one token for each of "
            f"actor_rollout_ref.rollout.max_num_seqs={rollout.max_num_seqs} responses; at least {rollout.max_num_seqs}"
        )


def _devices(config: Config, machine: Machine) -> Iterator[str]:
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    if rollout.fp32_lm_head and (rollout.dtype == "float32" or (rollout.dtype == "auto" and machine.device == "cpu")):
        yield (
            "actor_rollout_ref.rollout.fp32_lm_head=true: has no effect, everything in the engine is float32 with "
            f"actor_rollout_ref.rollout.dtype={rollout.dtype}{' on CPU' if rollout.dtype == 'auto' else ''}; leave it out, or set dtype=bfloat16"
        )
    if machine.device == "cpu":
        yield from _without_gpus(config)
        return
    if machine.cluster:
        if machine.num_gpus == 0 and trainer.n_gpus_per_node is None:
            yield "trainer.n_gpus_per_node is not set: this machine has no GPU to count, so say how many each node of the cluster has"
        return
    if machine.num_gpus == 0:
        yield "trainer.device=cuda: torch finds no GPU on this machine; trainer.device=auto runs on the CPU where there is none"
        return
    actors = machine.world_size(config)
    engines = 0 if derived.is_colocated(config) else derived.num_rollout_devices(config, machine)
    if actors + engines > machine.num_gpus:
        count = f"trainer.nnodes x n_gpus_per_node = {trainer.nnodes} x {derived.ranks_per_node(config, machine)}"
        if engines:
            count += (
                f", rollout.nnodes x n_gpus_per_node = {rollout.nnodes} x {derived.rollout_devices_per_node(config, machine)}"
            )
        yield (
            f"trainer.n_gpus_per_node={trainer.n_gpus_per_node or 'null'}: {actors + engines} GPUs are asked for ({count}), this "
            f"machine has {machine.num_gpus}; lower them, or name a cluster in ray_kwargs.ray_init.address"
        )


def _without_gpus(config: Config) -> Iterator[str]:
    parts = config.actor_rollout_ref
    offload = {
        "actor_rollout_ref.actor.fsdp_config.param_offload": parts.actor.fsdp_config.param_offload,
        "actor_rollout_ref.actor.fsdp_config.optimizer_offload": parts.actor.fsdp_config.optimizer_offload,
        "actor_rollout_ref.ref.fsdp_config.param_offload": parts.ref.fsdp_config.param_offload,
        "critic.fsdp.param_offload": config.critic.fsdp.param_offload,
        "critic.fsdp.optimizer_offload": config.critic.fsdp.optimizer_offload,
        "actor_rollout_ref.actor.fsdp_config.offload_policy": parts.actor.fsdp_config.offload_policy,
        "actor_rollout_ref.ref.fsdp_config.offload_policy": parts.ref.fsdp_config.offload_policy,
        "critic.fsdp.offload_policy": config.critic.fsdp.offload_policy,
        "actor_rollout_ref.model.enable_activation_offload": parts.model.enable_activation_offload,
        "critic.model.enable_activation_offload": config.critic.model.enable_activation_offload,
    }
    for key, wanted in offload.items():
        if wanted:
            what = "activations" if key.endswith("activation_offload") else "weights"
            yield f"{key}=true: moves {what} from a GPU to the host, and this run has no GPU; leave it out"
    if parts.model.flash_attention != "auto":
        kernel = parts.model.flash_attention
        yield f"actor_rollout_ref.model.flash_attention={kernel}: is a kernel of GPUs, and this run has none; leave it out"
    precision = parts.model.lm_head_precision
    if precision in ("tf32", "bfloat16"):
        yield f"actor_rollout_ref.model.lm_head_precision={precision}: is faster on GPUs only, and this run has none; auto or float32"
    backend = config.actor_rollout_ref.rollout.checkpoint_engine.backend
    if backend in ("ipc", "nccl"):
        yield f"{_BACKEND}={backend}: moves weights between GPUs, and this run has none; auto or object_store"


def _placement(config: Config, machine: Machine) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    colocated = derived.is_colocated(config)
    if machine.device == "cuda" and rollout.checkpoint_engine.backend == ("nccl" if colocated else "ipc"):
        where = (
            "share the actor's GPUs, which NCCL cannot connect"
            if colocated
            else "have GPUs of their own, which IPC cannot reach"
        )
        yield f"{_BACKEND}={rollout.checkpoint_engine.backend}: the engines {where}; auto or {'ipc' if colocated else 'nccl'}"
    per_node, parallel = derived.rollout_devices_per_node(config, machine), rollout.tensor_model_parallel_size
    nodes = config.trainer.nnodes if colocated else rollout.nnodes
    spans = derived.nodes_per_engine(config, machine)
    across = rollout.name == "vllm" and machine.device == "cuda" and parallel == spans * per_node and nodes % spans == 0
    if per_node % parallel and not across:
        of = "trainer" if colocated or rollout.n_gpus_per_node is None else "actor_rollout_ref.rollout"
        fits = ", ".join(str(size) for size in range(1, min(per_node, _NEAR) + 1) if per_node % size == 0)
        yield (
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={parallel}: must divide the devices of a node, "
            f"{of}.n_gpus_per_node = {per_node}, or on GPUs be all devices of several nodes, whose number divides that of the pool's "
            f"nodes, {nodes}; possible: {fits}{_whole_nodes(per_node, nodes) if machine.device == 'cuda' else ''}"
        )
    most = derived.num_rollout_devices(config, machine) // parallel
    if rollout.num_replicas is not None and rollout.num_replicas > most >= 1:
        yield (
            f"actor_rollout_ref.rollout.num_replicas={rollout.num_replicas}: with {parallel} "
            f"device{'s' if parallel > 1 else ''} for each there is room for {most}"
        )
    if rollout.quantization is not None and machine.device == "cpu":
        yield (
            f"actor_rollout_ref.rollout.quantization={rollout.quantization}: needs a GPU of compute capability 8.9 or newer, "
            "whose kernels multiply numbers of 8 bits; on CPUs leave it out"
        )
    ranks = machine.world_size(config)
    yield from _axes(config, ranks)
    ranks //= config.actor_rollout_ref.actor.ulysses_sequence_parallel_size
    mini = config.actor_rollout_ref.actor.ppo_mini_batch_size
    if mini * rollout.n < ranks:
        yield (
            f"actor_rollout_ref.actor.ppo_mini_batch_size={mini}: with rollout.n={rollout.n} it makes {mini * rollout.n} rollouts, "
            f"fewer than the {ranks} actor ranks that share them; at least {-(-ranks // rollout.n)}"
        )


def _whole_nodes(per_node: int, nodes: int) -> str:
    return "".join(f", {per_node * count}" for count in range(2, min(nodes, _NEAR) + 1) if nodes % count == 0)


def _profiled_ranks(config: Config, machine: Machine) -> Iterator[str]:
    if machine.device == "cpu" and config.global_profiler.tool == "torch_memory":
        yield "global_profiler.tool=torch_memory: is for GPUs, whose allocator keeps the history; on CPUs take torch"
    ranks = machine.world_size(config)
    for key, profiler in profilers_of(config).items():
        beyond = [rank for rank in profiler.ranks if rank >= ranks]
        if beyond:
            yield f"{key}.ranks={profiler.ranks}: there are {ranks} ranks, from 0 to {ranks - 1}"


def _axes(config: Config, ranks: int) -> Iterator[str]:
    """Yield sizes of groups of ranks that do not divide the ranks, and offloads of which one takes the other's place."""
    parts, critic = config.actor_rollout_ref, config.critic
    together = {
        "actor_rollout_ref.actor": parts.actor.ulysses_sequence_parallel_size,
        "actor_rollout_ref.ref": parts.ref.ulysses_sequence_parallel_size,
        "critic": critic.ulysses_sequence_parallel_size,
    }
    sizes = {f"{role}.ulysses_sequence_parallel_size": size or 1 for role, size in together.items()}
    fsdp: dict[str, FsdpConfig | RefFsdpConfig] = {
        "actor_rollout_ref.actor.fsdp_config": parts.actor.fsdp_config,
        "actor_rollout_ref.ref.fsdp_config": parts.ref.fsdp_config,
        "critic.fsdp": critic.fsdp,
    }
    for key, own in fsdp.items():
        if own.fsdp_size == 0:
            yield f"{key}.fsdp_size=0: a group has at least one rank; -1 is all of them"
        # As in verl, a group that is larger than the set is the set.
        elif 0 < own.fsdp_size < ranks:
            sizes[f"{key}.fsdp_size"] = own.fsdp_size
        others = [name for name in ("param_offload", "optimizer_offload") if getattr(own, name, False)]
        if own.offload_policy and others:
            yield (
                f"{key}.offload_policy=true: keeps everything in host memory all the time, so that "
                f"{' and '.join(others)}=true would move nothing; leave one of them out"
            )
    for key, size in sizes.items():
        if ranks % size:
            fits = ", ".join(str(number) for number in range(1, min(ranks, _NEAR) + 1) if ranks % number == 0)
            yield f"{key}={size}: must divide the {ranks} ranks, trainer.nnodes x n_gpus_per_node; possible: {fits}"
    if derived.is_iterated(config) and parts.ref.fsdp_config.fsdp_size != parts.actor.fsdp_config.fsdp_size:
        yield (
            f"actor_rollout_ref.ref.fsdp_config.fsdp_size={parts.ref.fsdp_config.fsdp_size}: with trainer.schedule=iterate the "
            "reference takes over the actor's shards, and needs the same groups; set actor_rollout_ref.actor.fsdp_config.fsdp_size="
            f"{parts.actor.fsdp_config.fsdp_size} for both"
        )
