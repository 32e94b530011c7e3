"""Check 13 of `gpu_first_run.py`: seconds of sampling by vLLM, without and with CUDA graphs, compiled, in a separate process.

Each way of running the engine is a process of its own. All import vLLM side by side; then they build their engines and sample one
after another. Prompts have 96 tokens, each with 8 responses of a fixed length. Two ways also give their memory back and take
weights by CUDA IPC, one of them in the separate process.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_checks import GIB, TINY, Row, Sizes, model_folder, passed

PROMPT_TOKENS, RESPONSE_TOKENS, GROUP_SIZE = 96, 96, 8
GRAPHS = {"cudagraph_capture_sizes": [1, 8, 64, 128, 256, 384, 512, 768, 1024]}
WAYS: dict[str, dict[str, Any]] = {
    "enforce_eager": {"enforce_eager": True},
    "CUDA graphs": {"use_torch_compile": False, "engine_kwargs": GRAPHS},
    "CUDA graphs, separate process": {"use_torch_compile": False, "engine_kwargs": GRAPHS, "separate_process": True},
    "compiled, CUDA graphs, separate process": {"engine_kwargs": GRAPHS, "separate_process": True},
}
"""Fields of `EngineSpec` by the names of the rows."""
CPU_WAYS: dict[str, dict[str, Any]] = {"enforce_eager": {}, "separate process": {"separate_process": True}}
DEADLINE_S = 150.0
"""Seconds that one way may take after vLLM is imported."""


def check_sampling(device: str, sizes: Sizes, folder: Path) -> Iterator[Row]:
    """Yield the rows of each way, as they come; a way that fails has a row, and the next one goes on."""
    context = multiprocessing.get_context("spawn")
    ways = []
    for name, fields in (WAYS if device == "cuda" else CPU_WAYS).items():
        pipe, other = context.Pipe()
        # No daemon: an engine starts a process of its own.
        process = context.Process(target=_serve, args=(other, name, fields, device, sizes))
        process.start()
        other.close()
        ways.append((name, process, pipe))
    try:
        path = model_folder(sizes, folder)
        for name, process, pipe in ways:
            deadline, ended = time.monotonic() + DEADLINE_S, False
            try:
                pipe.send(path)
                while not ended and pipe.poll(max(0.0, deadline - time.monotonic())):
                    row = pipe.recv()
                    ended = row is None
                    if row is not None:
                        yield row
                if not ended:
                    yield Row(f"sampling, {name}", "failed", f"did not end within {DEADLINE_S:.0f} s")
            except (EOFError, OSError):
                yield Row(f"sampling, {name}", "failed", f"the process ended with exit code {process.exitcode}")
            process.join(20)
            process.kill()
    finally:
        for _, process, _ in ways:
            process.kill()


def _serve(pipe: Any, name: str, fields: dict[str, Any], device: str, sizes: Sizes) -> None:
    if importlib.util.find_spec("flashinfer") is None:
        # The sampler of vLLM 0.32 imports it unless it is told otherwise.
        os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    try:
        for row in rows_of(pipe, name, fields, device, sizes):
            pipe.send(row)
    except Exception as error:
        traceback.print_exc()
        pipe.send(Row(f"sampling, {name}", "failed", f"{type(error).__name__}: {error}"[:200]))
    pipe.send(None)


def rows_of(pipe: Any, name: str, fields: dict[str, Any], device: str, sizes: Sizes) -> Iterator[Row]:
    """Import vLLM, wait for the model's folder in the pipe, and yield the rows of one way."""
    from grpo_rl.rollout.engine import EngineSpec
    from grpo_rl.rollout.engine_environment import engine_environment, set_missing

    cuda = device == "cuda"
    counts = (256, 512, 1024) if cuda else (4, 8)
    spec = EngineSpec(
        model_path="",
        max_model_len=PROMPT_TOKENS + RESPONSE_TOKENS,
        device="cuda" if cuda else "cpu",
        dtype="bfloat16" if cuda else "float32",
        max_num_seqs=max(counts),
        max_num_batched_tokens=16_384 if cuda else 256,
        enforce_eager=not cuda,
        kv_cache_memory_bytes=24 * GIB,
        sleep_mode=cuda,
        weight_backend="ipc" if cuda else "object_store",
        verify_checksum=True,
    )
    spec = replace(spec, **fields)
    set_missing(engine_environment(spec))
    import vllm.v1.engine.llm_engine  # noqa: F401

    from grpo_rl.rollout.vllm.vllm_engine import VllmEngine

    path = pipe.recv()
    spec = replace(spec, model_path=str(path))
    free = free_memory(cuda)
    began = time.perf_counter()
    engine = VllmEngine(spec)
    yield Row(f"sampling, {name}: engine starts", "measured", f"{time.perf_counter() - began:.1f} s")
    seconds_of_sampling(engine, min(counts), 8, sizes.vocab)
    for count in counts:
        seconds = seconds_of_sampling(engine, count, RESPONSE_TOKENS, sizes.vocab)
        figure = f"{seconds:.2f} s, {1000 * seconds / RESPONSE_TOKENS:.1f} ms a step, {count * RESPONSE_TOKENS / seconds:,.0f} tokens/s"
        yield Row(f"sampling, {name}: {count:,} x {RESPONSE_TOKENS} tokens", "measured", figure)
    yield from sleep_and_update(engine, spec, name, path, free)
    engine.close()


def requests_of(tag: str, count: int, tokens: int, vocab: int, temperature: float = 1.0) -> list[Any]:
    """Return so many requests, groups of which share a prompt."""
    from grpo_rl.types import Request, Sampling

    generator = np.random.default_rng(7)
    prompts = generator.integers(2, vocab, (-(-count // GROUP_SIZE), PROMPT_TOKENS), dtype=np.int32)
    return [
        Request(f"{tag}-{number}", prompts[number // GROUP_SIZE], Sampling(tokens, temperature, seed=number, ignore_eos=True))
        for number in range(count)
    ]


def sample(engine: Any, requests: list[Any]) -> list[Any]:
    """Return the completions, in the order in which they end."""
    engine.submit(requests)
    completions: list[Any] = []
    while engine.num_unfinished:
        completions += engine.step()
    return completions


def first_logprobs(engine: Any, requests: list[Any]) -> dict[str, float]:
    """Return the log-prob of each request's likeliest first token. Later ones may follow another token, if two are as likely."""
    return {completion.request_id: float(completion.logprobs[0]) for completion in sample(engine, requests)}


def seconds_of_sampling(engine: Any, count: int, tokens: int, vocab: int) -> float:
    requests = requests_of(f"timed{tokens}", count, tokens, vocab)
    began = time.perf_counter()
    completions = sample(engine, requests)
    assert len(completions) == count and all(len(completion.response_ids) == tokens for completion in completions)
    return time.perf_counter() - began


def free_memory(cuda: bool) -> int:
    """Return the bytes of the device that no process has."""
    return torch.cuda.mem_get_info()[0] if cuda else 0


def sleep_and_update(engine: Any, spec: Any, name: str, path: Path, free: int) -> Iterator[Row]:
    """Let the engine sleep, and send it the weights of its own model: its log-probs are the same again.

    `free` is the device's free memory before the engine was built. One process cannot open its own memory by CUDA IPC, so on a GPU
    only an engine in a separate process is updated.
    """
    from safetensors.torch import load_file

    from grpo_rl.rollout.senders import make_sender

    cuda = spec.device == "cuda"
    requests = requests_of("greedy", 8 * GROUP_SIZE, 1, 128, temperature=0.0)[::GROUP_SIZE]
    before = first_logprobs(engine, requests)
    if cuda:
        awake = free_memory(cuda)
        engine.sleep()
        torch.cuda.synchronize()
        freed, held = free_memory(cuda) - awake, free - awake
        figure = f"{freed / GIB:.2f} of {held / GIB:.2f} GiB, {freed / held:.1%}"
        yield passed(f"sampling, {name}: memory that sleep gives back", freed >= 0.95 * held, figure, "95 %")
        if not spec.separate_process:
            return
        engine.wake_up("weights")
    dtype = getattr(torch, spec.dtype)
    weights = {key: tensor.to(spec.device, dtype) for key, tensor in load_file(path / "model.safetensors").items()}
    # A tied head is not in the file, and comes apart from a trainer.
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
    began = time.perf_counter()
    sender = make_sender(spec.weight_backend, spec.bucket_bytes, verify=True)
    engine.start_weight_update(engine.weight_version + 1)
    for bucket in sender.buckets(weights.items()):
        engine.load_bucket(bucket)
    engine.finish_weight_update()
    seconds = time.perf_counter() - began
    if cuda:
        engine.wake_up("kv_cache")
    equal = sender.sent_digests() == engine.received_digests()
    figure = f"equal digests: {equal}, {len(weights)} tensors, {seconds:.2f} s"
    yield passed(f"sampling, {name}: weights by {spec.weight_backend}", equal, figure, "to the bit")
    difference = max(abs(first_logprobs(engine, requests)[key] - value) for key, value in before.items())
    bound = 0.05 if cuda else 1e-4
    yield passed(
        f"sampling, {name}: log-probs of 8 first tokens after the update", difference < bound, f"{difference:.1e}", f"{bound:g}"
    )


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        for line in check_sampling("cpu", replace(TINY, head_dim=32), Path(scratch)):
            print(line, flush=True)
