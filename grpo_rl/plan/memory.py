"""Estimates of the memory that each role will need, from the model's sizes; nothing is loaded."""

from __future__ import annotations

import dataclasses

from grpo_rl.config.derived import Machine, MicroBatchRule, longest_sequence
from grpo_rl.config.schema.model import FsdpConfig, ModelConfig, RefFsdpConfig
from grpo_rl.config.schema.tree import Config
from grpo_rl.plan.decisions import Plan, RoleMemory, RoleName
from grpo_rl.plan.model_folder import ModelSize, model_size, policy_settings
from grpo_rl.plan.rank_memory import Load, frozen_bytes, peak, resident
from grpo_rl.rollout.engine import EngineSpec

GIB = 2**30
BESIDE_WORKERS, WORKER, VLLM_WORKER = 830 * 2**20, 180 * 2**20, 550 * 2**20
"""Bytes that processes of a run on a CPU have beside their tensors, by the anonymous and shared part of their PSS in a run of
arithmetic/grpo: controller (383 MiB), Ray's own (304) and what workers are copies of (139) together; a worker; one with vLLM."""
_WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}


def memory_by_role(plan: Plan, size: ModelSize) -> tuple[RoleMemory, ...]:
    """Return what each role that starts needs on one device: of tensors, at the peak of its passes."""
    names: tuple[RoleName, ...] = ("actor", "reference", "critic", "reward_model")
    roles = [_need(plan, name, own) for name in names if (own := size_of_role(plan, size, name)) is not None]
    if plan.engine is not None:
        roles.append(_engine(plan.engine, plan.machine, size))
    return tuple(roles)


def host_bytes(plan: Plan) -> int:
    """Return what all processes of a run need together where this machine's processors compute; 0 for any other."""
    if plan.machine.device != "cpu" or plan.machine.cluster or plan.machine.name:
        return 0
    engine = VLLM_WORKER if plan.engine is not None and plan.engine.name == "vllm" else WORKER
    tensors = {need.role.replace(" ", "_"): need.num_bytes for need in plan.memory}
    return BESIDE_WORKERS + sum(
        role.num_workers * (tensors.get(role.name, 0) + (engine if role.name == "rollout" else WORKER)) for role in plan.roles
    )


def size_of_role(plan: Plan, size: ModelSize, name: RoleName) -> ModelSize | None:
    """Return the sizes of a role's model, the policy's where it has none of its own; None where it does not start or has none."""
    if plan.role(name) is None:
        return None
    if name == "reward_model":
        return model_size(plan.config.reward.reward_model.model_path or "")
    return (plan.critic_model and model_size(plan.critic_model)) or size if name == "critic" else size


def trains(plan: Plan, name: RoleName) -> bool:
    """Return whether a role takes optimizer steps."""
    return name in ("actor", "critic") or (plan.trains_reward_model and name == "reward_model")


def _need(plan: Plan, name: RoleName, size: ModelSize) -> RoleMemory:
    """Return the need of one role that runs model passes, by the regions of its largest pass."""
    load = load_of(plan, size, name)
    shards = dataclasses.replace(load, in_host_memory=False, ref_head=False)
    state, passing = resident(size, shards), peak(size, load) - resident(size, load)
    where = " in host memory" if load.in_host_memory else ""
    scores = name == "reward_model" and plan.config.reward.reward_model.param_offload and not trains(plan, name)
    where = " while it scores" if scores else where
    what = "weights, gradients, AdamW" if load.trains else "weights"
    if load.adapters:
        base = frozen_bytes(size, load) // load.ranks
        what, state = f"base weights {gib(base)} + adapters with gradients and AdamW", state - base
    parts = f"{what} {gib(state)}{where} + activations {gib(passing)}"
    return RoleMemory(name.replace("_", " "), peak(size, load), parts)


def load_of(plan: Plan, size: ModelSize, name: RoleName) -> Load:
    """Return the largest micro-batch of one rank of a role, and what lies on its device beside it.

    Of a micro-batch of the longest rollouts the responses' part runs through the head, and each response to a shared prompt has a
    copy of its keys.
    """
    config, objective = plan.config, plan.objective
    parts, own, critic = config.actor_rollout_ref, config.reward.reward_model, config.critic
    role = plan.role(name)
    ranks = 1 if role is None else role.num_workers
    learns = trains(plan, name)
    if name == "reward_model":
        width, train = _width(own.dtype, plan.machine), own.train
        tokens = own.max_token_len_per_gpu
        return Load(
            ranks,
            tokens,
            0,
            width,
            learns,
            checkpointing=train.enable_gradient_checkpointing,
            has_head=False,
            moments=8 * learns,
        )
    sharded: dict[str, FsdpConfig | RefFsdpConfig] = {
        "actor": parts.actor.fsdp_config,
        "reference": parts.ref.fsdp_config,
        "critic": critic.fsdp,
    }
    fsdp = sharded[name]
    rule = {"actor": plan.passes.update, "reference": plan.passes.reference, "critic": plan.passes.critic}[name]
    model = critic.model if name == "critic" else parts.model
    adapters = adapter_params(parts.model, size) if name == "actor" else 0
    tokens = _tokens(config, rule)
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    together = parts.rollout.n if rule.shares_prompts else 1
    groups = tokens / (prompt + together * response)
    # Of [chunk, vocabulary], counted by running the head (tests/unit/test_plan_gpu_memory.py): logits and log-probs; with a
    # gradient one more; two more for the entropy, and for the exact KL.
    logits = 2 if not learns else 3 + 2 * objective.needs_entropy + 2 * objective.needs_full_kl
    return Load(
        ranks=sharded_over(fsdp, ranks),
        tokens=tokens,
        trained=min(tokens, int(groups * together * response)),
        width=_width(fsdp.dtype, plan.machine),
        trains=learns,
        checkpointing=model.enable_gradient_checkpointing,
        chunk=parts.model.lm_head_chunk_tokens,
        logits=logits,
        has_head=name != "critic",
        moments=8 * learns,
        in_host_memory=fsdp.offload_policy,
        offloads_inputs=model.enable_activation_offload,
        shared_keys=int(groups * together * (prompt + response)) if together > 1 else 0,
        ref_head=name == "actor" and objective.needs_full_kl,
        adapters=adapters,
        half_base=bool(adapters) and rests_in_half(plan),
    )


_FUSED = ("phi3",)
"""Families with one projection for queries, keys and values, and one for both inner halves of the MLP."""


def adapter_params(model: ModelConfig, size: ModelSize) -> int:
    """Return the number of parameters of the LoRA adapters: rank x (in + out) of each layer; 0 without adapters.

    Of the usual layers of a decoder, by the last words of their names; what a model calls otherwise is not counted.
    """
    heads, keys = size.heads * size.head_dim, size.kv_heads * size.head_dim
    shapes = {
        "q_proj": (size.hidden, heads), "k_proj": (size.hidden, keys), "v_proj": (size.hidden, keys),
        "o_proj": (heads, size.hidden), "gate_proj": (size.hidden, size.intermediate),
        "up_proj": (size.hidden, size.intermediate), "down_proj": (size.intermediate, size.hidden),
    }  # fmt: skip
    if size.architecture in _FUSED:
        fused = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
        for name, parts in fused.items():
            shapes[name] = (size.hidden, sum(shapes.pop(part)[1] for part in parts))
    wanted = {name.rpartition(".")[2] for name in model.target_modules}
    left_out = {name.rpartition(".")[2] for name in model.exclude_modules}
    chosen = [shape for name, shape in shapes.items() if ("all-linear" in wanted or name in wanted) and name not in left_out]
    return model.lora_rank * size.layers * sum(map(sum, chosen))


def rests_in_half(plan: Plan) -> bool:
    """Return whether the blocks under adapters stay in bfloat16: where files have them so, and they compute in it."""
    settings = policy_settings(plan.config) or {}
    stored = str(settings.get("dtype") or settings.get("torch_dtype")).removeprefix("torch.")
    width = _width(plan.config.actor_rollout_ref.actor.fsdp_config.dtype, plan.machine)
    return width == 2 and stored == "bfloat16"


def sharded_over(fsdp: FsdpConfig | RefFsdpConfig, ranks: int) -> int:
    """Return how many of a role's ranks hold one copy of its model together."""
    return fsdp.fsdp_size if 0 < fsdp.fsdp_size < ranks else ranks


def _engine(engine: EngineSpec, machine: Machine, size: ModelSize) -> RoleMemory:
    width = _WIDTHS[engine.dtype]
    weights = size.num_params * width // engine.tensor_parallel_size
    per_token = size.kv_bytes_per_token(width)
    if machine.device == "cuda":
        share = f"{engine.gpu_memory_utilization:.0%} of the GPU, of it"
        return RoleMemory("rollout", weights, f"{share} weights {gib(weights)}; cache {per_token / 1024:.3g} KiB per token")
    cache = int(min(engine.kv_cache_gib * GIB, engine.max_num_seqs * engine.max_model_len * per_token))
    return RoleMemory("rollout", weights + cache, f"weights {gib(weights)} + cache {gib(cache)}")


def _tokens(config: Config, rule: MicroBatchRule) -> int:
    """The most tokens of one micro-batch that one rank computes, and never more than a mini-batch can have."""
    longest = longest_sequence(config)
    rollouts = config.actor_rollout_ref.actor.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n
    limit = rule.max_tokens if rule.max_tokens is not None else (rule.max_rollouts or 1) * longest
    return -(-min(limit, rollouts * longest) // rule.sequence_ranks)


def _width(dtype: str, machine: Machine) -> int:
    return _WIDTHS.get(dtype, 2 if machine.device == "cuda" else 4)


def gib(num_bytes: int) -> str:
    """Return a size for people: `0.3 GiB`, `12 MiB`."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:.0f} MiB"
