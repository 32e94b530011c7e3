"""What a checkpoint costs a training step: `python scripts/bench_checkpoint.py` (11.8 M parameters, one rank, CPU).

The stall is the time for which training waits: with async_save the copy of weights and optimizer into host memory,
without it the whole save. The step is the actor's update alone, on 4 prompts x 8 responses x 64 tokens: a whole step
has sampling too and is longer, so the share that is printed is an upper bound. The bar: <= 5 %.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent))

PROMPTS, RESPONSES, PROMPT_TOKENS, RESPONSE_TOKENS = 4, 8, 8, 64


def make_actor(model: Path) -> Any:
    """One rank, with an optimizer that has moments after its first step."""
    from grpo_rl.algos.objective import Objective
    from grpo_rl.config.schema import ModelConfig, OptimConfig
    from grpo_rl.workers.actor import ActorWorker
    from grpo_rl.workers.specs import ActorSpec, PolicySpec, Rank

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    policy = PolicySpec(ModelConfig(path=str(model)), temperature=1.0, dtype="float32", train=True)
    spec = ActorSpec(policy, Objective(), OptimConfig(lr=1e-6), total_optimizer_steps=100, seed=1)
    return ActorWorker(spec, Rank(0, 1, "127.0.0.1", port, "cpu", 60.0))


def make_step() -> Any:
    """The work of one optimizer step."""
    import torch

    from grpo_rl.algos.aggregate import count
    from grpo_rl.types import Batch
    from grpo_rl.workers.specs import OptimizerStep

    num = PROMPTS * RESPONSES
    lengths_N = torch.full((num,), RESPONSE_TOKENS)
    group_N = torch.arange(PROMPTS).repeat_interleave(RESPONSES)
    batch = Batch(
        prompt_lengths_N=torch.full((num,), PROMPT_TOKENS),
        response_lengths_N=lengths_N,
        group_N=group_N,
        token_ids_S=torch.randint(64, 2048, (num * (PROMPT_TOKENS + RESPONSE_TOKENS),)),
        rewards_N=torch.rand(num),
        rollout_logprobs_T=torch.full((num * RESPONSE_TOKENS,), -7.6),
        advantages_T=torch.randn(num).repeat_interleave(RESPONSE_TOKENS),
    )
    return OptimizerStep(count(lengths_N, group_N), (batch,))


def timed(call: Callable[[], Any]) -> float:
    """Seconds that the call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def bench(folder: Path, repeats: int) -> None:
    """Print medians."""
    from bench_step import make_model

    from grpo_rl.checkpoint.files import show_bytes
    from grpo_rl.checkpoint.store import CheckpointStore

    actor, step = make_actor(make_model(folder / "model", "10m")), make_step()
    actor.update([step])
    store = CheckpointStore(folder / "checkpoints", keep=2)
    steps, stalls, busy_steps, background, whole, commits, verified = ([] for _ in range(7))
    for number in range(repeats):
        steps.append(timed(lambda: actor.update([step])))
        began = time.perf_counter()
        draft = store.begin(2 * number, {}, actor.save_bytes())
        actor.begin_save(str(draft.folder), True)
        stalls.append(time.perf_counter() - began)
        busy_steps.append(timed(lambda: actor.update([step])))
        while (written := actor.saved(0.01)) is None:
            pass
        background.append(time.perf_counter() - began)
        commits.append(timed(lambda draft=draft, written=written: store.commit(draft, written)))
        write = lambda path: actor.save(str(path))  # noqa: E731
        whole.append(timed(lambda number=number, write=write: store.save(2 * number + 1, write, {})))
        verified.append(timed(lambda: store.latest(print)))
    size = sum(path.stat().st_size for path in (store.folder / f"step_{2 * repeats - 1}").rglob("*"))
    median = statistics.median
    stall = median(stalls) + median(commits)
    print(f"checkpoint: {show_bytes(size)}, medians of {repeats}")
    print(f"update: {median(steps):.2f} s; while a checkpoint is written: {median(busy_steps):.2f} s")
    print(f"stall, in the background: copy {median(stalls) * 1e3:.0f} ms + commit {median(commits) * 1e3:.0f} ms")
    print(f"  = {100 * stall / median(steps):.1f} % of the update; written after at most {median(background):.2f} s")
    print(f"stall, async_save=false: {median(whole) * 1e3:.0f} ms = {100 * median(whole) / median(steps):.1f} % of the update")
    print(f"verified on resume: {median(verified) * 1e3:.0f} ms = {size / median(verified) / 1e6:.0f} MB/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bench(Path(folder), arguments.repeats)


if __name__ == "__main__":
    main()
