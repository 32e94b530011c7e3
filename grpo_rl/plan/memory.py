"""The memory of a run: of each role at the peak of its passes, of all that share a GPU by phase, and whether
it fits.

All follows from the sizes of model and largest micro-batch. The bytes of tensors by region were found by
tracking the real model code on tensors without storage (`scripts/track_memory.py`), and
tests/unit/test_plan_tracked_memory.py holds them to it. What lies outside of tensors is assumed, as marked.
One H100 has confirmed an actor's sum (docs/gpus.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import get_args

from grpo_rl.config.derived import COPIED_BYTES, Machine, MicroBatchRule, lm_head_chunk
from grpo_rl.config.schema.algorithm import TeacherConfig
from grpo_rl.config.schema.model import FsdpConfig, ModelConfig, RefFsdpConfig
from grpo_rl.config.schema.tree import Config
from grpo_rl.frozen import frozen
from grpo_rl.plan.decisions import Plan, RoleMemory, RoleName
from grpo_rl.plan.model_folder import ModelSize, model_size, policy_settings
from grpo_rl.rollout.engine import EngineSpec

GIB = 2**30
GRADIENT = 4  # bytes of a float32 gradient
CONTEXT = int(0.6 * GIB)  # assumed: CUDA and its libraries in a process
NCCL_BUFFERS = int(0.4 * GIB)  # assumed: of a process in a group of several ranks
GRAPHS = int(0.8 * GIB)  # assumed: CUDA graphs and their pool, which a sleeping engine keeps
SLACK = 1.1  # assumed: torch's allocator, as a factor of tensors
HOST_OF_RANK = int(3 * GIB)  # assumed: host memory of a process with torch and CUDA
HOST_OF_RUN = int(8 * GIB)  # assumed: controller, Ray and its store, reward processes
ENGINE_WORK = int(0.5 * GIB)  # assumed: an engine's tensors beside logits and widest tensors of a layer
LOGPROBS_ALONE = 2  # float32 tensors of [chunk, vocabulary] at once for log-probs alone
TIGHT = 0.9  # share of memory from which on a phase is called tight
BESIDE_WORKERS, WORKER, VLLM_WORKER = 830 * 2**20, 180 * 2**20, 550 * 2**20
"""Bytes of processes on a CPU beside tensors, anonymous and shared PSS in a run of arithmetic/grpo:
controller (383 MiB), Ray (304) and what workers are copies of (139); a worker; one with vLLM."""
BETWEEN_BLOCKS = 1.25
"""CPU: process memory over tensors: glibc keeps gaps between live blocks. Measured with 135 M parameters."""
_WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}


# ---- one rank: tensors in each region of a pass ---------------------------------------------------------------------


@frozen
class Load:
    ranks: int  # that hold one copy of the model together
    tokens: int  # through the body
    trained: int  # tokens through the LM head
    width: int  # bytes of a number that the layers compute with
    trains: bool
    checkpointing: bool = True
    chunk: int = 2048  # trained tokens whose logits exist at once
    logits: int = LOGPROBS_ALONE  # float32 tensors of [chunk, vocabulary] at once in the head
    has_head: bool = True  # False for a critic or a reward model
    moments: float = 8  # bytes of the optimizer's moments per parameter on the GPU
    in_host_memory: bool = False  # weights, gradients and moments are never all on the GPU
    weights_away: bool = False
    moments_away: bool = False  # with weights_away: in host memory between phases
    offloads_inputs: bool = False  # layers' inputs wait for the backward pass in host memory
    shared_keys: int = 0  # copied so that responses share a prompt's
    adapters: int = 0  # parameters of LoRA adapters, trained alone; 0 without
    half_base: bool = False  # blocks under adapters rest in bfloat16, else float32
    teacher_params: int = 0  # of further frozen models on the same ranks
    ref_head: bool = False  # a reference's whole LM head lies there, for an exact KL


def resident(size: ModelSize, load: Load, *, weights: bool = True, gradients: bool = True, moments: bool = True) -> int:
    """Bytes of a rank's shards on its GPU: float32 weights and, if it trains, gradients and moments."""
    trained = load.adapters or size.num_params
    # Embedding and head are always float32.
    blocks = size.num_params - size.vocab * size.hidden * (1 if size.tied else 2)
    held = 4 * (size.num_params + load.adapters + load.teacher_params) - 2 * blocks * load.half_base
    state = held * weights + trained * (GRADIENT * (load.trains and gradients) + load.moments * moments)
    return (0 if load.in_host_memory else int(state) // load.ranks) + load.ref_head * 4 * size.vocab * size.hidden


def at_rest(size: ModelSize, load: Load) -> int:
    return resident(size, load, weights=not load.weights_away, gradients=False, moments=not load.moments_away)


def regions(size: ModelSize, load: Load) -> dict[str, int]:
    """Return the peak bytes of each region of the pass, in their order.

    FSDP gathers a unit into a flat buffer and copies it out: both live until the next gather. A single rank
    keeps all layers as computed with, except frozen ones that rest so (`fsdp.shard`). The root unit is
    embedding, norm and head in float32.
    """
    if not load.has_head:
        size = replace(size, num_params=size.num_params - (0 if size.tied else size.vocab * size.hidden), tied=True)
    single_rank = load.ranks == 1
    keeps = single_rank and not load.half_base
    state = resident(size, load)
    root, layer = 4 * size.root_params, load.width * size.layer_params
    hidden = load.tokens * size.hidden
    stream, exact = hidden * load.width, hidden * 4
    unsharded = root + (size.layers * layer if keeps else 2 * layer)
    waiting = 2 if load.offloads_inputs else size.layers
    saved = waiting * (stream if load.checkpointing else _kept(size, load)) if load.trains else 2 * stream
    one_layer = exact + _forward(size, load)
    first = root + layer + one_layer if single_rank else 2 * root + 2 * layer + exact + stream
    peaks = {
        "gather": state + max(first, root + (1 if single_rank else 2) * layer + one_layer),
        "layers, forward": state + unsharded + saved + one_layer,
        "head": state + unsharded - (0 if keeps else layer) + (saved + 2 * exact if load.trains else 0) + _head(size, load),
    }
    if load.trains:
        full = not load.adapters
        head = 4 * size.vocab * size.hidden * (load.has_head and full)
        reduced = 4 * (size.layer_params if full else load.adapters // size.layers)
        peaks["layers, backward"] = state + unsharded + head + reduced + saved + _backward(size, load)
        peaks["root, backward"] = state + ((3 * root if single_rank else 2 * root + reduced) if full else root) + exact
    return peaks


def peak(size: ModelSize, load: Load) -> int:
    return max(regions(size, load).values())


def _head(size: ModelSize, load: Load) -> int:
    """Return the bytes of the LM head's hidden states in float32, logits, and weight gradients. Autograd adds
    a chunk's weight gradient to the earlier ones in a third tensor; log-probs alone are added in place."""
    states = (2 if load.trains else 1) * load.trained * size.hidden * 4
    if not load.has_head:
        return states
    logits = load.logits * min(load.chunk, load.trained) * size.vocab * 4
    weight = 4 * size.vocab * size.hidden
    if not load.trains or load.adapters:
        return states + logits
    if load.trained <= load.chunk:
        return states + max(logits, weight)
    return states + (max(3 * weight, logits + weight) if load.logits > LOGPROBS_ALONE else logits + weight)


def _mlp(size: ModelSize, dense: int, hidden: int, inner: int) -> int:
    """Return the numbers of `dense` tensors of a token's MLP, or of experts' inputs and inner states."""
    chosen = hidden * size.hidden + inner * size.expert_intermediate
    return size.experts_per_token * chosen if size.experts else dense * size.intermediate


def _forward(size: ModelSize, load: Load) -> int:
    """Bytes of one layer's tensors in a forward pass at their largest, in the MLP."""
    return load.tokens * load.width * (_mlp(size, 3, 3, 2) + 2 * size.hidden)


def _backward(size: ModelSize, load: Load) -> int:
    """Bytes of one layer's tensors in its backward pass, most of them the MLP's."""
    queries, keys = size.heads * size.head_dim, size.kv_heads * size.head_dim
    mlp = _mlp(size, 6, 5, 5)
    weights = size.experts * size.hidden * size.expert_intermediate or size.hidden * size.intermediate
    recomputed = load.tokens * (load.width * (mlp + 3 * size.hidden + 2 * queries + 2 * keys) + 3 * 4 * size.hidden)
    if not load.checkpointing:
        recomputed = load.tokens * load.width * 2 * (mlp // 6)
    return recomputed + load.width * weights * (not load.adapters) + load.shared_keys * keys * (2 * load.width + 4)


def _kept(size: ModelSize, load: Load) -> int:
    """Bytes that one layer keeps for its backward pass if it is not recomputed."""
    queries, keys = size.heads * size.head_dim, size.kv_heads * size.head_dim
    numbers = _mlp(size, 4, 3, 4) + 4 * size.hidden + 2 * queries + 2 * keys
    return load.tokens * (load.width * numbers + 2 * 4 * size.hidden)


# ---- each role: its largest micro-batch -------------------------------------------------------------------------------


def memory_by_role(plan: Plan) -> tuple[RoleMemory, ...]:
    """Return what tensors of each role need on one device, at the peak of its passes; empty if sizes are unknown."""
    if plan.model is None:
        return ()
    roles = []
    for name, role_size, load in _loads(plan):
        what = (
            "weights, and of adapters gradients and AdamW" if load.adapters else "weights" + ", gradients, AdamW" * load.trains
        )
        state, largest = resident(role_size, replace(load, in_host_memory=False)), peak(role_size, load)
        parts = f"{what} {gib(state)} + activations {gib(largest - resident(role_size, load))}"
        roles.append(RoleMemory(name, largest, at_rest(role_size, load), parts))
    if plan.engine is not None:
        roles.append(_engine(plan.engine, plan.machine, plan.model))
    return tuple(roles)


def _loads(plan: Plan) -> Iterator[tuple[RoleName, ModelSize, Load]]:
    for name in get_args(RoleName):
        if name != "rollout" and (role_size := size_of_role(plan, name)) is not None:
            yield name, role_size, load_of(plan, role_size, name)


def host_bytes(plan: Plan) -> int:
    """Return what all processes need if this machine's CPUs compute; else 0."""
    if plan.machine.device != "cpu" or plan.machine.cluster or plan.machine.name:
        return 0
    engine = VLLM_WORKER if plan.engine is not None and plan.engine.name == "vllm" else WORKER
    tensors = {need.role: need.num_bytes for need in plan.memory}
    trainer, total, saved = plan.config.trainer, BESIDE_WORKERS, checkpoint_bytes(plan)
    if saved <= COPIED_BYTES * plan.world_size and (trainer.save_freq > 0 or trainer.recover != "off"):
        total += saved
    for role in plan.roles:
        process = engine if role.name == "rollout" else WORKER
        total += role.num_workers * (int(BETWEEN_BLOCKS * tensors.get(role.name, 0)) + process)
    return total


def size_of_role(plan: Plan, name: RoleName) -> ModelSize | None:
    """Return a role's model sizes, by default the policy's; None if it does not start, or if they are unknown."""
    if plan.role(name) is None:
        return None
    if name == "reward_model":
        return model_size(plan.config.reward.reward_model.model_path or "")
    if name == "teacher":
        return max(_teacher_sizes(plan), key=lambda teacher_size: teacher_size.num_params, default=None)
    return (name == "critic" and plan.critic_model and model_size(plan.critic_model)) or plan.model


def _teacher_sizes(plan: Plan) -> list[ModelSize]:
    sizes = (model_size(teacher.model_path) for _, teacher in plan.teachers if teacher.model_path is not None)
    return [size for size in sizes if size is not None]


def load_of(plan: Plan, size: ModelSize, name: RoleName) -> Load:
    config, objective, passes = plan.config, plan.objective, plan.passes
    critic, scorer = config.critic, config.reward.reward_model
    ranks = max(1, plan.num_workers(name))
    scores = name == "reward_model"
    learns = plan.trains_reward_model if scores else name in ("actor", "critic")
    teacher = next((entry for _, entry in plan.teachers if entry.model_path), TeacherConfig())
    sharded: dict[str, RefFsdpConfig] = {
        "actor": config.actor.fsdp_config,
        "reference": config.ref.fsdp_config,
        "teacher": RefFsdpConfig(dtype=teacher.dtype, param_offload=config.distillation.param_offload),
        "critic": critic.fsdp,
        "reward_model": FsdpConfig(
            dtype=scorer.dtype, param_offload=scorer.param_offload, optimizer_offload=scorer.train.optimizer_offload
        ),
    }
    fsdp, model = sharded[name], critic.model if name == "critic" else config.model
    rule = {"reference": passes.reference, "critic": passes.critic}.get(name, passes.update)
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    tokens, group_size = _tokens(config, rule), config.rollout.n if rule.shares_prompts else 1
    groups = tokens / (prompt + group_size * response)
    if scores:
        tokens, groups, group_size = scorer.max_token_len_per_gpu, 0, 1
    adapters = adapter_params(config.model, size) if name == "actor" else 0
    # AdamW has two moments per parameter, Muon one for the layers' matrices.
    muon = not scores and (critic if name == "critic" else config.actor).optim.optimizer == "muon"
    # Tracked (tests/unit/test_plan_tracked_memory.py): logits and log-probs; one more with a gradient by
    # autograd, two more each for the entropy and the exact KL.
    by_autograd = learns and bool(objective.needs_entropy or objective.needs_full_kl or plan.teachers)
    logits = 2 + by_autograd * (1 + 2 * objective.needs_entropy + 2 * objective.needs_full_kl)
    return Load(
        ranks=fsdp.fsdp_size if 0 < fsdp.fsdp_size < ranks else ranks,
        tokens=tokens,
        trained=min(tokens, int(groups * group_size * response)),
        width=_width(fsdp.dtype, plan.machine),
        trains=learns,
        checkpointing=(scorer.train if scores else model).enable_gradient_checkpointing is not False,
        chunk=lm_head_chunk(config.model.lm_head_chunk_tokens, size.vocab),
        logits=logits,
        has_head=name != "critic" and not scores,
        moments=(4 + 4 * size.root_params / size.num_params if muon else 8) * learns,
        in_host_memory=fsdp.offload_policy,
        weights_away=fsdp.param_offload,
        moments_away=isinstance(fsdp, FsdpConfig) and fsdp.optimizer_offload,
        offloads_inputs=model.enable_activation_offload and not scores,
        shared_keys=int(groups * group_size * (prompt + response)) if group_size > 1 else 0,
        teacher_params=sum(model.num_params for model in _teacher_sizes(plan)) - size.num_params if name == "teacher" else 0,
        ref_head=name == "actor" and objective.needs_full_kl,
        adapters=adapters,
        half_base=bool(adapters) and _rests_in_half(plan),
    )


def adapter_params(model: ModelConfig, size: ModelSize) -> int:
    """Return the parameters of LoRA adapters: rank x (in + out) of each layer."""
    queries, keys = size.heads * size.head_dim, size.kv_heads * size.head_dim
    # Each projection is between the hidden state and numbers of this width.
    widths = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "gate_proj": size.intermediate, "up_proj": size.intermediate}
    if size.architecture == "phi3":  # one projection for queries, keys, values, and one for both inner halves
        widths = {"qkv_proj": queries + 2 * keys, "gate_up_proj": 2 * size.intermediate}
    widths |= {"o_proj": queries, "down_proj": size.intermediate}
    targets = {name.rpartition(".")[2] for name in model.target_modules}
    left_out = {name.rpartition(".")[2] for name in model.exclude_modules}
    chosen = [name for name in widths if ("all-linear" in targets or name in targets) and name not in left_out]
    return model.lora_rank * size.layers * sum(size.hidden + widths[name] for name in chosen)


def _rests_in_half(plan: Plan) -> bool:
    """Return whether blocks under adapters are stored, and compute, in bfloat16."""
    settings = policy_settings(plan.config) or {}
    stored = str(settings.get("dtype") or settings.get("torch_dtype")).removeprefix("torch.")
    width = _width(plan.config.actor.fsdp_config.dtype, plan.machine)
    return width == 2 and stored == "bfloat16"


def _engine(engine: EngineSpec, machine: Machine, size: ModelSize) -> RoleMemory:
    width = _WIDTHS[engine.dtype]
    weights, per_token = size.num_params * width // engine.tensor_parallel_size, size.kv_bytes_per_token(width)
    if machine.device == "cuda":
        parts = f"weights, in {engine.gpu_memory_utilization:.0%} of the GPU; cache {per_token / 1024:.3g} KiB per token"
        return RoleMemory("rollout", weights, CONTEXT + GRAPHS, parts)
    cache = int(min(engine.kv_cache_gib * GIB, engine.max_num_seqs * engine.max_model_len * per_token))
    working = _engine_tensors(engine, size, width)
    parts = f"weights {gib(weights)} + cache {gib(cache)} + tensors of a pass {gib(working)}"
    return RoleMemory("rollout", weights + cache + working, weights + cache, parts)


def _engine_tensors(engine: EngineSpec, size: ModelSize, width: int) -> int:
    """Bytes of a layer's widest tensors, and of float32 logits and log-probs (vLLM 0.32, its sampler)."""
    wide = max(
        2 * size.intermediate // engine.tensor_parallel_size,
        size.experts and 3 * size.expert_intermediate * size.experts_per_token,
    )
    return engine.max_num_batched_tokens * width * (wide + 2 * size.hidden) + 2 * 4 * engine.max_num_seqs * size.vocab


def _tokens(config: Config, rule: MicroBatchRule) -> int:
    """The most tokens of a micro-batch per rank, at most those of a mini-batch."""
    longest, n = config.longest_sequence, config.rollout.n
    prompts = config.actor.ppo_mini_batch_size
    of_group = n * longest
    if rule.shares_prompts and not config.is_offline:
        of_group = config.data.max_prompt_length + n * config.data.max_response_length
    limit = rule.max_tokens if rule.max_tokens is not None else (rule.max_rollouts or 1) * longest
    return -(-min(limit, prompts * of_group) // rule.sequence_ranks)


def _width(dtype: str, machine: Machine) -> int:
    return _WIDTHS.get(dtype, 2 if machine.device == "cuda" else 4)


def gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:.0f} MiB"


# ---- one GPU: its processes phase by phase, and whether they fit ---------------------------------------------------------


@frozen
class Need:
    """What all processes take in a phase, and the share of a GPU's, or a machine's, memory for it."""

    what: str
    needed: int
    memory: int  # of the whole; 0 if unknown
    share: float = 1.0

    @property
    def there(self) -> int:
        return int(self.memory * self.share)

    @property
    def used(self) -> float:
        return self.needed / max(self.there, 1)

    @property
    def least(self) -> int:
        return int(self.needed / self.share)


_PHASES = {"actor": "update", "critic": "critic's update", "reward_model": "reward model"}
"""The largest phases of roles whose names differ."""


def gpu_phases(plan: Plan) -> list[Need]:
    """Return the phases of a step on a GPU of the actor's pool."""
    if (size := plan.model) is None or plan.machine.device != "cuda" or plan.role("actor") is None:
        return []
    gpu, engine, roles = plan.machine.gpu_memory, plan.engine, memory_by_role(plan)
    held = resting_on_gpu(plan, roles)
    resting, asleep, free, phases = sum(held.values()), 0, 1.0, []
    if engine is not None and plan.colocated:
        engines = engine.engines_per_device
        weights = engines * size.num_params * plan.engine_width // engine.tensor_parallel_size
        asleep = engines * (CONTEXT + GRAPHS) if engine.sleep_mode else 0
        if engine.kv_cache_memory_bytes is None:
            free_share = 1 - engines * engine.gpu_memory_utilization
            free = 1.0 if engine.sleep_mode else free_share
            phases.append(Need("sampling", resting, gpu, free_share))
        else:
            # With a cache of fixed size nothing of the engine is a share of the GPU.
            awake = weights + engines * (engine.kv_cache_memory_bytes + CONTEXT + GRAPHS)
            asleep = asleep or awake
            phases.append(Need("sampling", resting + awake, gpu))
        bucket = 2 * engine.bucket_bytes + size.vocab * size.hidden * (4 + plan.engine_width)
        phases.append(Need("weight transfer", resting + asleep + weights * engine.sleep_mode + bucket, gpu, free))
    for role in roles:
        if role.role in held:
            working = resting + int(role.num_bytes * SLACK) - int(role.at_rest * SLACK)
            phases.append(Need(_PHASES.get(role.role, role.role), working + asleep, gpu, free))
    return phases


def resting_on_gpu(plan: Plan, roles: Sequence[RoleMemory]) -> dict[RoleName, int]:
    """Return what the roles on a GPU of the actor's pool keep there between phases."""
    resting: dict[RoleName, int] = {}
    for need in roles:
        role = plan.role(need.role)
        if role is not None and role.pool == "actor" and need.role != "rollout":
            resting[need.role] = int(need.at_rest * SLACK) + CONTEXT + NCCL_BUFFERS * (role.num_workers > 1)
    return resting


@frozen
class Fit:
    needs: tuple[Need, ...]
    cache_tokens: int  # whose keys and values a replica holds
    cache_sequences: float

    @property
    def fits(self) -> bool:
        return all(need.needed <= need.there for need in self.needs)

    @property
    def tightest(self) -> Need:
        return max(self.needs, key=lambda need: need.used)


def fit_of(plan: Plan) -> Fit | None:
    """Return how a run fits; None without GPUs, or if sizes or their memory are unknown."""
    total = plan.machine.gpu_memory
    if plan.model is None or plan.machine.device != "cuda" or not total or plan.role("actor") is None:
        return None
    needs, tokens, longest = gpu_phases(plan), 0, 1
    if plan.engine is not None:
        longest = plan.engine.max_model_len
        engine_share = Need("engine, in its share", engine_need(plan), total, plan.engine.gpu_memory_utilization)
        cache = plan.engine.kv_cache_memory_bytes or max(0, engine_share.there - engine_share.needed)
        tokens = cache // token_bytes(plan)
        needs.append(replace(engine_share, needed=engine_share.needed + longest * token_bytes(plan)))
    if plan.machine.host_memory:
        needs.append(Need("host memory of a machine", host_need(plan), plan.machine.host_memory))
    return Fit(tuple(needs), tokens, tokens / longest)


def token_bytes(plan: Plan) -> int:
    """Bytes of a token's keys and values on an engine's GPU; too few heads for all are copied."""
    size = plan.model
    assert plan.engine is not None and size is not None
    parallel = min(plan.engine.tensor_parallel_size, size.kv_heads)
    return -(-size.kv_bytes_per_token(plan.engine_width) // parallel)


def engine_need(plan: Plan) -> int:
    """Bytes on each of an engine's GPUs besides keys and values: weights, graphs, tensors of a pass."""
    engine, size = plan.engine, plan.model
    assert engine is not None and size is not None
    weights = size.num_params * plan.engine_width // engine.tensor_parallel_size
    working = _engine_tensors(engine, size, plan.engine_width)
    return weights + working + ENGINE_WORK + (0 if engine.enforce_eager else GRAPHS)


def checkpoint_bytes(plan: Plan) -> int:
    """Bytes of a checkpoint: a float32 weight and two moments per trained parameter."""
    if plan.model is None or not plan.trains:
        return 0
    actor, critic = size_of_role(plan, "actor"), size_of_role(plan, "critic")
    scorer = size_of_role(plan, "reward_model") if plan.trains_reward_model else None
    trained = sum(model.num_params for model in (critic, scorer) if model is not None)
    if actor is not None:
        trained += adapter_params(plan.config.model, actor) or actor.num_params
    return 12 * trained


def host_need(plan: Plan) -> int:
    """Host bytes of one machine: processes, what is kept off GPUs, and a checkpoint being copied."""
    nodes = max(1, plan.config.trainer.nnodes)
    config, total = plan.config, HOST_OF_RUN
    for name, model, load in _loads(plan):
        param_bytes = 4 * load.weights_away + 8 * (load.moments_away and load.trains)
        if load.in_host_memory:
            param_bytes = 16 if load.trains else 4
        if load.trains and config.trainer.save_freq > 0:
            param_bytes += 12
        inputs = model.layers * load.tokens * model.hidden * load.width if load.offloads_inputs else 0
        total += -(-plan.num_workers(name) // nodes) * (HOST_OF_RANK + model.num_params * param_bytes // load.ranks + inputs)
    if plan.engine is not None:
        total += HOST_OF_RANK * -(-plan.num_replicas * plan.engine.tensor_parallel_size // nodes)
    return total


def table(plan: Plan, fit: Fit) -> list[str]:
    lines = [f"{'on one GPU of ' + gib(plan.machine.gpu_memory):<32}{'at rest':>12}"]
    for role, held in resting_on_gpu(plan, plan.memory).items():
        lines.append(f"{role.replace('_', ' '):<32}{gib(held):>12}")
    if (engine := plan.engine) is not None:
        share = int(plan.machine.gpu_memory * engine.gpu_memory_utilization)
        lines.append(f"{'rollout':<32}{gib(CONTEXT + GRAPHS if plan.colocated and engine.sleep_mode else share):>12}")
    lines.append(f"{'':<32}{'needs':>12}{'there':>12}{'used':>7}")
    for need in fit.needs:
        mark = "  does not fit" if need.needed > need.there else "  tight" if need.used > TIGHT else ""
        lines.append(f"{need.what:<32}{gib(need.needed):>12}{gib(need.there):>12}{need.used:>7.0%}{mark}")
    return lines
