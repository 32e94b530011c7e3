"""A benchmark of the cost of checkpoints: `python scripts/bench_checkpoint.py` (11.8 M parameters, one rank, CPU).

Blocks of steps with a save begun after the first of them, and blocks without, take turns; a block is long enough for the
save to end in it. The stall is the time for which training waits because of a save: the controller in `begin` and in
its looks, and the optimizer step for the copy of the state. The bar: <= 5 % of one step. The whole cost of a save is
how much longer its block takes: the stall, and what the threads that copy and write take away from the training beside
them, which is nothing where a core is idle; on a machine that others use too, it is mostly noise.

A step is the actor's update alone, as a run's controller makes it, with one look at the save per phase of a step.
There is no Ray and no engine: a whole step has sampling too and is longer, so the share is an upper bound.
With `--rivals N` as many processes that compute without pause run beside it, one per core for a machine without an
idle one.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent))

PROMPT_TOKENS, RESPONSE_TOKENS = 8, 64
LOOKS = 6
"""Phases of a step: generation, reward, log-probs, reference, update, save."""


class InProcess:
    """A worker group of one rank, in this process."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Return what the one rank answers."""
        return [getattr(self.worker, method)(*arguments)]

    def __len__(self) -> int:
        return 1


def make_worker(model: Path) -> Any:
    """One rank."""
    from grpo_rl.algos.objective import Objective
    from grpo_rl.config.schema.tree import ModelConfig, OptimConfig
    from grpo_rl.workers.actor import ActorWorker
    from grpo_rl.workers.specs import ActorSpec, PolicySpec, Rank

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    policy = PolicySpec(ModelConfig(path=str(model)), temperature=1.0, dtype="float32", train=True)
    spec = ActorSpec(policy, Objective(), OptimConfig(lr=1e-6), total_optimizer_steps=10_000, seed=1)
    return ActorWorker(spec, Rank(0, 1, "127.0.0.1", port, "cpu", 60.0))


def make_saving(worker: Any, run_dir: Path) -> Any:
    """The saves of a run with this one rank, which keeps two checkpoints."""
    from grpo_rl.algos.objective import Objective
    from grpo_rl.cluster.roles.actor_role import ActorRole
    from grpo_rl.config.derived import MicroBatchRule
    from grpo_rl.config.schema.tree import ActorConfig, Config, TrainerConfig
    from grpo_rl.telemetry.metrics.metrics_file import MetricsFile
    from grpo_rl.trainer.saving import Saving
    from grpo_rl.trainer.schedule import Roles

    group: Any = InProcess(worker)
    group.is_restarted = False
    rule = MicroBatchRule(None, 8)
    actor = ActorRole(group, ActorConfig(), train_rule=rule, forward_rule=rule, old_logprobs="none", objective=Objective())
    metrics = MetricsFile(run_dir / "metrics.jsonl", print)
    output: Any = SimpleNamespace(
        run_dir=SimpleNamespace(checkpoints=run_dir / "checkpoints", recovery=run_dir / "recovery"),
        console=SimpleNamespace(warn=print),
        sinks=metrics,
        rollouts=SimpleNamespace(flush=lambda: None),
        status=SimpleNamespace(update=lambda **_: None),
        stop=SimpleNamespace(finishing=lambda: None),
    )
    return Saving(Config(trainer=TrainerConfig(max_actor_ckpt_to_keep=2)), Roles(actor=actor), output)


def make_step(num: int) -> tuple[Any, Any]:
    """The work of one optimizer step on `num` responses, four of each prompt."""
    import torch

    from grpo_rl.types import Batch
    from grpo_rl.workers.specs import OptimizerStep, Update

    lengths_N = torch.full((num,), RESPONSE_TOKENS)
    group_N = torch.arange(num) // 4
    batch = Batch(
        prompt_lengths_N=torch.full((num,), PROMPT_TOKENS),
        response_lengths_N=lengths_N,
        group_N=group_N,
        token_ids_S=torch.randint(64, 2048, (num * (PROMPT_TOKENS + RESPONSE_TOKENS),)),
        rewards_N=torch.rand(num),
        rollout_logprobs_T=torch.full((num * RESPONSE_TOKENS,), -7.6),
        advantages_T=torch.randn(num * RESPONSE_TOKENS),
    )
    return batch, Update({}, None, (OptimizerStep(batch.counts(), (tuple(range(num)),)),))


def timed(call: Callable[[], Any]) -> float:
    """Seconds that the call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


class Blocks:
    """Blocks of steps, with a save and without."""

    def __init__(self, worker: Any, saving: Any, step: Any, length: int) -> None:
        self.worker, self.saving, self.step, self.length = worker, saving, step, length
        self.number = 0
        self.steps: list[float] = []
        """Seconds of blocks without a save."""
        self.costs: list[float] = []
        """Seconds by which a block with a save took longer than the one before it."""
        self.waits: list[float] = []
        """Seconds of these in which the controller waited."""
        self.gates: list[float] = []
        """Seconds of these in which optimizer steps waited."""
        self._gate_s = 0.0
        before = list(worker.optimizer._optimizer_step_pre_hooks.values())
        worker.optimizer._optimizer_step_pre_hooks.clear()
        worker.optimizer.register_step_pre_hook(lambda *told: self._pass_gate(before, told))
        self.ended_after: list[int] = []
        """Steps after which the save was over."""

    def pair(self) -> None:
        """One block of each kind."""
        without = [self._one_step() for _ in range(self.length)]
        self.number += 1
        gate_s = self._gate_s
        wait = timed(lambda: self.saving.begin(self.number, {"step": self.number}))
        began, looks, ended = time.perf_counter(), 0.0, self.length + 1
        for number in range(1, self.length + 1):
            self.worker.update(*self.step)
            looks += sum(timed(self.saving.poll) for _ in range(LOOKS))
            if number < ended and self.number in self.saving.store.steps():
                ended = number
        self.costs.append(wait + time.perf_counter() - began - sum(without))
        self.saving.finish()
        self.steps += without
        self.waits.append(wait + looks)
        self.gates.append(self._gate_s - gate_s)
        self.ended_after.append(ended)

    def _pass_gate(self, hooks: list[Any], told: tuple[Any, ...]) -> None:
        self._gate_s += timed(lambda: [hook(*told) for hook in hooks])

    def _one_step(self) -> float:
        def whole() -> None:
            self.worker.update(*self.step)
            for _ in range(LOOKS):
                self.saving.poll()

        return timed(whole)


def bench(folder: Path, model: str, repeats: int, responses: int, length: int) -> None:
    """Print medians."""
    from bench_step import make_model

    from grpo_rl.checkpoint.files import show_bytes

    worker, step = make_worker(make_model(folder / "model", model)), make_step(responses)
    saving = make_saving(worker, folder)
    blocks = Blocks(worker, saving, step, length)
    blocks.pair()  # a first optimizer step makes the moments, a first save the memory it copies into
    for results in (blocks.steps, blocks.costs, blocks.waits, blocks.gates, blocks.ended_after):
        results.clear()
    for _ in range(repeats):
        blocks.pair()
    median = statistics.median
    one, cost, wait, gate = (median(of) for of in (blocks.steps, blocks.costs, blocks.waits, blocks.gates))
    stall = median(sum(both) for both in zip(blocks.waits, blocks.gates, strict=True))
    size = sum(path.stat().st_size for path in (saving.store.folder / f"step_{blocks.number}").rglob("*"))
    verified = timed(lambda: saving.store.latest(print))
    print(f"checkpoint: {show_bytes(size)}; medians of {repeats} pairs of blocks of {length} steps")
    print(f"step without a save: {one:.3f} s; a save was over after {median(blocks.ended_after):g} steps")
    print(f"stall: {stall * 1e3:.1f} ms = {100 * stall / one:.1f} % of a step: ", end="")
    print(f"controller {wait * 1e3:.1f} ms, optimizer step {gate * 1e3:.1f} ms")
    print(f"whole cost: {cost * 1e3:.0f} ms = {100 * cost / one:.1f} % of a step")
    print(f"verified on resume: {verified * 1e3:.0f} ms = {size / verified / 1e6:.0f} MB/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["10m", "1m"], default="10m", help="as in bench_step.py")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--responses", type=int, default=8, help="per step: how long a step takes")
    parser.add_argument("--length", type=int, default=6, help="steps per block")
    parser.add_argument("--rivals", type=int, default=0)
    arguments = parser.parse_args()
    rivals = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(arguments.rivals)]
    try:
        with tempfile.TemporaryDirectory() as folder:
            bench(Path(folder), arguments.model, arguments.repeats, arguments.responses, arguments.length)
    finally:
        for rival in rivals:
            rival.kill()
            rival.wait(10)


if __name__ == "__main__":
    main()
