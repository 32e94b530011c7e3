"""Milliseconds that a program costs by itself, and in the sandbox: one case, and each further one of the same response."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import time
from collections.abc import Callable

from grpo_rl.rewards.code.code_rule import code
from grpo_rl.rewards.sandbox.sandbox import Case, Sandbox, interpreter

PROGRAM = "a, b = map(int, input().split())\nprint(a + b)\n"


def bare() -> None:
    words = [interpreter(), "-I", "-S", "-c", PROGRAM]
    assert subprocess.run(words, input=b"1 2\n", capture_output=True, check=True).stdout == b"3\n"


def sandboxed(cases: int) -> None:
    with Sandbox(PROGRAM) as sandbox:
        for _ in range(cases):
            assert sandbox.run(Case(stdin="1 2\n")).stdout == b"3\n"


def reward(cases: int) -> None:
    tests = {"inputs": ["1 2\n"] * cases, "outputs": ["3\n"] * cases}
    assert code("code", f"```python\n{PROGRAM}```", tests)["acc"] == 1.0


def milliseconds(run: Callable[[], None], repeats: int) -> tuple[float, float]:
    """Median and least over the repeats; the least is what counts on a machine with other work."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times), min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=50)
    repeats = parser.parse_args().repeats
    few = max(5, repeats // 5)
    one, twenty = milliseconds(lambda: sandboxed(1), repeats), milliseconds(lambda: sandboxed(20), few)
    further = ((twenty[0] - one[0]) / 19, (twenty[1] - one[1]) / 19)
    table = {
        "bare interpreter, one case": milliseconds(bare, repeats),
        "sandbox, one case": one,
        "sandbox, each further case": further,
        "reward `code`, 20 cases": milliseconds(lambda: reward(20), few),
    }
    print(f"{'milliseconds':30} median   least")
    for name, (median, least) in table.items():
        print(f"{name:30} {median:6.1f}  {least:6.1f}")


if __name__ == "__main__":
    main()
