"""The seconds of a training step: what a machine's devices compute and move, and what waits for what.

For a named machine this is an upper bound on speed. A phase takes the longer of computing and moving, at the
shares of the device's figures below, which the page prints. Sampling is continuous batching in the fluid
limit: an ended response gives its slot to the next, and the longest responses are the tail. Rewards, saving
and preempted requests are left out.

For this machine the phases of a nominal device are scaled by what its latest run with the same devices and
engine, and a model of about this size, measured (`Fitted`), which also gives rewards and the rest of a step;
`calibration.json` beside the runs has it. A run beside which something else kept the machine busy is left out.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from grpo_rl.config import derived
from grpo_rl.config.derived import MicroBatchRule
from grpo_rl.config.relative_paths import function_files
from grpo_rl.config.schema.tree import Config
from grpo_rl.errors import DataError
from grpo_rl.frozen import frozen
from grpo_rl.plan.decisions import Plan
from grpo_rl.plan.machine import CORES, DEVICES, Device, named
from grpo_rl.plan.memory import GIB, adapter_params, fit_of, size_of_role
from grpo_rl.plan.model_folder import ModelSize
from grpo_rl.run_files import read_json, write_whole
from grpo_rl.source_code import digest, user_sources
from grpo_rl.telemetry.metrics.grades import PREDICTED, measured
from grpo_rl.types import Metrics

HIDDEN_BYTES, INNER_BYTES, HEAD_BYTES = 120, 28, 40
"""Bytes that a token moves in a layer's forward pass per number of the hidden state, the MLP's inner state,
and queries and keys: norms, residual sums, activation and rotary embedding in float32 and two bytes. Counted
by kernels of an eager pass."""
LOGIT_BYTES = 32
"""Bytes that a trained token moves per entry of the vocabulary: float32 logits, read or written eight times
(counted in tests/unit/models/test_forward.py)."""
RECOMPUTED, STORED = 4, 3
"""Forward passes of an update, with and without gradient checkpointing; the backward pass is two."""
FORWARD = 1.5
"""Factor of a pass without gradients: 0.4 of an update in verl's table of its asynchronous trainer, by
operations a quarter; nothing hides its gathers and its entropy."""
DECODING = 0.77
"""Share of memory bandwidth in decoding: johnmusgrave.com/p/vllm-throughput-latency-sweep-on, vLLM 0.23,
Llama 3.1 8B, one request at a time on an A100."""
COMPUTING = 0.5  # share of FLOP/s in prefill: assumed
LINK = 0.8  # share of a link's bandwidth in gathers and copies: assumed
MEAN_SHARE = 0.5  # mean length of prompts and responses as a share of the longest: assumed
SPREAD = 0.8  # standard deviation of a response length's logarithm: assumed
DECODE_OVERHEAD_S = 0.001  # of a decoding step between the GPU's work
ALL_REDUCE_S = 15e-6  # of an engine's GPUs, beside the bytes moved; two in each layer of a step: assumed
TRANSFER_GBS, TENSOR_S = 15.0, 4e-4
"""A transfer of weights gathers, casts, hands over and loads tensor after tensor. With FIXED_S this gives 2
to 4 s for 7 B parameters and 8 to 12 s for 70 B, as users of peers report, and 5 to 15 s for 18,432 tensors
of experts."""
HOST_UPDATE_GBS = 100.0  # of an optimizer on a machine's CPUs: assumed, half of a socket's data sheet
SWITCH_S = 0.5  # in which an engine sleeps and wakes: less than that on one H100, with 37 GiB of cache (docs/gpus.md)
FIXED_S = 0.5  # of a transfer of weights beside what it moves: assumed
REWARD_S = 1e-4  # of a reward; a unit for what runs on this machine measured
CROWDED = 0.4  # of the shorter side that an overlap on the same cores does not hide
CONTROLLER_S = 6.0 / (16_384 * 4096)  # per response token; the bar of scripts/bench_controller.py
EMPTY = 0.3  # share of filled slots below which the longest responses decide sampling time


@frozen
class Lengths:
    """Lognormal lengths of responses, cut at the longest, with this mean after the cut."""

    mean: float
    spread: float  # standard deviation of the logarithm; 0: all are equal
    longest: int

    @staticmethod
    def of(config: Config, share: float = MEAN_SHARE, spread: float = SPREAD) -> Lengths:
        """Return the configured lengths; by default the mean is this share of the longest."""
        trainer, longest = config.trainer, config.data.max_response_length
        share = 1.0 if config.rollout.ignore_eos else share
        mean = trainer.mean_response_length or share * longest
        spread = spread if trainer.response_length_spread is None else trainer.response_length_spread
        return Lengths(min(float(mean), float(longest)), spread, longest)

    def alive(self, tokens_K: np.ndarray) -> np.ndarray:
        """Return the share of responses that are longer than so many tokens."""
        if self.spread < 1e-3 or self.mean > 0.99 * self.longest:
            return (tokens_K < self.mean).astype(float)
        location = _location(self.mean, self.spread, self.longest)
        return _survival(tokens_K, location, self.spread) * (tokens_K < self.longest)

    @property
    def age(self) -> float:
        """Mean tokens of responses in progress while ended ones are replaced: E[l²] / 2 E[l]."""
        tokens_K = np.linspace(0, self.longest, 1025)
        alive_K = self.alive(tokens_K)
        return float((tokens_K * alive_K).sum() / alive_K.sum())

    def longest_of(self, number: float) -> float:
        """Return the median of the longest of so many responses."""
        tokens_K = np.linspace(0, self.longest, 1025)
        return float(tokens_K[np.searchsorted(-number * self.alive(tokens_K), -math.log(2))].clip(max=self.longest))


@cache
def _location(mean: float, spread: float, longest: int) -> float:
    """Return the mean of the logarithm; the mean length is the integral of the survival function."""
    tokens_K = np.linspace(0, longest, 1025)
    low, high = 0.0, math.log(longest) + 6 * spread
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if np.trapezoid(_survival(tokens_K, middle, spread), tokens_K) < mean else (low, middle)
    return low


def _survival(tokens_K: np.ndarray, location: float, spread: float) -> np.ndarray:
    scores_K = (np.log(np.maximum(tokens_K, 1e-9)) - location) / (spread * math.sqrt(2))
    return np.array([0.5 * math.erfc(score) for score in scores_K])


@frozen
class Fitted:
    """This machine, as a run measured it; without factors the nominal device."""

    factors: Mapping[str, float]  # measured over nominal seconds of phases
    prompt: float = MEAN_SHARE
    response: float = MEAN_SHARE  # mean lengths, as shares of the longest
    spread: float = SPREAD

    def __post_init__(self) -> None:
        if not all(0 <= number < math.inf for number in (*self.factors.values(), self.prompt, self.response, self.spread)):
            raise ValueError("a run measures finite numbers")

    def of(self, phase: str) -> float:
        """A phase that was not measured has the update's factor."""
        return self.factors.get(phase, self.factors.get("update", 1.0))


@frozen
class Replica:
    size: ModelSize
    width: int  # bytes of a weight, and of a number in the cache
    flops: float
    bandwidth: float  # bytes a second of GPU memory; as `flops` at the reached share
    overhead_s: float
    slots: float  # requests sampled at once, at most
    prompt: float  # mean tokens
    group: int  # responses to a prompt, which is read once for them
    parallel: int = 1  # GPUs that hold the weights together
    link: float = math.inf  # bytes a second between them
    host_s: float = 0.0
    sequence_s: float = 0.0  # with `host_s`: the engine's Python, per step and per sequence of it
    request_s: float = 0.0  # the engine's Python, per request

    def step_s(self, sequences: np.ndarray | float, context: np.ndarray | float) -> np.ndarray:
        """Return the seconds of a decoding step of so many sequences that hold `context` tokens together. It
        reads the weights (of experts the chosen ones) and all keys and values, and computes two operations
        per weight and sequence; the longer counts (the roofline of Pope et al. 2022, arXiv 2211.05102)."""
        read = np.minimum(self.size.num_params, self.size.active_params * np.asarray(sequences)) * self.width
        cache_read = np.asarray(context) * self.size.kv_bytes_per_token(self.width)
        computing = 2 * self.size.active_params * np.asarray(sequences) / self.flops
        # Each GPU sends and receives twice all but its part of the sums of attention and MLP.
        parts = 2 * (self.parallel - 1) / self.parallel
        reduced = 2 * self.size.layers * parts * np.asarray(sequences) * self.size.hidden * self.width / self.link
        gpu = np.maximum((read + cache_read) / self.bandwidth, computing) + reduced
        if self.parallel > 1:
            gpu = gpu + 2 * self.size.layers * ALL_REDUCE_S
        return np.maximum(gpu, self.host_s + self.sequence_s * np.asarray(sequences)) + self.overhead_s

    def reading_s(self, tokens: float) -> float:
        return 2 * self.size.active_params * tokens / self.flops

    def batch_s(self, lengths: Lengths, requests: float) -> tuple[float, float]:
        """Return the seconds until a batch's last response, and how full the slots are meanwhile. `begun[k]`
        responses begin in interval k, as slots are free and requests wait; the share longer than their age is
        there."""
        slots = min(self.slots, requests)
        # A long queue keeps the slots full: only its last rounds are followed.
        followed = min(requests, 8 * slots)
        full_steps = (requests - followed) * lengths.mean / slots
        horizon = followed * lengths.mean / slots + lengths.longest
        width = max(1.0, lengths.mean / 16, horizon / 400)
        # Middles of the intervals: the mean age of responses that begin with one.
        ages_K = (np.arange(int(lengths.longest / width) + 1) + 0.5) * width
        alive_K = lengths.alive(ages_K)
        begun, seconds, filled, tokens, waiting = np.zeros(len(alive_K)), 0.0, 0.0, 0.0, followed
        while True:
            present = float(begun @ alive_K)
            starting = min(waiting, max(0.0, slots - present))
            waiting -= starting
            begun[0] += starting
            present_K = begun * alive_K
            present = float(present_K.sum())
            if waiting <= 0 and present < math.log(2):
                break
            seconds += width * float(self.step_s(present, present_K @ (self.prompt + ages_K)))
            filled, tokens = filled + present * width, tokens + width
            begun = np.concatenate([[0.0], begun[:-1]])
        seconds += full_steps * self.pace_s(lengths, slots) + self.reading_s(requests / self.group * self.prompt)
        seconds += requests * self.request_s
        return seconds, (filled + full_steps * slots) / max(tokens + full_steps, 1e-9) / self.slots

    def pace_s(self, lengths: Lengths, sequences: float) -> float:
        """Return the seconds of a decoding step while ended responses are replaced at once."""
        return float(self.step_s(sequences, sequences * (self.prompt + lengths.age)))

    def steady_s(self, lengths: Lengths, requests: float, in_flight: float, *, reads_again: bool) -> tuple[float, float]:
        """Return the seconds per batch of a replica that always has requests of several, and how full its
        slots are. After new weights it reads unfinished requests again, each prompt once for its group."""
        busy = min(self.slots, in_flight)
        seconds = requests * (lengths.mean / busy * self.pace_s(lengths, busy) + self.request_s)
        reread = busy * lengths.age + busy / self.group * self.prompt if reads_again else 0.0
        return seconds + self.reading_s(requests / self.group * self.prompt + reread), busy / self.slots


@frozen
class StepTime:
    phases: dict[str, float]
    total: float  # less than the sum of phases if sampling and training overlap
    training: float  # all passes of the trained side
    filled: float  # share of the engines' slots while they sample
    limit: str  # the part at work for the largest share of the step
    tokens: float  # of prompts and responses
    gpus: int

    @property
    def tokens_per_gpu(self) -> float:
        return self.tokens / self.total / self.gpus


def step_time(plan: Plan, fitted: Fitted | None = None) -> StepTime | None:
    """Return the estimate for a named machine, or for this one as it was measured (`fitted`). None for any
    other machine, a model of unknown size, and if nothing samples."""
    if (size := plan.model) is None or plan.engine is None or plan.role("actor") is None:
        return None
    if fitted is not None:
        device = CORES if plan.machine.device == "cpu" else DEVICES["H100-80GB"]
    elif plan.machine.name and plan.machine.device == "cuda":
        device = named(plan.machine.name).device
    else:
        return None
    run = fitted or Fitted({})
    config, rollouts, n = plan.config, plan.sizes.rollouts_per_step, plan.config.rollout.n
    lengths, prompt = Lengths.of(config, run.response, run.spread), run.prompt * config.data.max_prompt_length
    groups = rollouts / n if plan.passes.update.shares_prompts else rollouts
    tokens = groups * prompt + rollouts * lengths.mean
    phases = _training(plan, size, device, tokens, lengths, prompt)
    replica = _replica(plan, size, device, lengths, prompt)
    requests, staleness = rollouts / plan.num_replicas, derived.max_staleness(config)
    controller = rollouts * lengths.mean * CONTROLLER_S
    tail = 0.0
    if derived.versions_ahead(config) is None and staleness:
        reads_again = not config.trainer.asynchronous.keep_cache
        sampling, filled = replica.steady_s(lengths, requests, requests * (staleness + 1), reads_again=reads_again)
        # No token may be older than the bound: a batch's longest response ends within so many steps.
        tail = lengths.longest_of(rollouts) * replica.pace_s(lengths, filled * replica.slots) / (staleness + 1)
    else:
        sampling, filled = replica.batch_s(lengths, requests)
        # The batch ends with the replica of its longest response, at last sampled alone.
        beyond = max(0.0, lengths.longest_of(rollouts) - lengths.longest_of(requests))
        sampling += beyond * float(replica.step_s(1, prompt + lengths.longest))
    phases["sampling"] = max(sampling, controller)
    phases["weight transfer"] = transfer_s(size, plan.engine_width)
    phases["switch and offload"] = SWITCH_S * (plan.colocated and plan.engine.sleep_mode) + _copies(plan, size, device)
    if fitted is not None:
        phases |= {"switch and offload": 0.0, "reward": rollouts * REWARD_S, "other": 1.0}
        phases = {name: seconds * fitted.of(name) for name, seconds in phases.items()}
    phases = {name: phases[name] for name in ("sampling", *phases) if phases[name] > 0}
    untrained = ("sampling", "weight transfer", "switch and offload", "reward", "other")
    training = sum(seconds for name, seconds in phases.items() if name not in untrained)
    total = sum(phases.values())
    if plan.overlaps and staleness:
        crowded = CROWDED * min(phases["sampling"], training) if plan.machine.device == "cpu" else 0.0
        total -= phases["sampling"] + training - max(phases["sampling"], training, tail) - crowded
    parts = {"sampling": sampling, "training": training, "controller": controller, "long responses": tail}
    parts["weight transfer"] = phases["weight transfer"]
    limit = max(parts, key=lambda name: parts[name])
    limit = "long responses" if limit == "sampling" and filled < EMPTY else limit
    engine_devices = 0 if plan.colocated else plan.num_replicas * plan.engine.tensor_parallel_size
    return StepTime(phases, total, training, filled, limit, tokens, plan.world_size + engine_devices)


def transfer_s(size: ModelSize, width: int) -> float:
    """Return the seconds of a transfer of all weights to the engines, `width` bytes each."""
    tensors = size.layers * (9 + 3 * size.experts)
    return size.num_params * width / (TRANSFER_GBS * 1e9) + tensors * TENSOR_S + FIXED_S


def _replica(plan: Plan, size: ModelSize, device: Device, lengths: Lengths, prompt: float) -> Replica:
    engine = plan.engine
    assert engine is not None
    parallel = engine.tensor_parallel_size
    # Engines of one device take turns with its kernels.
    share = parallel / engine.engines_per_device
    fit = fit_of(plan)
    fitting = max(1.0, fit.cache_tokens / (prompt + lengths.age)) if fit is not None else math.inf
    return Replica(
        size,
        plan.engine_width,
        device.tflops * 1e12 * COMPUTING * share,
        device.memory_gbs * 1e9 * DECODING * share,
        DECODE_OVERHEAD_S,
        min(engine.max_num_seqs, fitting),
        prompt,
        plan.config.rollout.n,
        parallel,
        device.link_gbs * 1e9 * LINK,
        device.decode_s,
        device.sequence_s,
        device.request_s,
    )


def _training(plan: Plan, size: ModelSize, device: Device, tokens: float, lengths: Lengths, prompt: float) -> dict[str, float]:
    """Return the seconds of each pass of the busiest rank."""
    ranks, nodes, passes, sizes = plan.world_size, plan.config.trainer.nnodes, plan.passes, plan.sizes
    # A GPU gathers shards of other machines by all their network cards.
    link = device.link_gbs if nodes == 1 else min(device.link_gbs, device.nic_gbs * max(1, ranks // nodes))
    rollouts = sizes.rollouts_per_step
    prompts = rollouts / plan.config.rollout.n
    # Attention costs by the square: its mean context is a token's, not a response's.
    context = prompt + 2 * lengths.age

    def of(model: ModelSize, rule: MicroBatchRule, batches: int = 1, epochs: float = 1.0, *, training: int = 0) -> float:
        # The busiest rank, or group that shares sequences, has at least the longest sequence of each
        # mini-batch.
        longest = (prompt + lengths.longest_of(rollouts / batches)) / passes.update.sequence_ranks
        busiest = max(tokens / ranks / batches, longest)
        computing = busiest * token_s(model, device, context) * (training or FORWARD)
        # Gathers run beside the computing. Weights travel as bfloat16 for both passes, gradients as float32.
        micro_batches = max(1.0, busiest / (rule.max_tokens or int(context)))
        shards = model.num_params * (ranks - 1) / ranks
        gathers = micro_batches * shards * (2 + 2 + 4 if training else 2) / (link * 1e9 * LINK)
        if (
            model.experts
        ):  # all experts' weights and gradients are read for each micro-batch, and few tokens may be all that each gets
            computing += (
                micro_batches * model.num_params * (4 + 4 + 4 if training else 2) / (device.memory_gbs * 1e9 * DECODING)
            )
        python = device.call_s + device.prompt_s * prompts / ranks / batches * (training or FORWARD)
        return epochs * batches * (max(computing, gathers) + python)

    def learns(
        model: ModelSize, rule: MicroBatchRule, updates: int, batches: int, *, checkpointing: bool, on_host: bool
    ) -> float:
        seconds = of(model, rule, batches, updates / max(1, batches), training=RECOMPUTED if checkpointing else STORED)
        # Weight, gradient and two moments are read, all but the gradient written, in float32; Muon has one
        # moment.
        muon = plan.config.actor.optim.optimizer.lower() == "muon"
        trained = adapter_params(plan.config.model, model) or model.num_params
        rate = HOST_UPDATE_GBS * 1e9 * plan.config.trainer.nnodes if on_host else device.memory_gbs * 1e9 * DECODING * ranks
        return seconds + updates * (20 if muon else 28) * trained / rate + device.fixed_s

    phases: dict[str, float] = {}
    if passes.old_logprobs == "actor":
        phases["old log-probs"] = of(size, passes.old)
    if plan.reference:
        phases["reference"] = of(size, passes.reference)
    if (critic := size_of_role(plan, "critic")) is not None:
        critic_config, updates = plan.config.critic, sizes.critic_updates_per_step
        recomputes, on_host = critic_config.model.enable_gradient_checkpointing, critic_config.fsdp.offload_policy
        batches = max(1, round(updates / max(1, sizes.critic_epochs)))
        phases["critic's values"] = of(critic, passes.critic)
        phases["critic's update"] = learns(critic, passes.critic, updates, batches, checkpointing=recomputes, on_host=on_host)
    recomputes, on_host = (
        plan.config.model.enable_gradient_checkpointing is not False,
        plan.config.actor.fsdp_config.offload_policy,
    )
    updates, batches = sizes.updates_per_step, sizes.mini_batches
    phases["update"] = learns(size, passes.update, updates, batches, checkpointing=recomputes, on_host=on_host)
    return phases


def token_s(size: ModelSize, device: Device, context: float) -> float:
    """Return the seconds of a token's forward pass: products, attention, and then what its kernels move.
    `context`: mean tokens of a token's sequence."""
    peak = device.tflops * 1e12
    # Products of experts take twice as long: each has few rows.
    inner = size.expert_intermediate * size.experts_per_token
    products = 2 * (size.active_params + 3 * size.hidden * inner * size.layers) / (peak * device.products)
    # Two products per head, over half of the sequence on average.
    attention = 2 * size.layers * size.heads * size.head_dim * context / (peak * device.attention)
    copies = size.experts_per_token * size.hidden * INNER_BYTES
    queries = (size.heads + size.kv_heads) * size.head_dim
    layer = HIDDEN_BYTES * size.hidden + INNER_BYTES * (inner or size.intermediate) + copies + HEAD_BYTES * queries
    moved = size.layers * layer + LOGIT_BYTES / RECOMPUTED * size.vocab
    return products + attention + moved / (device.memory_gbs * 1e9 * DECODING) + device.token_s


def _copies(plan: Plan, size: ModelSize, device: Device) -> float:
    """Return the seconds of moving weights and moments to host memory and back, per phase that reads them."""
    fsdp = plan.config.actor.fsdp_config
    passes = 1 + plan.recomputes_old_logprobs
    moved = 8 * fsdp.param_offload * passes + 16 * fsdp.optimizer_offload
    if plan.role("reference") and plan.config.ref.fsdp_config.param_offload:
        moved += 4
    if fsdp.offload_policy:
        moved += 8 * plan.sizes.updates_per_step
    return moved * size.num_params / plan.world_size / (device.pcie_gbs * 1e9 * LINK)


def assumptions(plan: Plan) -> str:
    device, lengths = named(plan.machine.name).device, Lengths.of(plan.config)
    name = next(name for name, other in DEVICES.items() if other is device)
    is_set = plan.config.trainer.mean_response_length is not None
    mean = f"responses of {lengths.mean:,.0f} tokens on average" + ("" if is_set else f" ({MEAN_SHARE:.0%} of the longest)")
    return (
        f"{mean} and {lengths.longest:,} at most, the logarithm's spread {lengths.spread:g}; {name} at {device.tflops:g} TFLOP/s, "
        f"{device.memory_gbs:g} GB/s ({device.source}); of these {device.products:.0%} in products of matrices, {device.attention:.0%} in attention and {COMPUTING:.0%} in "
        f"prefill, {DECODING:.0%} of the bandwidth, {LINK:.0%} of the links; without rewards, saving and validation"
    )


# ---- what the runs on this machine say of it ------------------------------------------------------------------------

FILE = "calibration.json"
BUSY = 1.5
"""A run that took so much longer than an earlier one of the same kind was not alone on the machine."""
PHASES = {
    "sampling": "gen", "reward": "reward", "old log-probs": "old_logprobs", "reference": "ref", "critic's values": "values",
    "update": "update_actor", "critic's update": "update_critic", "weight transfer": "sync_weights", "step": "step",
}  # fmt: skip
"""The phases' metrics `timing_s/...`."""


def predict(plan: Plan, runs: Path, *, longest: bool = False) -> dict[str, float]:
    """Return the seconds of phases and `step` by earlier runs in this folder; empty without any.

    With `longest` every response is as long as it may be, as those of another job can be.
    """
    if plan.model is None or not (known := _known(plan, runs)):
        return {}
    num_params = plan.model.num_params
    fitted = known[min(known, key=lambda size: abs(math.log(size / num_params)))]
    time = step_time(plan, dataclasses.replace(fitted, response=1.0) if longest else fitted)
    return {} if time is None else time.phases | {"step": time.total}


def expected(plan: Plan) -> Metrics:
    """Return the plan's predictions of metrics, named after `plan/`: `plan/timing_s/gen`."""
    seconds = predict(plan, Path(plan.config.trainer.default_local_dir).expanduser())
    metrics = {f"{PREDICTED}timing_s/{PHASES[name]}": value for name, value in seconds.items() if name in PHASES}
    for need in plan.memory if plan.machine.device == "cuda" else ():
        if need.role != "rollout":
            metrics[f"{PREDICTED}perf/memory/{'ref' if need.role == 'reference' else need.role}_gib"] = need.num_bytes / GIB
    return metrics


def learn(plan: Plan, runs: Path, records: list[dict[str, float]]) -> None:
    """Write what a run's steps measured, if there are three and the plan can be estimated.

    Sampling and training on the same cores at once say nothing about the seconds of each.
    """
    if plan.overlaps and plan.machine.device == "cpu":
        return
    seconds, data = measured(records), plan.config.data
    sampled = [record for record in records if "response_length/mean" in record]

    def share(part: str, longest: int) -> float:
        lengths = [record.get(f"{part}_length/mean", MEAN_SHARE * longest) for record in sampled]
        return statistics.fmean(lengths) / longest if lengths else MEAN_SHARE

    # The spread for which the longest of so many lognormal lengths exceeds their mean as measured.
    beyond = [
        math.log(record["response_length/max"] / record["response_length/mean"])
        for record in sampled
        if record["response_length/mean"] > 0 and "response_length/max" in record
    ]
    typical = math.sqrt(2 * math.log(max(2, plan.sizes.rollouts_per_step)))
    spread = statistics.fmean(beyond) / typical if beyond else SPREAD
    fitted = Fitted({}, share("prompt", data.max_prompt_length), share("response", data.max_response_length), spread)
    nominal = step_time(plan, fitted) if seconds else None
    if nominal is None:
        return
    names = {name: f"timing_s/{PHASES[name]}" for name in nominal.phases if name in PHASES}
    factors = {name: seconds[key] / nominal.phases[name] for name, key in names.items() if key in seconds}
    without = step_time(plan, dataclasses.replace(fitted, factors=factors | {"other": 0.0}))
    assert without is not None and plan.model is not None, "the same run"
    other = max(0.0, seconds["timing_s/step"] - without.total)
    fitted = dataclasses.replace(fitted, factors=factors | {"other": other})
    if plan.config.rollout.ignore_eos:  # forced lengths
        fitted = dataclasses.replace(fitted, response=MEAN_SHARE, spread=SPREAD)
    if (earlier := _known(plan, runs).get(plan.model.num_params)) is not None:
        foretold = step_time(plan, dataclasses.replace(fitted, factors=earlier.factors))
        if foretold is not None and without.total + other > BUSY * foretold.total:
            return
    entry = {f"{_machine(plan)}; {plan.model.num_params} parameters": dataclasses.asdict(fitted)}
    write_whole(runs / FILE, json.dumps(_read(runs) | entry, indent=1))


def _known(plan: Plan, runs: Path) -> dict[int, Fitted]:
    """Return what runs of this machine measured, by the number of the model's parameters."""
    known = {}
    for key, entry in _read(runs).items():
        machine, _, size = key.partition("; ")
        if machine == _machine(plan):
            with suppress(TypeError, ValueError, AttributeError, IndexError):  # another kind of entry
                if (num_params := int(size.split()[0])) > 0:
                    known[num_params] = Fitted(**entry)
    return known


def _machine(plan: Plan) -> str:
    """Return what entries hold for: devices, engine, and a digest of the user's functions."""
    machine, functions = plan.machine, user_sources(function_files(dataclasses.asdict(plan.config)))
    devices = f"{plan.world_size} of {machine.num_gpus} GPUs" if machine.device == "cuda" else f"{machine.num_cpus} cores"
    engine = plan.engine.name if plan.engine is not None else "no engine"
    return f"{devices}, {engine}" + (f", functions {digest(functions)}" if functions else "")


def _read(runs: Path) -> dict[str, Any]:
    try:
        return dict(read_json(runs / FILE))
    except (DataError, ValueError, TypeError):
        return {}
