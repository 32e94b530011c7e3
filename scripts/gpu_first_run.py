"""The first run on a new GPU machine: thirteen checks, each row printed and written to a file as soon as it is known.

    python scripts/gpu_first_run.py --out out 1 2 3 4 5 6 7 8 9 10      # torch, transformers and numpy are enough
    PYTHONPATH=site python scripts/gpu_first_run.py --out out 11 --rows rows.jsonl --tokenizer FOLDER     # and Ray, Hydra
    PYTHONPATH=site python scripts/gpu_first_run.py --out out 13 12 --rows rows.jsonl --tokenizer FOLDER  # and vLLM
    python scripts/gpu_first_run.py --device cpu --out out              # the rehearsal, in tiny sizes

     1  card, matrix product, copy           7  learning, offload, checkpoint
     2  attention                            8  out of memory; the same update twice
     3  LM head in each precision            9  memory and speed of the actor against the plan
     4  policy against the CPU              10  against bare torch on the same rollouts
     5  weights by CUDA IPC                 11  the main job with the engine of transformers
     6  shared prompts                      12  the main job with vLLM
                                            13  seconds of sampling, sleep, a separate process

Each row has the value that was expected before anything was run. scripts/bare_machine.py brings Ray and vLLM to a machine
without a network. The exit code is 1 if a row failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

SCRIPTS = Path(__file__).resolve().parent
sys.path[:0] = [str(SCRIPTS), str(SCRIPTS.parent)]
import gpu_check  # noqa: E402
import gpu_checks  # noqa: E402
import gpu_sampling  # noqa: E402
from gpu_checks import TINY, Row, Sizes, passed, seconds_of  # noqa: E402

CHECKS: dict[int, tuple[str, ...]] = {
    1: ("ceilings",),
    2: ("attention",),
    3: ("head",),
    4: ("policy",),
    5: ("ipc",),
    6: ("shared",),
    7: ("learns", "offload", "checkpoint"),
    8: ("memory", "twice"),
    9: ("actor",),
    10: ("bare_torch",),
    11: ("main_job_hf",),
    12: ("main_job_vllm",),
    13: ("sampling",),
}
"""The names of the checks behind each number: those of gpu_checks.py, and those below."""

NUM_GROUPS, GROUP_SIZE = 8, 8
STEP_FIGURES = ("reward/mean", "rollout/logprob_diff_mean", "timing_s/gen", "timing_s/sync_weights", "timing_s/update_actor")
"""What is printed of each step of a main job as soon as it is there."""


def check_ceilings(device: str, sizes: Sizes, folder: Path) -> Iterator[Row]:
    """Measure a bf16 matrix product and a copy within device memory."""
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        name = f"{torch.cuda.get_device_name()}, {total / 2**30:.1f} GiB, {free / 2**30:.1f} free, torch {torch.__version__}"
        yield Row("card", "measured", name)
    side = 8192 if device == "cuda" else 256
    left, right = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    seconds = seconds_of(lambda: left @ right, device, times=10)
    yield Row(f"bf16 product of {side}^3", "measured", f"{2 * side**3 / seconds / 1e12:.0f} TFLOP/s", "H100: about 790")
    source = torch.randn(2**30 if device == "cuda" else 2**20, device=device)
    target = torch.empty_like(source)
    seconds = seconds_of(lambda: target.copy_(source), device, times=10)
    yield Row("copy, read and written", "measured", f"{8 * source.numel() / seconds / 1e12:.2f} TB/s", "H100: about 3.0")


def rollouts_of(sizes: Sizes, tiny: bool) -> Any:
    """Return 64 rollouts with lengths as GSM8K has them: 8 prompts of 60 to 160 tokens, responses of 80 to 480."""
    from grpo_rl.types import Batch

    generator = torch.Generator().manual_seed(11)
    shrink = 8 if tiny else 1
    prompts_G = torch.randint(60, 160, (NUM_GROUPS,), generator=generator) // shrink
    prompts_N = prompts_G.repeat_interleave(GROUP_SIZE)
    responses_N = torch.randint(80, 480, (NUM_GROUPS * GROUP_SIZE,), generator=generator) // shrink
    tokens = []
    for group, length in enumerate(prompts_G.tolist()):
        prompt = torch.randint(2, sizes.vocab, (length,), generator=generator)
        for response in responses_N[group * GROUP_SIZE : (group + 1) * GROUP_SIZE].tolist():
            tokens += [prompt, torch.randint(2, sizes.vocab, (response,), generator=generator)]
    advantages_N = torch.randn(len(responses_N), generator=generator)
    return Batch(
        prompt_lengths_N=prompts_N,
        response_lengths_N=responses_N,
        group_N=torch.arange(NUM_GROUPS).repeat_interleave(GROUP_SIZE),
        token_ids_S=torch.cat(tokens),
        rewards_N=torch.zeros(len(responses_N)),
        rollout_logprobs_T=torch.full((int(responses_N.sum()),), -3.0),
        advantages_T=advantages_N.repeat_interleave(responses_N),
    )


def check_bare_torch(device: str, sizes: Sizes, folder: Path) -> Iterator[Row]:
    """Time an update of the actor beside plain torch: transformers' Qwen3 with SDPA, padded, bf16 autocast, fused AdamW."""
    path = gpu_checks.model_folder(sizes, folder)
    batch = rollouts_of(sizes, tiny=device == "cpu")
    tokens = int(batch.token_ids_S.numel())
    rows = list(range(NUM_GROUPS * GROUP_SIZE))
    by_length = sorted(rows, key=lambda row: -int(batch.prompt_lengths_N[row] + batch.response_lengths_N[row]))
    bare = seconds_of(bare_update(path, batch, by_length, device, rows_at_once=16), device)
    yield Row(f"bare torch: update of 64 rollouts, {tokens:,} tokens", "measured", f"{bare:.3f} s")
    two = tuple(tuple(rows[start : start + 32]) for start in (0, 32))
    variants: dict[str, dict[str, Any]] = {
        "with gradient checkpointing": {},
        "without gradient checkpointing, head in chunks of 16,384": {
            "model": {"enable_gradient_checkpointing": False, "lm_head_chunk_tokens": 16_384}
        },
        "the same, compiled": {
            "model": {"enable_gradient_checkpointing": False, "lm_head_chunk_tokens": 16_384},
            "policy": {"compiled": True},
        },
    }
    for name, options in variants.items():
        if device == "cpu" and "compiled" in name:
            yield Row(f"ours, {name}", "not possible", "is for GPUs")
            continue
        actor = gpu_checks.actor_of(path, device, **options)
        update = dataclasses.replace(gpu_checks.update_of(batch), steps=(steps_of(batch, two),))
        seconds = seconds_of(lambda actor=actor, update=update: actor.update(batch, update), device)  # type: ignore[misc]
        figure = f"{seconds:.3f} s, {tokens / seconds:,.0f} tokens/s; bare / ours {bare / seconds:.2f}"
        yield Row(f"ours, {name}", "measured", figure, "bare / ours above 1")
        del actor
        if device == "cuda":
            torch.cuda.empty_cache()


def steps_of(batch: Any, micro_batches: tuple[tuple[int, ...], ...]) -> Any:
    """Return one optimizer step over these micro-batches."""
    from grpo_rl.types import Counts
    from grpo_rl.workers.specs import OptimizerStep

    return OptimizerStep(Counts.of(batch.trained_lengths_N, batch.group_N), micro_batches)


def bare_update(path: Path, batch: Any, order: list[int], device: str, rows_at_once: int) -> Callable[[], None]:
    """Return a function that makes one policy-gradient update with plain torch, on padded micro-batches of whole sequences."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    total = int(batch.response_lengths_N.sum())
    sequences = torch.split(batch.token_ids_S, (batch.prompt_lengths_N + batch.response_lengths_N).tolist())
    advantages = torch.split(batch.advantages_T, batch.response_lengths_N.tolist())

    def update() -> None:
        for start in range(0, len(order), rows_at_once):
            rows = order[start : start + rows_at_once]
            longest = max(len(sequences[row]) for row in rows)
            ids, weights = torch.zeros(len(rows), longest, dtype=torch.long), torch.zeros(len(rows), longest)
            padding = torch.zeros(len(rows), longest, dtype=torch.long)
            for place, row in enumerate(rows):
                ids[place, : len(sequences[row])] = sequences[row]
                padding[place, : len(sequences[row])] = 1
                weights[place, int(batch.prompt_lengths_N[row]) : len(sequences[row])] = advantages[row]
            ids, weights, padding = ids.to(device), weights.to(device), padding.to(device)
            with torch.autocast(device, torch.bfloat16):
                logits = model(ids, attention_mask=padding, use_cache=False).logits[:, :-1]
            logprobs = -torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
            ratio = (logprobs - logprobs.detach()).exp()
            (-(ratio * weights[:, 1:].flatten()).sum() / total).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return update


def main_job(engine: str, device: str, out: Path, options: argparse.Namespace, extra: list[str]) -> Iterator[Row]:
    """Run the main command by bare_machine.py with this engine, and judge its metrics."""
    words = [f"actor_rollout_ref.rollout.name={engine}", "trainer.val_before_train=false", *extra]
    words += ["actor_rollout_ref.rollout.checkpoint_engine.verify_checksum=true"]
    command = [sys.executable, str(SCRIPTS / "bare_machine.py"), "run", "--out", str(out), "--steps", str(options.steps)]
    if device == "cpu":
        command += ["--tiny"]
        words += ["actor_rollout_ref.actor.optim.lr=3e-3"]
    else:
        words += ["trainer.device=cuda", "trainer.n_gpus_per_node=1"]
        command += ["--tokenizer", str(options.tokenizer)]
    if options.rows is not None:
        command += ["--rows", str(options.rows)]
    name, began = f"main job with {engine}", time.perf_counter()
    # The sampler of vLLM 0.32 imports FlashInfer unless it is told otherwise, and a machine without a network may lack it.
    sampler = {} if importlib.util.find_spec("flashinfer") else {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
    log, metrics = out.parent / f"{out.name}.log", out / "runs" / "bare" / "metrics.jsonl"
    steps: list[dict[str, Any]] = []
    with log.open("w") as stream:
        job = subprocess.Popen([*command, "--", *words], stdout=stream, stderr=subprocess.STDOUT, env=os.environ | sampler)
        ended = False
        while not ended:
            ended = job.poll() is not None
            for record in steps_in(metrics)[len(steps) :]:
                steps.append(record)
                figures = [f"{key} {record[key]:.3g}" for key in STEP_FIGURES if key in record]
                yield Row(f"{name}: step {record['step']}, {time.perf_counter() - began:.0f} s", "measured", ", ".join(figures))
            time.sleep(0.0 if ended else 0.5)
    lines = log.read_text().splitlines()
    for line in lines:
        if line.startswith("starting ") and not line.endswith("..."):
            yield Row(f"{name}: start", "measured", line)
    verdict = next((line for line in reversed(lines) if line.startswith("reward ")), "no reward")
    figure = f"{verdict}, {time.perf_counter() - began:.0f} s"
    yield passed(f"{name}: ends, and its reward rose", job.returncode == 0, figure, "rises")
    if job.returncode:
        print("\n".join(lines)[-6000:], flush=True)
    if not steps:
        yield Row(f"{name}: steps", "failed", "no step has metrics", "one at least")
        return
    worst, bound = max(record["rollout/logprob_diff_mean"] for record in steps), 0.02 if engine == "vllm" else 0.03
    if device == "cpu":
        bound = 1e-4
    yield passed(f"{name}: rollout/logprob_diff_mean, largest", worst < bound, f"{worst:.1e}", f"{bound:g}")
    names = sorted({key for record in steps for key in record if key.startswith("timing_s/")})
    for key in names:
        values = [record[key] for record in steps[1:] if key in record]
        plans = [record[f"plan/{key}"] for record in steps[1:] if f"plan/{key}" in record]
        if values:
            plan = f", plan {statistics.median(plans):.3f}" if plans else ""
            yield Row(f"{name}: {key}, median", "measured", f"{statistics.median(values):.3f} s{plan}")
    for key in sorted({key for record in steps for key in record if key.startswith("perf/")}):
        values = [record[key] for record in steps[1:] if key in record]
        if values:
            yield Row(f"{name}: {key}, median", "measured", f"{statistics.median(values):.4g}")


def steps_in(metrics: Path) -> list[dict[str, Any]]:
    """Return the records of training steps in a file of metrics, whose last line may not be whole yet."""
    lines = metrics.read_text().splitlines(keepends=True) if metrics.is_file() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return [record for record in records if "rollout/logprob_diff_mean" in record]


def check_main_job_hf(device: str, sizes: Sizes, folder: Path) -> Iterator[Row]:
    yield from main_job("hf", device, OPTIONS.out / "main_job_hf", OPTIONS, OPTIONS.words)


def check_main_job_vllm(device: str, sizes: Sizes, folder: Path) -> Iterator[Row]:
    yield from main_job("vllm", device, OPTIONS.out / "main_job_vllm", OPTIONS, OPTIONS.words)


def check_sampling(device: str, sizes: Sizes, folder: Path) -> Iterator[Row]:
    # vLLM has no kernels for small heads on CPUs.
    yield from gpu_sampling.check_sampling(
        device, sizes if device == "cuda" else dataclasses.replace(TINY, head_dim=32), folder
    )


OWN: dict[str, gpu_checks.Check] = {
    "ceilings": check_ceilings,
    "bare_torch": check_bare_torch,
    "main_job_hf": check_main_job_hf,
    "main_job_vllm": check_main_job_vllm,
    "sampling": check_sampling,
}
gpu_checks.CHECKS.update(OWN)
OPTIONS = argparse.Namespace()


def rows_of(name: str, device: str, folder: Path) -> Iterator[Row]:
    """Yield the rows of one check. Those with engines start processes of their own; every other check gets one."""
    if name in ("main_job_hf", "main_job_vllm", "sampling"):
        yield from OWN[name](device, TINY if device == "cpu" else Sizes(), folder)
    else:
        yield from gpu_check.in_process(name, device, folder)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("numbers", nargs="*", type=int, help="of the checks; default: all", metavar="NUMBER")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True, help="rows.jsonl is appended to there")
    parser.add_argument("--rows", type=Path, help="11, 12: GSM8K's questions as JSON Lines")
    parser.add_argument("--tokenizer", type=Path, help="11, 12: the folder of Qwen2.5's tokenizer")
    parser.add_argument("--steps", type=int, default=12, help="11, 12: training steps")
    parser.add_argument("--word", dest="words", action="append", default=[], help="11, 12: a further key=value")
    parser.parse_args(argv, OPTIONS)
    numbers = OPTIONS.numbers or list(CHECKS)
    if unknown := [number for number in numbers if number not in CHECKS]:
        parser.error(f"there are checks 1 to {max(CHECKS)}, not {unknown}")
    OPTIONS.out.mkdir(parents=True, exist_ok=True)
    failed = False
    # cuBLAS reads it when it starts; deterministic kernels need it.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with (OPTIONS.out / "rows.jsonl").open("a") as file, tempfile.TemporaryDirectory(prefix="gpu_first_run_") as folder:
        for number in numbers:
            for name in CHECKS[number]:
                began = time.perf_counter()
                for row in rows_of(name, OPTIONS.device, Path(folder)):
                    failed |= row.state == "failed"
                    print(f"{number:>2}  {gpu_check.line(row)}", flush=True)
                    file.write(json.dumps({"number": number, **dataclasses.asdict(row)}) + "\n")
                    file.flush()
                print(f"    {name}: {time.perf_counter() - began:.1f} s", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
