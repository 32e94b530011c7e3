"""A benchmark of the controller's arithmetic: every advantage estimator on a large batch, with one thread.

    .venv/bin/python scripts/bench_algos.py                          # 16,384 rollouts of 4,096 tokens
    .venv/bin/python scripts/bench_algos.py --lengths ragged         # lengths from 0 to 8,192
    .venv/bin/python scripts/bench_algos.py --rollouts 2048 --only gae

Columns: seconds by the wall clock and of the processor (the smallest of --repeats), and how far the process grew
beyond its inputs at most, in bytes per trained token. The bar: under 2 seconds each. On a machine that does other
work as well, the processor's column is the one to compare. The last row is the bare cost of new memory: writing
one float32 column.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from grpo_rl.algos.advantages.registered import ADVANTAGES, AdvantageInput, token_rewards

BAR_SECONDS = 2.0
GROUP = 8
STEPS_PER_ROLLOUT = 16


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=16_384)
    parser.add_argument("--tokens", type=int, default=4_096, help="mean tokens of a response")
    parser.add_argument("--lengths", choices=("equal", "ragged"), default="equal")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="*", help="names of estimators")
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    inp = make_input(arguments.rollouts, arguments.tokens, arguments.lengths)
    num_tokens = len(inp.token_rewards_T)
    print(f"{arguments.rollouts:,} rollouts, {num_tokens:,} trained tokens ({arguments.lengths} lengths), one thread\n")
    print(f"{'':30} {'wall':>8} {'processor':>10} {'bytes/token':>12}  bar {BAR_SECONDS:g} s")
    for name in arguments.only or sorted(ADVANTAGES):
        report(name, partial(ADVANTAGES.get(name), inp), num_tokens, arguments.repeats)
    report("token_rewards", partial(token_rewards, inp.rewards_N, inp.lengths_N), num_tokens, arguments.repeats)
    report("(one float32 column)", lambda: torch.empty(num_tokens).fill_(1.0), num_tokens, arguments.repeats)
    return 0


def make_input(num_rollouts: int, mean_length: int, lengths: str) -> AdvantageInput:
    """A batch with every column that some estimator needs; rewards 0 or 1, groups of 8, interleaved."""
    generator = torch.Generator().manual_seed(0)
    if lengths == "equal":
        lengths_N = torch.full((num_rollouts,), mean_length)
    else:
        lengths_N = torch.randint(0, 2 * mean_length + 1, (num_rollouts,), generator=generator)
    rewards_N = torch.randint(0, 2, (num_rollouts,), generator=generator).float()
    num_tokens = int(lengths_N.sum())
    ends_N = lengths_N.cumsum(0)
    within = torch.rand(num_rollouts, STEPS_PER_ROLLOUT, generator=generator)
    step_ends_K = ((ends_N - lengths_N)[:, None] + (within * lengths_N[:, None]).long())[lengths_N > 0].flatten()
    return AdvantageInput(
        token_rewards_T=token_rewards(rewards_N, lengths_N),
        lengths_N=lengths_N,
        group_N=torch.randperm(num_rollouts, generator=generator) // GROUP,
        rewards_N=rewards_N,
        values_T=torch.rand(num_tokens, generator=generator),
        baselines_N=torch.rand(num_rollouts, generator=generator),
        step_ends_K=step_ends_K,
        step_rewards_K=torch.rand(len(step_ends_K), generator=generator),
        reward_parts_NP=torch.rand(num_rollouts, 3, generator=generator),
    )


def report(name: str, action: Callable[[], object], num_tokens: int, repeats: int) -> None:
    """Run `action` several times and print its row."""
    times, peak = [], 0
    for _ in range(repeats):
        with PeakMemory() as memory:
            wall, processor = time.perf_counter(), time.thread_time()
            action()
            times.append((time.perf_counter() - wall, time.thread_time() - processor))
        peak = max(peak, memory.grown)
    wall, processor = min(w for w, _ in times), min(p for _, p in times)
    verdict = "met" if wall < BAR_SECONDS else "met on a core of its own" if processor < BAR_SECONDS else "MISSED"
    print(f"{name:30} {wall:>6.2f} s {processor:>8.2f} s {peak / max(num_tokens, 1):>12.1f}  {verdict}", flush=True)


class PeakMemory:
    """The growth of this process while the block runs, sampled every few milliseconds."""

    def __enter__(self) -> PeakMemory:
        self._start = self._highest = _resident_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.grown = self._highest - self._start

    def _watch(self) -> None:
        while not self._stop.wait(0.005):
            self._highest = max(self._highest, _resident_bytes())


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


if __name__ == "__main__":
    sys.exit(main())
