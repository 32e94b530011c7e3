"""Estimates of the memory that each role will need, from the model's sizes; nothing is loaded."""

from __future__ import annotations

from grpo_rl.config.derived import Machine, MicroBatchRule, longest_sequence
from grpo_rl.config.schema.critic import CriticModelConfig
from grpo_rl.config.schema.model import FsdpConfig, ModelConfig, RefFsdpConfig
from grpo_rl.config.schema.tree import Config
from grpo_rl.plan.decisions import Plan, RoleMemory, RoleName
from grpo_rl.plan.model_folder import ModelSize, model_size
from grpo_rl.rollout.engine import EngineSpec

GIB = 2**30
_TRAINING_BYTES = 16
"""Bytes per parameter: float32 weight, gradient, and AdamW's two moments."""
_WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}


def memory_by_role(plan: Plan, size: ModelSize) -> tuple[RoleMemory, ...]:
    """Return what each role that starts needs on one device."""
    config, machine = plan.config, plan.machine
    actor_width = _width(config.actor_rollout_ref.actor.fsdp_config.dtype, machine)
    roles = []
    if actor := plan.role("actor"):
        activations = needs_of_passes(plan, size, "actor") + head_bytes(plan, size, gradient=True)
        fsdp = config.actor_rollout_ref.actor.fsdp_config
        roles.append(_trained("actor", size, fsdp, actor.num_workers, activations))
    if reference := plan.role("reference"):
        own = config.actor_rollout_ref.ref.fsdp_config
        weights = size.num_params * 4 // sharded_over(own, reference.num_workers)
        # Without a backward pass only the layer that is being computed holds activations.
        passing = _layer_activations(size, _tokens(config, plan.passes.reference), actor_width)
        passing += head_bytes(plan, size, gradient=False)
        where = " in host memory" if own.offload_policy else ""
        parts = f"weights {gib(weights)}{where} + activations {gib(passing)}"
        roles.append(RoleMemory("reference", passing + (0 if own.offload_policy else weights), parts))
    if critic := plan.role("critic"):
        roles.append(_critic(plan, critic.num_workers, size))
    if scorers := plan.role("reward_model"):
        roles += _reward_model(plan, scorers.num_workers)
    if plan.engine is not None:
        roles.append(_engine(plan.engine, plan.machine, size))
    return tuple(roles)


def head_bytes(plan: Plan, size: ModelSize, *, gradient: bool) -> int:
    """Return the bytes of the LM head's tensors over the vocabulary, of one chunk of trained tokens, in float32.

    Counted by running the head (`tests/unit/test_plan_gpu_memory.py`): logits and log-probs; with a gradient one more; two more
    for the entropy, and for the exact KL.
    """
    tensors = 2
    if gradient:
        objective = plan.objective
        tensors = 3 + 2 * objective.needs_entropy + 2 * objective.needs_full_kl
    rule = plan.passes.update if gradient else plan.passes.reference
    tokens = min(plan.config.actor_rollout_ref.model.lm_head_chunk_tokens, _tokens(plan.config, rule))
    return tokens * size.vocab * 4 * tensors


def needs_of_passes(plan: Plan, size: ModelSize, name: RoleName) -> int:
    """Return the bytes of the activations of a role's largest pass, without the LM head's."""
    config, machine = plan.config, plan.machine
    if name == "reference":
        width = _width(config.actor_rollout_ref.ref.fsdp_config.dtype, machine)
        return _layer_activations(size, _tokens(config, plan.passes.reference), width)
    if name == "reward_model":
        own = config.reward.reward_model
        one_layer = _layer_activations(size, own.max_token_len_per_gpu, _width(own.dtype, machine))
        kept = size.layers * own.max_token_len_per_gpu * size.hidden * _width(own.dtype, machine)
        return one_layer + kept if plan.trains_reward_model else one_layer
    if name == "critic":
        critic = config.critic
        width = _width(critic.fsdp.dtype, machine)
        return _activations(config, size, plan.passes.critic, width, critic.model)
    actor = config.actor_rollout_ref
    width = _width(actor.actor.fsdp_config.dtype, machine)
    return _activations(config, size, plan.passes.update, width, actor.model)


def _critic(plan: Plan, ranks: int, size: ModelSize) -> RoleMemory:
    """The actor's need without the LM head's logits, for its own model's sizes where it has one."""
    size = size if plan.critic_model is None else model_size(plan.critic_model) or size
    return _trained("critic", size, plan.config.critic.fsdp, ranks, needs_of_passes(plan, size, "critic"))


def _trained(name: str, size: ModelSize, fsdp: FsdpConfig, ranks: int, activations: int) -> RoleMemory:
    """Return the need of a trained role, whose state may lie in host memory."""
    state = size.num_params * _TRAINING_BYTES // sharded_over(fsdp, ranks)
    where = " in host memory" if fsdp.offload_policy else ""
    parts = f"weights, gradients, AdamW {gib(state)}{where} + activations {gib(activations)}"
    return RoleMemory(name, activations + (0 if fsdp.offload_policy else state), parts)


def sharded_over(fsdp: FsdpConfig | RefFsdpConfig, ranks: int) -> int:
    """Return how many of a role's ranks hold one copy of its model together."""
    return fsdp.fsdp_size if 0 < fsdp.fsdp_size < ranks else ranks


def _reward_model(plan: Plan, ranks: int) -> list[RoleMemory]:
    """The need of the scoring model, which has sizes of its own; none where its folder does not say them."""
    own = plan.config.reward.reward_model
    size = model_size(own.model_path or "")
    if size is None:
        return []
    width = _width(own.dtype, plan.machine)
    one_layer = _layer_activations(size, own.max_token_len_per_gpu, width)
    if plan.trains_reward_model:
        state = size.num_params * _TRAINING_BYTES // ranks
        kept = size.layers * own.max_token_len_per_gpu * size.hidden * width
        activations = kept + one_layer if own.train.enable_gradient_checkpointing else size.layers * one_layer
        parts = f"weights, gradients, AdamW {gib(state)} + activations {gib(activations)}"
        return [RoleMemory("reward model", state + activations, parts)]
    weights = size.num_params * 4 // ranks
    parts = f"weights {gib(weights)}{' while it scores' if own.param_offload else ''} + activations {gib(one_layer)}"
    return [RoleMemory("reward model", weights + one_layer, parts)]


def _engine(engine: EngineSpec, machine: Machine, size: ModelSize) -> RoleMemory:
    width = _WIDTHS[engine.dtype]
    weights = size.num_params * width // engine.tensor_parallel_size
    per_token = size.kv_bytes_per_token(width)
    if machine.device == "cuda":
        share = f"{engine.gpu_memory_utilization:.0%} of the GPU, of it"
        return RoleMemory("rollout", weights, f"{share} weights {gib(weights)}; cache {per_token / 1024:.3g} KiB per token")
    cache = int(min(engine.kv_cache_gib * GIB, engine.max_num_seqs * engine.max_model_len * per_token))
    return RoleMemory("rollout", weights + cache, f"weights {gib(weights)} + cache {gib(cache)}")


def _activations(
    config: Config, size: ModelSize, rule: MicroBatchRule, width: int, model: ModelConfig | CriticModelConfig
) -> int:
    tokens = _tokens(config, rule)
    one_layer = _layer_activations(size, tokens, width)
    if not model.enable_gradient_checkpointing:
        return size.layers * one_layer
    # Of inputs that wait in host memory two are on the device: the present layer's, and one that is on its way.
    kept = 2 if model.enable_activation_offload else size.layers
    return kept * tokens * size.hidden * width + one_layer


def _layer_activations(size: ModelSize, tokens: int, width: int) -> int:
    """Bytes that one decoder layer keeps for its backward pass: about 8 hidden-sized tensors, attention's, and the MLP's four."""
    attention = (2 * size.heads + 2 * size.kv_heads) * size.head_dim
    return tokens * width * (8 * size.hidden + attention + 4 * size.intermediate)


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
