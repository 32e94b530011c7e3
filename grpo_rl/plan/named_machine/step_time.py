"""An estimate of how long one training step takes on a named machine, by what its devices can compute and move at most.

Not measured. Each efficiency below is an assumption with its source, and is printed with the estimate. Rewards, saving, and waits
for the longest of many responses beyond the longest one are not in it.
"""

from __future__ import annotations

from dataclasses import dataclass

from grpo_rl.plan.decisions import Plan
from grpo_rl.plan.model_folder import ModelSize
from grpo_rl.plan.named_machine.devices import DEVICES, Device, named
from grpo_rl.plan.named_machine.fit import fit_of

TRAINING = 0.33
"""Share of the FLOP/s that training reaches: torchtitan, docs/performance.md, Llama 3.1 8B by FSDP on 8 and on 128 H100 without
torch.compile."""
DECODING = 0.77
"""Share of the memory bandwidth that decoding reaches: as in scripts/cluster_profiles.yaml."""
COMPUTING = 0.5
"""Share of the FLOP/s that prefill and passes without gradients reach: assumed."""
LINK = 0.8
"""Share of a link's bandwidth that gathers and copies reach: assumed."""
MEAN_SHARE = 0.5
"""Mean length of prompts and responses as a share of the longest: assumed."""
DECODE_OVERHEAD_S = 0.003
"""The seconds of each decoding step for scheduling, sampling and launching: assumed."""
SWITCH_S = 3.0
"""The seconds in which an engine sleeps and wakes: assumed."""
FIXED_S = 1.0
"""The seconds of an update, and of a transfer of weights, beside what they compute and move: assumed."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of each phase of a step."""

    phases: dict[str, float]
    tokens: float
    """Tokens of prompts and responses in one step."""
    gpus: int

    @property
    def total(self) -> float:
        """Return the seconds of a step whose phases follow each other."""
        return sum(self.phases.values())

    @property
    def tokens_per_gpu(self) -> float:
        """Return the tokens that each GPU gets through in a second."""
        return self.tokens / self.total / self.gpus


def step_time(plan: Plan, size: ModelSize) -> StepTime | None:
    """Return the estimate for a run on a named machine; None for others, for machines without bfloat16 and where nothing samples."""
    if not plan.machine.name or plan.machine.device != "cuda" or plan.engine is None or plan.role("actor") is None:
        return None
    device, data = named(plan.machine.name).device, plan.config.data
    if not device.tflops:
        return None
    rollouts, n = plan.sizes.rollouts_per_step, plan.config.actor_rollout_ref.rollout.n
    prompt, response = MEAN_SHARE * data.max_prompt_length, MEAN_SHARE * data.max_response_length
    groups = rollouts / n if plan.passes.update.shares_prompts else rollouts
    tokens = groups * prompt + rollouts * response
    phases = {"sampling": _sampling(plan, size, device, rollouts / plan.num_replicas, prompt, response)}
    ranks, context = plan.world_size, prompt + response
    link = device.link_gbs if plan.config.trainer.nnodes == 1 else min(device.link_gbs, device.nic_gbs * 1.0)
    if plan.passes.old_logprobs == "actor":
        phases["old log-probs"] = _pass(size, device, tokens, context, ranks, plan.passes.old.max_tokens, link, training=False)
    if plan.role("reference"):
        phases["reference"] = _pass(
            size, device, tokens, context, ranks, plan.passes.reference.max_tokens, link, training=False
        )
    passes = plan.sizes.updates_per_step / max(1, plan.sizes.mini_batches)
    update = _pass(size, device, tokens * passes, context, ranks, plan.passes.update.max_tokens, link, training=True)
    state = 28 * size.num_params / ranks / (device.memory_gbs * 1e9 * DECODING)
    phases["update"] = update + plan.sizes.updates_per_step * state + FIXED_S
    phases["weight transfer"] = size.num_params * plan.engine_width / (link * 1e9 * LINK) + FIXED_S
    phases["switch and offload"] = SWITCH_S * (plan.colocated and plan.engine.sleep_mode) + _copies(plan, size, device)
    return StepTime({name: seconds for name, seconds in phases.items() if seconds > 0}, tokens, ranks)


def _sampling(plan: Plan, size: ModelSize, device: Device, requests: float, prompt: float, response: float) -> float:
    """Return the seconds of one replica: prompts once for a group, then as many decoding steps as slots and the longest need.

    A decoding step reads the weights (of experts those that its sequences take) and every sequence's keys and values.
    """
    engine, n = plan.engine, plan.config.actor_rollout_ref.rollout.n
    assert engine is not None
    parallel = engine.tensor_parallel_size
    flops, bandwidth = device.tflops * 1e12 * COMPUTING * parallel, device.memory_gbs * 1e9 * DECODING * parallel
    fit = fit_of(plan, size)
    fitting = max(1.0, fit.cache_tokens / (prompt + response)) if fit is not None else engine.max_num_seqs
    slots = max(1.0, min(engine.max_num_seqs, requests, fitting))
    steps = max(requests * response / slots, plan.config.data.max_response_length)
    busy = requests * response / steps
    read = min(size.num_params, size.active_params * busy) * plan.engine_width
    context = busy * (prompt + response / 2) * size.kv_bytes_per_token(plan.engine_width)
    step = max((read + context) / bandwidth, 2 * size.active_params * busy / flops) + DECODE_OVERHEAD_S
    return requests / n * prompt * 2 * size.active_params / flops + steps * step


def _pass(
    size: ModelSize, device: Device, tokens: float, context: float, ranks: int, most: int | None, link: float, *, training: bool
) -> float:
    """Return the seconds of a pass of all ranks: the longer of computing and of gathering the weights for each micro-batch.

    6 FLOPs a parameter and token with gradients and 2 without, attention besides; weights travel as bfloat16 for the forward pass
    and the backward pass, and gradients as float32.
    """
    attention = 2 * size.layers * size.heads * size.head_dim * context
    flops = (2 * size.active_params + attention) * (3 if training else 1)
    computing = tokens * flops / (device.tflops * 1e12 * (TRAINING if training else COMPUTING)) / ranks
    micro_batches = max(1.0, tokens / ranks / (most or context))
    moved = size.num_params * (2 + 2 + 4 if training else 2) * (ranks - 1) / ranks
    return max(computing, micro_batches * moved / (link * 1e9 * LINK))


def _copies(plan: Plan, size: ModelSize, device: Device) -> float:
    """Return the seconds in which weights and moments go to host memory and back, once for each phase that reads them."""
    fsdp = plan.config.actor_rollout_ref.actor.fsdp_config
    passes = 1 + plan.recomputes_old_logprobs
    moved = 8 * fsdp.param_offload * passes + 16 * fsdp.optimizer_offload
    if plan.role("reference") and plan.config.actor_rollout_ref.ref.fsdp_config.param_offload:
        moved += 4
    if fsdp.offload_policy:
        moved += 8 * plan.sizes.updates_per_step
    return moved * size.num_params / plan.world_size / (device.pcie_gbs * 1e9 * LINK)


def assumptions(plan: Plan) -> str:
    """Return the assumptions of the estimate, for people."""
    found = named(plan.machine.name)
    device = found.device
    name = next(name for name, other in DEVICES.items() if other is device)
    return (
        f"{name} at {device.tflops:g} TFLOP/s, {device.memory_gbs:g} GB/s ({device.source}); of these {TRAINING:.0%} in training "
        f"(torchtitan), {COMPUTING:.0%} in passes without gradients, {DECODING:.0%} of the bandwidth in decoding, {LINK:.0%} of the "
        f"links; prompts and responses on average {MEAN_SHARE:.0%} of the longest; without rewards, saving and validation"
    )
