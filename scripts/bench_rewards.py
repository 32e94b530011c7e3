"""A benchmark of rewards in their processes: good answers once warm, and the corpus of hostile ones.

python scripts/bench_rewards.py
python scripts/bench_rewards.py --step 512     (only: how long the rewards of such a step of short answers take)
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from grpo_rl.config.schema.tree import RewardConfig
from grpo_rl.rewards.compose import RewardFunction
from grpo_rl.rewards.runtime.runner import RewardRunner
from grpo_rl.types import Prompt, Rollout
from tests.hostile_responses import CANARY, hostile_responses

COUNTDOWN = {"target": 98, "numbers": [44, 19, 35]}
GOOD: dict[str, list[tuple[str, object]]] = {
    "arithmetic": [("55", "55"), ("56", "55")],
    "gsm8k": [("So it is 6 * 3 = 18.\n#### 18", "18"), ("#### 1,000", "1000")],
    "math": [
        (r"The area is $\boxed{\frac{3}{4}}$.", r"\frac{3}{4}"),
        (r"Hence $x = \boxed{2\sqrt{3}}$.", r"\sqrt{12}"),
        (r"\boxed{(1, \frac{1}{2})}", r"(1, 0.5)"),
        (r"\boxed{x^2 + 2x + 1}", r"(x+1)^2"),
    ],
    "countdown": [("<think>44 + 19 = 63, and 35 more.</think><answer>44 + 19 + 35</answer>", COUNTDOWN)],
}
"""Responses and truths by function."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=500, help="good answers of each kind that are timed")
    parser.add_argument("--timeout_s", type=float, default=2.0, help="deadline of a hostile answer")
    parser.add_argument("--step", type=int, help="responses of a step: measure whole steps instead")
    arguments = parser.parse_args()
    if arguments.step is not None:
        for functions in (["arithmetic"], ["gsm8k", "format", "length"]):
            for num_workers in (1, 2, 4):
                steps(functions, num_workers, arguments.step)
        return
    print(f"{'function':<12}{'start s':>9}{'p50 ms':>9}{'p99 ms':>9}{'max ms':>9}{'hostile':>9}{'slowest s':>11}{'failed':>8}")
    CANARY.unlink(missing_ok=True)
    for name in GOOD:
        row(name, arguments.rounds, arguments.timeout_s)
    print(f"no process had more than {resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024:.0f} MB")
    print("model text was run as code" if CANARY.exists() else "no model text was run as code")


def row(name: str, rounds: int, timeout_s: float) -> None:
    """One line of the table: a function by itself, in one process, one response after the other."""
    config = RewardConfig(functions=[name], num_workers=1, timeout_s=timeout_s, on_failure="value", failure_value=0.0)
    started = time.perf_counter()
    runner = RewardRunner(RewardFunction.from_config(config), config, data_sources=[name])
    try:
        runner.check_started()
        start = time.perf_counter() - started
        good = sorted(timed(runner, *GOOD[name][number % len(GOOD[name])])[0] for number in range(rounds))
        truth = GOOD[name][0][1]
        hostile = [timed(runner, text, truth) for _, text in hostile_responses()]
    finally:
        runner.close()
    p99 = good[min(len(good) - 1, round(0.99 * len(good)))]
    print(
        f"{name:<12}{start:>9.2f}{1000 * statistics.median(good):>9.2f}{1000 * p99:>9.2f}{1000 * good[-1]:>9.2f}{len(hostile):>9}"
        f"{max(seconds for seconds, _ in hostile):>11.2f}{sum(failed for _, failed in hostile):>8}"
    )


def steps(functions: list[str], num_workers: int, size: int, rounds: int = 15) -> None:
    """One line: seconds of a whole step, all of whose responses end at once, and of this process's own time in it."""
    config = RewardConfig(functions=functions, num_workers=num_workers)
    runner = RewardRunner(RewardFunction.from_config(config), config, data_sources=["arithmetic"])
    walls, own = [], []
    try:
        runner.check_started()
        for number in range(rounds):
            prompts = [Prompt(f"step{number}-{place}", (1,), "", "arithmetic", str(place)) for place in range(size)]
            rollouts = [Rollout(prompt, 0, (1,), (0.0,), "stop", ((1, 1),), text=prompt.ground_truth) for prompt in prompts]
            started, processor = time.perf_counter(), time.process_time()
            for rollout in rollouts:
                runner.submit(rollout)
            runner.wait(rollouts)
            walls.append(time.perf_counter() - started)
            own.append(time.process_time() - processor)
    finally:
        runner.close()
    print(
        f"{' + '.join(functions)}, {num_workers} processes: {size} responses in {1000 * statistics.median(walls):.1f} ms "
        f"(least {1000 * min(walls):.1f}), of which this process computes {1000 * statistics.median(own):.1f} ms"
    )


def timed(runner: RewardRunner, text: str, truth: object) -> tuple[float, bool]:
    """Seconds until the response is scored, and whether its reward failed."""
    rollout = Rollout(Prompt("bench", (1,), "", "bench", truth), 0, (1,), (0.0,), "stop", ((1, 1),), text=text)
    runner.check_started()
    started = time.perf_counter()
    try:
        runner.wait([rollout])
    except Exception as error:  # one that fails alone is all of its step
        if rollout.failure is None:
            raise error
    return time.perf_counter() - started, rollout.failure is not None


if __name__ == "__main__":
    main()
