"""The checks of `gpu_check.py`: each yields rows with what it found on a device, and the bound that it was judged by.

Layers compute in bfloat16 on every device, so that a CPU takes the path of a GPU. Checks share one folder, in which the first
that needs a model writes it. The bounds were fixed by runs on a CPU, with torch 2.11 and 2.13.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

GIB = 2**30


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    name: str
    state: str
    """passed, failed, measured (there is no bound), or not possible."""
    figure: str
    bound: str = ""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the checks: those of a model with 0.5 billion parameters on GPUs, tiny ones on CPUs."""

    hidden: int = 896
    intermediate: int = 4864
    layers: int = 24
    heads: int = 14
    kv_heads: int = 2
    head_dim: int = 64
    vocab: int = 151_936
    tokens: int = 8192
    """Tokens of one micro-batch."""
    context: int = 32_768
    """The longest sequence of the attention check."""


TINY = Sizes(64, 128, 2, 4, 2, 16, 256, 256, 1024)
ALL = (0, 1, 2, 3)
"""The rollouts of `batch_of`, as one micro-batch."""


def passed(name: str, good: bool, figure: str, bound: str) -> Row:
    """Return the row of a check that has a bound."""
    return Row(name, "passed" if good else "failed", figure, bound)


# ---- what the checks share -------------------------------------------------------------------------------------------


def model_folder(sizes: Sizes, folder: Path, *, experts: int = 0) -> Path:
    """Return the folder of a random Qwen3 of these sizes, or of a Qwen3-MoE of two layers with so many experts.

    It is in `folder`, and written only if it is not there yet.
    """
    path = folder / f"{'experts' if experts else 'dense'}-{sizes.layers}x{sizes.hidden}-{sizes.vocab}"
    if path.exists():
        return path
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "vocab_size": sizes.vocab,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "num_hidden_layers": 2 if experts else sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "max_position_embeddings": 40_960,
        "tie_word_embeddings": True,
        # Logits with a standard deviation of 1, and attention that bears on them.
        "initializer_range": 1 / math.sqrt(sizes.hidden),
        "eos_token_id": 1,
        "pad_token_id": 0,
        "bos_token_id": None,
    }
    if experts:
        settings |= {"moe_intermediate_size": sizes.intermediate // 8, "num_experts": experts, "num_experts_per_tok": 2}
        model: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**settings, norm_topk_prob=True))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**settings))
    # Under its own name only when it is whole: a check may be ended at any time.
    unfinished = path.with_name(f"{path.name}-{os.getpid()}")
    model.save_pretrained(unfinished)
    return unfinished.rename(path)


def batch_of(sizes: Sizes, seed: int = 1) -> Any:
    """Return random rollouts of one micro-batch: two responses to each of two prompts, a quarter of the tokens each, with advantages."""
    from grpo_rl.types import Batch

    generator = torch.Generator().manual_seed(seed)
    prompts_N, responses_N = torch.full((4,), sizes.tokens // 16), torch.full((4,), sizes.tokens // 4 - sizes.tokens // 16)
    num_tokens, num_trained = int((prompts_N + responses_N).sum()), int(responses_N.sum())
    token_ids_S = torch.randint(2, sizes.vocab, (num_tokens,), generator=generator)
    rows_NL = token_ids_S.view(4, -1)
    # A group has one prompt, which a pass computes once: random ones would never agree.
    rows_NL[1::2, : sizes.tokens // 16] = rows_NL[::2, : sizes.tokens // 16]
    return Batch(
        prompt_lengths_N=prompts_N,
        response_lengths_N=responses_N,
        group_N=torch.arange(4) // 2,
        token_ids_S=token_ids_S,
        rewards_N=torch.zeros(4),
        rollout_logprobs_T=torch.full((num_trained,), -3.0),
        advantages_T=torch.tensor([1.0, -1.0, 0.5, -0.5]).repeat_interleave(responses_N),
    )


def actor_of(
    folder: Path,
    device: str,
    *,
    deterministic: bool = False,
    model: dict[str, Any] | None = None,
    policy: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Return the only rank of an actor of this model; `model` and `policy` are fields of its specs."""
    import torch.distributed as dist

    from grpo_rl.algos.objective import Objective
    from grpo_rl.config.schema.tree import ModelConfig, OptimConfig
    from grpo_rl.workers.actor import ActorWorker
    from grpo_rl.workers.specs import ActorSpec, PolicySpec, Rank

    if dist.is_initialized():
        dist.destroy_process_group()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    settings = PolicySpec(ModelConfig(path=str(folder), **(model or {})), temperature=1.0, dtype="bfloat16", train=True)
    spec = ActorSpec(replace(settings, **(policy or {})), Objective(), OptimConfig(lr=1e-3), 100, seed=1, **options)
    return ActorWorker(spec, Rank(0, 1, "127.0.0.1", port, device, 600.0, deterministic=deterministic))


def update_of(batch: Any) -> Any:
    """Return one optimizer step on all of the batch in one micro-batch."""
    from grpo_rl.types import Counts
    from grpo_rl.workers.specs import OptimizerStep, Update

    counts = Counts.of(batch.trained_lengths_N, batch.group_N)
    return Update({}, None, (OptimizerStep(counts, (tuple(range(batch.num_rollouts)),)),))


def weights_of(actor: Any) -> dict[str, Tensor]:
    """Return a copy of the actor's weights on the CPU."""
    from grpo_rl.models import fsdp

    fsdp.reshard(actor.model)
    return {name: fsdp.full_tensor(value.detach()).cpu().clone() for name, value in actor.model.named_parameters()}


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the largest difference between the same weights."""
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def seconds_of(function: Callable[[], Any], device: str, times: int = 3) -> float:
    """Return the least time of a call, without the first one."""
    function()
    taken = []
    for _ in range(times):
        wait(device)
        began = time.perf_counter()
        function()
        wait(device)
        taken.append(time.perf_counter() - began)
    return min(taken)


def wait(device: str) -> None:
    """Wait until the device has done what it was given."""
    if device == "cuda":
        torch.cuda.synchronize()


# ---- the checks ------------------------------------------------------------------------------------------------------


def check_policy(device: str, sizes: Sizes, folder: Path) -> Iterator[Row]:
    """Compare log-probs and gradients of packed sequences on the device with those on the CPU in float32."""
    small = replace(TINY, vocab=4096 if device == "cuda" else TINY.vocab)
    path, batch = model_folder(small, folder), batch_of(small)
    exact_T, exact = by_plain_model(path, batch, "cpu")
    logprobs_T, gradient = by_plain_model(path, batch, device)
    error, relative = float((logprobs_T - exact_T).abs().max()), float((gradient - exact).norm() / exact.norm())
    yield passed("policy: log-probs in float32 against the CPU's", error < 5e-5, f"{error:.1e}", "below 5e-5")
    yield passed("policy: gradient in float32, relative", relative < 1e-4, f"{relative:.1e}", "below 1e-4")
    actor = actor_of(path, device)
    error = float((actor.per_token(batch, [ALL]).float() - exact_T).abs().mean())
    yield passed(
        "policy: log-probs of FSDP's bfloat16 layers, mean",
        0 < error < BF16_ERROR,
        f"{error:.1e}",
        f"above 0, below {BF16_ERROR:g}",
    )
    actor.model(sequences_on(device, batch)).logprobs_T.sum().backward()
    gradient = torch.cat([actor_gradient.flatten() for actor_gradient in gradients_of(actor).values()])
    relative = float((gradient - exact).norm() / exact.norm())
    yield passed("policy: gradient of FSDP's bfloat16 layers, relative", relative < 0.05, f"{relative:.1e}", "below 0.05")


BF16_ERROR = 3e-2
"""The bound of log-probs by bfloat16 layers: they were 1.2e-2 off, and 1.0 with attention that returns zeros."""


def sequences_on(device: str, batch: Any) -> Any:
    """Return the batch as the input of a pass, with shared prompts."""
    from grpo_rl.workers.sharded_policy import sequences_of

    return sequences_of(batch, torch.device(device), share_prompts=True)


def by_plain_model(path: Path, batch: Any, device: str) -> tuple[Tensor, Tensor]:
    """Return log-probs and the flat gradient of their sum on the CPU, by the policy in float32 without FSDP."""
    from grpo_rl.models.forward import PolicyModel
    from grpo_rl.models.load import load_config, load_lm

    model = PolicyModel(load_lm(str(path), load_config(str(path)))).to(device)
    logprobs_T = model(sequences_on(device, batch)).logprobs_T
    logprobs_T.sum().backward()
    gradients = [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    return logprobs_T.detach().cpu(), torch.cat(gradients).cpu()


def gradients_of(actor: Any) -> dict[str, Tensor]:
    """Return the actor's gradients on the CPU."""
    from grpo_rl.models import fsdp

    return {name: fsdp.full_tensor(parameter.grad).cpu() for name, parameter in actor.model.named_parameters()}


def check_shared(device: str, sizes: Sizes, folder: Path) -> Iterator[Row]:
    """Compare prompts that are computed once for their responses with prompts that each response computes, by FSDP's policy."""
    path, batch = model_folder(sizes, folder), batch_of(sizes)
    # A CPU has time for both types: in float32 the two are equal but for the order of sums. In bfloat16 the mean difference
    # was 9e-3 with 2 layers and 3e-2 with 24, and the norms' 1e-3; without attention log-probs are 1 apart.
    bounds = {"bfloat16": (0.08, 0.02)} | ({} if device == "cuda" else {"float32": (1e-5, 1e-5)})
    for dtype, (bound, norm_bound) in bounds.items():
        logprobs, norms, seconds = {}, {}, {}
        for share in (False, True):
            actor = actor_of(path, device, policy={"share_prompts": share, "dtype": dtype})
            logprobs[share] = actor.per_token(batch, [ALL]).float()
            (stats,) = actor.update(batch, update_of(batch))
            norms[share] = stats["same/grad_norm"]
            seconds[share] = seconds_of(partial(actor.update, batch, update_of(batch)), device)
            del actor
        error, relative = float((logprobs[True] - logprobs[False]).abs().mean()), abs(norms[True] / norms[False] - 1)
        yield passed(
            f"shared prompts: log-probs against unshared, {dtype}, mean", error < bound, f"{error:.1e}", f"below {bound:g}"
        )
        yield passed(
            f"shared prompts: norm of the gradient, {dtype}, relative",
            relative < norm_bound,
            f"{relative:.1e}",
            f"below {norm_bound:g}",
        )
        yield Row(
            f"shared prompts: seconds of an update, {dtype}", "measured", f"{seconds[True]:.3f}, unshared {seconds[False]:.3f}"
        )


def check_learns(device: str, sizes: Sizes, folder: Path) -> Iterator[Row]:
    """Take twelve updates: responses with positive advantages get likelier than those with negative ones."""
    small = replace(sizes, layers=2)
    actor, batch = actor_of(model_folder(small, folder), device), batch_of(small)
    signs_T = batch.advantages_T.sign()

    def margin() -> float:
        return float((actor.per_token(batch, [ALL]).float() * signs_T).mean())

    start = margin()
    for _ in range(12):
        actor.update(batch, update_of(batch))
    gained = margin() - start
    yield passed("twelve updates: log-prob of rewarded against other tokens", gained > 0.01, f"{gained:+.3f}", "above +0.01")


def check_variants(device: str, sizes: Sizes, folder: Path) -> Iterator[Row]:
    """Make two updates with adapters, experts, host memory and, on GPUs, compiled layers."""
    dense = model_folder(sizes, folder)
    variants: dict[str, tuple[Path, dict[str, Any]]] = {
        "LoRA": (dense, {"model": {"lora_rank": 16}}),
        "experts": (model_folder(sizes, folder, experts=8), {}),
        "optimizer in host memory": (dense, {"policy": {"in_host_memory": True}}),
        "compiled layers": (dense, {"policy": {"compiled": True}}),
    }
    batch = batch_of(sizes)
    for name, (path, options) in variants.items():
        if name in ("optimizer in host memory", "compiled layers") and device != "cuda":
            yield Row(f"variant: {name}", "not possible", "is for GPUs")
            continue
        actor = actor_of(path, device, **options)
        actor.update(batch, update_of(batch))
        (stats,) = actor.update(batch, update_of(batch))
        good = not stats["same/nonfinite"] and stats["same/grad_norm"] > 0
        seconds = seconds_of(partial(actor.update, batch, update_of(batch)), device, times=1)
        yield passed(f"variant: {name}", good, f"gradient {stats['same/grad_norm']:.2g}, {seconds:.3f} s", "finite, above 0")
        del actor


def check_mixed(device: str, sizes: Sizes, folder: Path) -> Iterator[Row]:
    """Update over lengths from some hundred tokens to the longest context in one pass."""
    from grpo_rl.types import Batch

    longest = sizes.context if device == "cuda" else 128
    lengths_N, prompts_N = torch.tensor([longest - 64, longest // 4, longest // 16, 50]), torch.full((4,), 64)
    mixed = Batch(
        prompt_lengths_N=prompts_N,
        response_lengths_N=lengths_N,
        group_N=torch.arange(4),
        token_ids_S=torch.randint(2, sizes.vocab, (int((lengths_N + prompts_N).sum()),)),
        rewards_N=torch.zeros(4),
        rollout_logprobs_T=torch.full((int(lengths_N.sum()),), -3.0),
        advantages_T=torch.tensor([1.0, -1.0, 0.5, -0.5]).repeat_interleave(lengths_N),
    )
    (stats,) = actor_of(model_folder(sizes, folder), device).update(mixed, update_of(mixed))
    gradient = stats["same/grad_norm"]
    good = not stats["same/nonfinite"] and gradient > 0
    yield passed(f"lengths from 114 to {longest:,} in one pass", good, f"gradient {gradient:.2g}", "finite, above 0")


def check_head(device: str, sizes: Sizes, folder: Path) -> Iterator[Row]:
    """Measure the LM head in each precision: the error of log-probs against float64, and the time of both passes."""
    from grpo_rl.models.lm_head import Head, chunks_of, token_logprobs

    generator = torch.Generator().manual_seed(2)
    tokens = min(sizes.tokens, 4096)
    hidden_TD = torch.randn(tokens, sizes.hidden, generator=generator).to(device)
    # Logits with a standard deviation of 6, as of a trained model.
    head_VD = (torch.randn(sizes.vocab, sizes.hidden, generator=generator) * 6 / math.sqrt(sizes.hidden)).to(device)
    target_T = torch.randint(0, sizes.vocab, (tokens,), generator=generator).to(device)
    few = slice(0, 256)
    exact_T = (hidden_TD[few].double() @ head_VD.double().T).log_softmax(-1).gather(1, target_T[few, None])[:, 0]
    bounds = {"float32": 1e-4, "tf32": 1e-2, "bfloat16": 1e-1}
    for precision, bound in bounds.items():

        def logprobs(x_TD: Tensor, w_VD: Tensor, ids_T: Tensor, precision: Any = precision) -> Tensor:
            head = Head.of(w_VD, None, 1.0, precision)
            return token_logprobs(head, x_TD, ids_T, chunks_of(len(ids_T), 2048))

        def both(logprobs: Callable[..., Tensor] = logprobs) -> None:
            x_TD, w_VD = hidden_TD.detach().requires_grad_(), head_VD.detach().requires_grad_()
            logprobs(x_TD, w_VD, target_T).sum().backward()

        error = float((logprobs(hidden_TD[few], head_VD, target_T[few]).double() - exact_T).abs().max())
        took = seconds_of(both, device)
        figure = f"error {error:.1e}, {1e3 * took:.1f} ms for {tokens:,} tokens"
        yield passed(f"LM head in {precision}", error < bound, figure, f"error {bound:g}")


def check_attention(device: str, sizes: Sizes, folder: Path) -> Iterator[Row]:
    """Compare attention over packed blocks with attention written out in float64, and take its peak memory at a long context."""
    for dtype, width in ((torch.bfloat16, sizes.head_dim), (torch.bfloat16, ODD_WIDTH), (torch.float32, sizes.head_dim)):
        yield attention_row(device, replace(sizes, head_dim=width), dtype, continuing=False)
        yield attention_row(device, replace(sizes, head_dim=width), dtype, continuing=True)
    yield _long_attention(device, sizes, torch.bfloat16 if device == "cuda" else torch.float32)


ODD_WIDTH = 12
"""A head size that no kernel of variable lengths has."""


def attention_row(device: str, sizes: Sizes, dtype: torch.dtype, *, continuing: bool) -> Row:
    """Return the errors of values and gradients of blocks, of which some continue a prompt's if `continuing`."""
    from grpo_rl.models.attention import packed_attention, takes_blocks_as_they_lie
    from grpo_rl.models.packing import Packing

    lengths_B = torch.tensor([37, 200, 5, 111, 64])
    # The block that each one continues: the third and the fourth have the second as their prompt.
    prompts_B = torch.tensor([-1, -1, 1, 1, -1]) if continuing else torch.full((5,), -1)
    total, heads, kv_heads, width = int(lengths_B.sum()), sizes.heads, sizes.kv_heads, sizes.head_dim
    generator = torch.Generator().manual_seed(3)
    shapes = [(1, count, total, width) for count in (heads, kv_heads, kv_heads)]
    inputs = [torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes]
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    packing = Packing.of(lengths_B, device, prompts_B if continuing else None)
    out = packed_attention(torch.nn.Module(), inputs[0], inputs[1], inputs[2], None, packing=packing)[0][0]

    block_S = torch.arange(len(lengths_B)).repeat_interleave(lengths_B)
    visible = (block_S[:, None] == block_S) & torch.ones(total, total, dtype=torch.bool).tril()
    visible |= prompts_B[block_S][:, None] == block_S
    query, key, value = exact
    key, value = (tensor[0].repeat_interleave(heads // kv_heads, 0) for tensor in (key, value))
    scores = (query[0] @ key.transpose(1, 2) / math.sqrt(width)).masked_fill(~visible.to(device), -math.inf)
    expected = (scores.softmax(-1) @ value).transpose(0, 1)

    out.float().pow(2).sum().backward()
    expected.pow(2).sum().backward()
    bound = 2e-2 if dtype == torch.bfloat16 else 1e-5
    errors = {}
    pairs = zip((out, *(x.grad for x in inputs)), (expected, *(x.grad for x in exact)), strict=True)
    for name, (computed, correct) in zip(("values", "dq", "dk", "dv"), pairs, strict=True):
        assert computed is not None and correct is not None
        errors[name] = float(((computed.double() - correct).norm() / correct.norm()).detach())
    kernel = "variable lengths" if takes_blocks_as_they_lie(inputs[0], 0.0) else "SDPA"
    blocks = "blocks that continue" if continuing else "blocks"
    return passed(
        f"attention: {blocks}, {str(dtype).removeprefix('torch.')}, head size {width}",
        all(error < bound for error in errors.values()),
        f"{', '.join(f'{name} {error:.1e}' for name, error in errors.items())} ({kernel})",
        f"each below {bound:g}, relative",
    )


def _long_attention(device: str, sizes: Sizes, dtype: torch.dtype) -> Row:
    """Return the peak memory of both passes over one long sequence; a square of the length would show."""
    from grpo_rl.models.attention import packed_attention
    from grpo_rl.models.packing import Packing

    name, heads = f"attention: peak at {sizes.context:,} tokens", (sizes.heads, sizes.kv_heads, sizes.kv_heads)
    if device != "cuda":
        return Row(name, "not possible", "needs a GPU, whose allocator counts")
    q, k, v = (torch.randn(1, n, sizes.context, sizes.head_dim, device=device, dtype=dtype).requires_grad_() for n in heads)
    inputs = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    packing = Packing.of(torch.tensor([sizes.context]), device)
    packed_attention(torch.nn.Module(), q, k, v, None, packing=packing)[0].float().sum().backward()
    peak = torch.cuda.max_memory_allocated() - inputs
    most = 24 * sum(heads) * sizes.context * sizes.head_dim * 2
    return passed(name, peak < most, f"{peak / GIB:.2f} GiB", f"below {most / GIB:.2f} GiB, 24 times its inputs")


def check_actor(device: str, sizes: Sizes, folder: Path) -> Iterator[Row]:
    """Measure updates of the actor alone: memory against the plan, tokens per second, MFU."""
    from grpo_rl.plan.machine import peak_tflops

    path = model_folder(sizes, folder)
    actor, batch = actor_of(path, device), batch_of(sizes)
    update = update_of(batch)
    before = weights_of(actor)
    actor.update(batch, update)
    (stats,) = actor.update(batch, update)
    moved = largest_difference(before, weights_of(actor))
    good = moved > 0 and math.isfinite(stats["same/grad_norm"]) and not stats["same/nonfinite"]
    yield passed("actor: two updates move the weights", good, f"{moved:.1e}, gradient {stats['same/grad_norm']:.2g}", "above 0")
    actor.work.take()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = seconds_of(lambda: actor.update(batch, update), device, times=3)
    flops, tokens = actor.work.take() / 4, len(batch.token_ids_S)
    figure = f"{tokens / seconds:,.0f} tokens/s, {flops / seconds / 1e12:.3g} TFLOP/s"
    peak = peak_tflops(torch.cuda.get_device_name()) if device == "cuda" else None
    share = f", MFU {flops / seconds / 1e12 / peak:.0%}" if peak else ""
    yield Row(
        f"actor: update with {sum(w.numel() for w in before.values()) / 1e6:,.1f}M parameters", "measured", figure + share
    )
    planned = planned_update(path, sizes)
    if device != "cuda":
        figure = f"needs a GPU, whose allocator counts; the plan's {planned / GIB:.3f} GiB"
        yield Row("actor: memory against the plan", "not possible", figure)
        return
    if peak:
        # The plan's share of products on Hopper, one forward pass more for gradient checkpointing.
        planned_s = 4 / 3 * flops / (0.65 * peak * 1e12)
        yield Row(
            "actor: seconds of an update against its products", "measured", f"{seconds:.2f} s, products {planned_s:.2f} s"
        )
    # What the allocator keeps and nothing uses is given out before anything runs out.
    allocated = torch.cuda.max_memory_allocated()
    figure = f"allocated {allocated / GIB:.1f}, reserved {torch.cuda.max_memory_reserved() / GIB:.1f} GiB"
    yield passed("actor: memory against the plan", allocated < planned, figure, f"at most the plan's {planned / GIB:.1f} GiB")


def planned_update(path: Path, sizes: Sizes) -> int:
    """Return the bytes that the plan gives the update of an actor that has one GPU to itself."""
    from grpo_rl.config.derived import Machine
    from grpo_rl.config.schema.tree import Config
    from grpo_rl.plan.decisions import decide
    from grpo_rl.plan.memory import CONTEXT, gpu_phases

    parts = Config().actor_rollout_ref
    actor = replace(parts.actor, use_kl_loss=False, ppo_max_token_len_per_gpu=sizes.tokens, ppo_mini_batch_size=32)
    rollout = replace(parts.rollout, nnodes=1, n_gpus_per_node=1)
    parts = replace(parts, model=replace(parts.model, path=str(path)), actor=actor, rollout=rollout)
    config = replace(Config(), actor_rollout_ref=parts, data=replace(Config().data, train_batch_size=32))
    plan = decide(config, Machine(num_gpus=1, num_cpus=8, device="cuda"))
    return next(phase.needed for phase in gpu_phases(plan) if phase.what == "update") - CONTEXT


def check_offload(device: str, sizes: Sizes, folder: Path) -> Iterator[Row]:
    """Watch the device's free memory from a second process while a rank moves to host memory and back."""
    actor, batch = actor_of(model_folder(sizes, folder), device), batch_of(sizes)
    actor.update(batch, update_of(batch))
    before, parameters = weights_of(actor), [id(parameter) for parameter in actor.model.parameters()]
    moments = [id(parameter) for group in actor.optimizer.param_groups for parameter in group["params"]]
    watched = Watcher() if device == "cuda" else None
    at_rest = watched.free() if watched else 0
    actor.vacate()
    away = watched.free() if watched else 0
    actor.occupy()
    back = watched.free() if watched else 0
    same = largest_difference(before, weights_of(actor)) == 0
    kept = parameters == [id(one) for one in actor.model.parameters()] and set(parameters) == set(moments)
    yield passed("offload: the same weights, which the optimizer still refers to", same and kept, f"{same}, {kept}", "both")
    actor.update(batch, update_of(batch))
    if watched is None:
        yield Row("offload: memory seen from a second process", "not possible", "needs a GPU")
        return
    state = 12 * sum(weight.numel() for weight in before.values())
    figure = f"gave {(away - at_rest) / GIB:.2f} of {state / GIB:.2f} GiB, took {(away - back) / GIB:.2f}"
    yield passed(
        "offload: memory seen from a second process", away - at_rest > 0.95 * state, figure, "95 % of weights and moments"
    )
    watched.close()


class Watcher:
    """A second process that looks at the device's free memory."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_watch, args=(other,), daemon=True)
        self._process.start()
        self.free()

    def free(self) -> int:
        """Return the bytes that are free."""
        wait("cuda")
        self._pipe.send("free")
        if not self._pipe.poll(60):
            raise TimeoutError("the second process did not answer within 60 s")
        return int(self._pipe.recv())

    def close(self) -> None:
        """End the process."""
        self._pipe.send(None)
        self._process.join(30)


def _watch(pipe: Any) -> None:
    while pipe.recv() is not None:
        pipe.send(torch.cuda.mem_get_info()[0])


def check_ipc(device: str, sizes: Sizes, folder: Path) -> Iterator[Row]:
    """Send weights by CUDA IPC to a process that opens them as vLLM's engine does, in two updates and small buckets."""
    name = "weights by CUDA IPC to a second process"
    if device != "cuda":
        yield Row(name, "not possible", "needs a GPU")
        return
    from grpo_rl.gpu_allocator import use_expandable_segments
    from grpo_rl.rollout.senders import make_sender
    from grpo_rl.rollout.weights import merge_ranks

    # As in a rank, whose buffer has to be made without them.
    use_expandable_segments()
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    receiver = context.Process(target=_receive, args=(other,), daemon=True)
    receiver.start()
    sender, same = make_sender("ipc", 8 << 20, verify=True), []
    held: list[int] = []
    for seed in (1, 2):
        generator = torch.Generator(device="cuda").manual_seed(seed)
        tensors = {f"w{i}": torch.randn(1000 * (i + 1), 333, generator=generator, device="cuda") for i in range(6)}
        for bucket in sender.buckets((name, tensor.bfloat16()) for name, tensor in tensors.items()):
            pipe.send(merge_ranks([bucket]))
            if not pipe.poll(60):
                raise TimeoutError("the receiver did not answer within 60 s")
            pipe.recv()
        pipe.send("digests")
        same.append(pipe.recv() == sender.sent_digests())
        del tensors
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()
        held.append(torch.cuda.memory_allocated())
    pipe.send(None)
    receiver.join(30)
    yield passed(name, all(same), f"equal digests: {same}", "both updates, to the bit")
    figure = f"{[f'{size / 2**20:.1f} MiB' for size in held]} after each"
    yield passed(
        "weights by CUDA IPC: the sender's buffers are given back", held[1] <= held[0], figure, "not more after the second"
    )


def _receive(pipe: Any) -> None:
    """Take over buckets as `IPCWeightTransferEngine.receive_weights` of vLLM does: copy, answer."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    from grpo_rl.rollout.weights import digest

    importer = Importer(rebuild_cuda_tensor)
    digests: dict[str, str] = {}
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    while (bucket := pipe.recv()) is not None:
        if bucket == "digests":
            importer.close()
            pipe.send(digests)
            digests = {}
            continue
        flat, start = importer.rebuild(bucket.ipc_handles[uuid][0]), 0
        for name, kind, shape, size in zip(bucket.names, bucket.dtypes, bucket.shapes, bucket.sizes, strict=True):
            tensor = flat[start : start + size].view(getattr(torch, kind)).view(shape).clone()
            digests[name], start = digest(tensor), start + size
        pipe.send("loaded")


class Importer:
    """The receiver's mapping of the sender's buffer: one for each export, however many buckets it carries.

    As vLLM's `PackedBufferImporter`: the sender counts one release for each export, and more of them keep its buffer for ever.
    """

    def __init__(self, rebuild: Callable[..., Tensor]) -> None:
        self._rebuild = rebuild
        self._entry: tuple[tuple[object, ...], Tensor] | None = None

    def rebuild(self, handle: Iterable[object]) -> Tensor:
        """Return the sender's buffer, opened on the first device that this process sees."""
        arguments = list(handle)
        arguments[6] = 0
        if self._entry is None or self._entry[0] != tuple(arguments):
            self._entry = tuple(arguments), self._rebuild(*arguments)
        return self._entry[1]

    def close(self) -> None:
        """Release the mapping."""
        self._entry = None


def check_checkpoint(device: str, sizes: Sizes, folder: Path) -> Iterator[Row]:
    """Write a checkpoint beside an update, and read it into another rank: it has the weights from before the update."""
    path, batch = model_folder(sizes, folder), batch_of(sizes)
    actor, saved = actor_of(path, device), Path(tempfile.mkdtemp(prefix="checkpoint-", dir=folder))
    actor.update(batch, update_of(batch))
    before = weights_of(actor)
    alone = seconds_of(lambda: actor.update(batch, update_of(batch)), device, times=2)
    now = weights_of(actor)
    began = time.perf_counter()
    actor.save(str(saved), in_background=True)
    stopped = time.perf_counter() - began
    began = time.perf_counter()
    actor.update(batch, update_of(batch))
    beside = time.perf_counter() - began
    while actor.saved(30.0) is None:
        pass
    another = actor_of(path, device)
    another.load(str(saved))
    difference = largest_difference(now, weights_of(another))
    figure = f"difference {difference:g} after {largest_difference(now, before):.1e} of training"
    yield passed("checkpoint beside an update: the weights of its beginning", difference == 0, figure, "0, to the bit")
    times = f"training stood still for {stopped:.2f} s; update {beside:.2f} s beside the writing, {alone:.2f} s alone"
    yield Row("checkpoint beside an update: time", "measured", times)


def check_memory_runs_out(device: str, sizes: Sizes, folder: Path) -> Iterator[Row]:
    """Run out of memory for real: the error is recognised, and an update works after it."""
    from grpo_rl.machine_memory import out_of_memory

    actor, batch = actor_of(model_folder(sizes, folder), device), batch_of(sizes)
    actor.update(batch, update_of(batch))
    held: list[Tensor] = []
    found = None
    try:
        while len(held) < 10_000:
            held.append(torch.empty(2**60 if device == "cpu" else GIB, dtype=torch.uint8, device=device))
    except (RuntimeError, MemoryError) as error:
        found = out_of_memory(error)
    held.clear()
    yield passed("memory runs out: recognised", found is not None, str(found)[:90], "an OutOfMemory with figures")
    actor.memory.release()
    (stats,) = actor.update(batch, update_of(batch))
    yield passed(
        "memory runs out: an update works after it",
        not stats["same/nonfinite"],
        f"loss finite: {not stats['same/nonfinite']}",
        "finite",
    )


def check_same_twice(device: str, sizes: Sizes, folder: Path) -> Iterator[Row]:
    """Make the same update twice from the same weights, as it comes and with deterministic kernels."""
    path, batch = model_folder(sizes, folder), batch_of(sizes)

    def trained(*, deterministic: bool = False) -> dict[str, Tensor]:
        actor = actor_of(path, device, deterministic=deterministic)
        for _ in range(2):
            actor.update(batch, update_of(batch))
        return weights_of(actor)

    free = largest_difference(trained(), trained())
    if device == "cuda":
        yield Row("the same updates twice: largest difference", "measured", f"{free:.1e}")
    else:
        yield passed("the same updates twice: largest difference", free == 0, f"{free:.1e}", "0 on a CPU")
    try:
        fixed = largest_difference(trained(deterministic=True), trained(deterministic=True))
        on = torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    yield passed("the same with trainer.deterministic", fixed == 0 and on, f"{fixed:.1e}", "0")


Check = Callable[[str, Sizes, Path], Iterable[Row]]
CHECKS: dict[str, Check] = {
    "policy": check_policy,
    "shared": check_shared,
    "learns": check_learns,
    "variants": check_variants,
    "mixed": check_mixed,
    "head": check_head,
    "attention": check_attention,
    "actor": check_actor,
    "offload": check_offload,
    "ipc": check_ipc,
    "checkpoint": check_checkpoint,
    "memory": check_memory_runs_out,
    "twice": check_same_twice,
}
