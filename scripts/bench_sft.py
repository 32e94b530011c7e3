"""A benchmark of supervised training against a plain PyTorch loop, measured in one run on the same rows.

    .venv/bin/python scripts/bench_sft.py                 # 11.8 M and 1.1 M parameters, equal lengths and ragged
    .venv/bin/python scripts/bench_sft.py --model 1m --steps 9

(a) is the program: the schedule's step over Ray with one FSDP2 actor, which packs the rows. (b) is the loop that one
writes by hand: rows padded to the longest of their micro-batch, whole logits, cross-entropy, AdamW, in a plain process that has
the same cores. Both have the same model, rows and tokens in a micro-batch at most, and are started before the clock runs.
(a) and (b) take turns step by step, so that a slow moment of the machine hits both. The bars: throughput of (a) at least
0.95 x (b) at equal lengths, and at least 1.5 x (b) at ragged ones.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from bench_step import NUM_EOS, SIZES, VOCABULARY, make_model

BATCH, LENGTH, PROMPT = 32, 128, 8
MICRO_BATCH = 16
SETTLE_S = 0.05
"""Seconds between the two sides: OpenMP's threads spin for a while after their last work, on cores that are the other side's."""
BARS = {"equal": 0.95, "ragged": 1.5}


def make_rows(path: Path, num_rows: int, *, ragged: bool) -> Path:
    """Rows of a prompt of 8 tokens and a response: 119 tokens and the end, or geometric lengths with mean 32 of at most that."""
    rng = random.Random(0)

    def words(count: int) -> str:
        return " ".join(f"w{rng.randrange(NUM_EOS, VOCABULARY)}" for _ in range(count))

    def length() -> int:
        return min(LENGTH - PROMPT - 1, 1 + int(rng.expovariate(1 / 31))) if ragged else LENGTH - PROMPT - 1

    rows = [{"prompt": words(PROMPT), "response": words(length())} for _ in range(num_rows)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class BareLoop:
    """The loop that one writes by hand."""

    def __init__(self, path: str, micro_batch: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=True)
        self.micro_batch = micro_batch

    def step(self, rows: list[tuple[list[int], list[int]]]) -> tuple[float, int]:
        """Train on rows of token ids and trained positions; return the seconds that it took, and the cells that it filled."""
        import torch

        started, cells = time.perf_counter(), 0
        total = sum(len(positions) for _, positions in rows)
        for start in range(0, len(rows), self.micro_batch):
            chunk = rows[start : start + self.micro_batch]
            longest = max(len(ids) for ids, _ in chunk)
            ids_NL = torch.zeros(len(chunk), longest, dtype=torch.long)
            mask_NL, labels_NL = torch.zeros_like(ids_NL), torch.full_like(ids_NL, -100)
            for n, (ids, positions) in enumerate(chunk):
                ids_NL[n, : len(ids)] = torch.tensor(ids)
                mask_NL[n, : len(ids)] = 1
                labels_NL[n, positions] = ids_NL[n, positions]
            mask = None if bool(mask_NL.all()) else mask_NL
            logits_NLV = self.model(input_ids=ids_NL, attention_mask=mask, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(
                logits_NLV[:, :-1].flatten(0, 1), labels_NL[:, 1:].flatten(), reduction="sum"
            )
            (loss / total).backward()
            cells += ids_NL.numel()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - started, cells


_loop: BareLoop | None = None
"""The loop of the process that has one."""


def start_loop(path: str, micro_batch: int) -> int:
    """Make the loop in this process, with torch's own settings, and return the process's id."""
    global _loop
    _loop = BareLoop(path, micro_batch)
    return os.getpid()


def step_of_loop(rows: list[tuple[list[int], list[int]]]) -> tuple[float, int]:
    """Make one step of this process's loop."""
    assert _loop is not None
    return _loop.step(rows)


def bench(folder: Path, size: str, kind: str, steps: int) -> float:
    """Run program and loop in turns, print the table, and return the program's throughput over the loop's."""
    from grpo_rl.cluster.session.ray_session import ray_session, set_environment

    set_environment()  # before the import of Ray
    from grpo_rl.cluster.inputs import read_inputs
    from grpo_rl.cluster.start_roles import Cluster, start_roles
    from grpo_rl.config.compose import compose
    from grpo_rl.plan.make import make_plan
    from grpo_rl.schedules import offline
    from grpo_rl.telemetry.metrics.sinks import Sinks
    from grpo_rl.telemetry.rollout_log import RolloutLog
    from grpo_rl.telemetry.rundir import RunDir
    from grpo_rl.telemetry.terminal.console import Console
    from grpo_rl.trainer.parts import Output
    from grpo_rl.trainer.run import single_step
    from grpo_rl.trainer.session import Session

    rows = make_rows(folder / f"{kind}.jsonl", BATCH * (steps + 2), ragged=kind == "ragged")
    composed = compose(
        [
            *(f"data.train_files={rows}", "data.responses=rows", f"data.train_batch_size={BATCH}"),
            *(f"data.max_length={LENGTH}", "actor_rollout_ref.actor.policy_loss.loss_mode=sft"),
            *(f"actor_rollout_ref.model.path={folder / size}", "actor_rollout_ref.model.enable_gradient_checkpointing=false"),
            f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={MICRO_BATCH * LENGTH}",
            *(f"trainer.default_local_dir={folder / 'runs'}", f"trainer.total_training_steps={steps + 1}"),
            "trainer.device=cpu",
        ]
    )
    console = Console()
    with ExitStack() as stack:
        plan = make_plan(composed)
        run_dir = RunDir.create(plan.config.trainer.default_local_dir, f"{size}-{kind}")
        stack.callback(run_dir.release)
        cores, ray_init, alone = os.cpu_count() or 1, plan.config.ray_kwargs.ray_init, plan.computes_alone
        stack.enter_context(ray_session(ray_init, cores, run_dir.session_file, alone=alone))
        inputs = read_inputs(plan, run_dir, console)
        cluster = Cluster(inputs.plan, str(folder / size), "", run_dir.logs, console)
        stack.callback(cluster.shutdown)
        roles, _ = start_roles(cluster, inputs.plan, inputs.tokenizer)
        bare = stack.enter_context(ProcessPoolExecutor(1, get_context("spawn")))
        bare_pid = bare.submit(start_loop, str(folder / size), MICRO_BATCH).result()
        sinks = Sinks(run_dir, plan.config.trainer, composed.resolved)
        stack.callback(sinks.close)
        output = Output(run_dir, console, sinks, RolloutLog(run_dir))
        session = Session(plan.config, roles, output, rows=inputs.rows, total_steps=steps + 1, objective=plan.objective)
        batches = watch(session)
        actor = next(pid for name, pid in cluster.pids().items() if "actor" in name)
        measured = []
        for step in range(steps + 1):
            time.sleep(SETTLE_S)
            before = time.perf_counter(), core_seconds(os.getpid()) + core_seconds(actor), core_seconds(bare_pid)
            metrics = single_step(session, offline.train)
            seconds, own_cores = time.perf_counter() - before[0], core_seconds(os.getpid()) + core_seconds(actor) - before[1]
            time.sleep(SETTLE_S)
            bare_seconds, cells = bare.submit(step_of_loop, batches[-1]).result()
            bare_cores = core_seconds(bare_pid) - before[2]
            if step > 0:  # the first one warms everything up
                tokens = sum(len(ids) for ids, _ in batches[-1])
                measured.append((seconds, bare_seconds, own_cores, bare_cores, metrics["timing_s/update_actor"], tokens, cells))
    return report(size, kind, measured)


def core_seconds(pid: int) -> float:
    """Return the seconds that all threads of a process have had a core, which other work on the machine changes less."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def watch(session: Any) -> list[list[tuple[list[int], list[int]]]]:
    """Return a list to which each batch that the session draws is added, for the bare loop: tokens and trained places of each row."""
    batches: list[list[tuple[list[int], list[int]]]] = []
    draw = session.next_rows

    def next_rows() -> Any:
        batch = draw()
        lengths_N = batch.sequence_lengths_N
        starts, ids = (lengths_N.cumsum(0) - lengths_N).tolist(), batch.token_ids_S.split(lengths_N.tolist())
        places = batch.positions().split(batch.trained_lengths_N.tolist())
        rows = zip(ids, places, starts, strict=True)
        batches.append([(row.tolist(), (place - start).tolist()) for row, place, start in rows])
        return batch

    session.next_rows = next_rows
    return batches


def report(size: str, kind: str, measured: Sequence[tuple[float, ...]]) -> float:
    """Print medians over the steps; return the median of the ratios step by step."""
    ours, bare, cores, bare_cores, update, tokens, cells = (statistics.median(column) for column in zip(*measured, strict=True))
    ratios = sorted(row[1] / row[0] for row in measured)
    ratio = statistics.median(ratios)
    by_cores = statistics.median(row[3] / row[2] for row in measured)
    print(f"\n{size}, {kind} lengths: medians of {len(measured)} steps of {tokens:.0f} tokens")
    print(f"  the program    {ours:8.3f} s a step {tokens / ours:8.0f} tokens/s   of it the update {update:.3f} s")
    print(f"  the plain loop {bare:8.3f} s a step {tokens / bare:8.0f} tokens/s   in {cells:.0f} cells")
    print(f"  seconds of a core: {cores:.3f} and {bare_cores:.3f}, the loop's / the program's, step by step: {by_cores:.3f}")
    print(
        f"  throughput of the program / the loop's, step by step: {ratio:.3f} "
        f"({ratios[0]:.2f} to {ratios[-1]:.2f}; bar: >= {BARS[kind]})"
    )
    return ratio


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=7, help="measured steps, after one for warming up")
    parser.add_argument("--model", choices=sorted(SIZES), help="how many parameters; both, if not given")
    parser.add_argument("--lengths", choices=sorted(BARS), help="the kind of rows; both, if not given")
    arguments = parser.parse_args()
    kept = True
    with tempfile.TemporaryDirectory() as folder:
        for size in [arguments.model] if arguments.model else sorted(SIZES):
            make_model(Path(folder) / size, size)
            for kind in [arguments.lengths] if arguments.lengths else sorted(BARS):
                kept &= bench(Path(folder), size, kind, arguments.steps) >= BARS[kind]
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
