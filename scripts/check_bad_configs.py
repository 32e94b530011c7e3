"""Start the program with every bad configuration of the corpus, as a user would: seconds and exit codes.

`python scripts/check_bad_configs.py` starts all of them, one after the other; `--part 1/3` the first third of them.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests/unit/config"))

from bad_configs import BAD, BAD_RECIPES  # noqa: E402

BOUND_S = 2.0


def main() -> int:
    """0 when all were refused with exit code 2 within 2 s of processor time, one line per problem and no traceback."""
    parser = argparse.ArgumentParser(description="Start the program with every bad configuration of the corpus.")
    parser.add_argument("--part", default="1/1", help="which part of the corpus, as 2/3")
    part, of = (int(number) for number in parser.parse_args().part.split("/"))
    waited: list[float] = []
    worked: list[float] = []
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for words in _cases(Path(folder))[part - 1 :: of]:
            before, started = _processor_seconds(), time.perf_counter()
            done = subprocess.run(
                [sys.executable, "-m", "grpo_rl.main", *words],
                cwd=folder,
                env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                timeout=120,
            )
            waited.append(time.perf_counter() - started)
            worked.append(_processor_seconds() - before)
            if done.returncode != 2 or "Traceback" in done.stderr or "problem" not in done.stderr:
                wrong.append(f"{str(words)[:100]}: exit code {done.returncode}: {done.stderr[-200:]}")
            if worked[-1] > BOUND_S:
                wrong.append(f"{str(words)[:100]}: {worked[-1]:.1f} s of processor time")
        left = [entry.name for entry in Path(folder).iterdir() if entry.suffix != ".yaml"]
    print(f"{len(worked)} configurations; wrong: {len(wrong)}; left behind: {left}")
    for name, seconds in (("processor", worked), ("wall clock", waited)):
        above = sum(second > BOUND_S for second in seconds)
        print(f"{name} seconds: p50 {statistics.median(seconds):.2f}, max {max(seconds):.2f}, above {BOUND_S:g} s: {above}")
    print("\n".join(wrong))
    return bool(wrong or left)


def _cases(folder: Path) -> list[list[str]]:
    """The words of every case; the recipes among them are written to `folder`. A command line cannot hold a NUL."""
    cases = [words for words, _, _ in BAD if not any("\0" in word for word in words)]
    for index, (text, _) in enumerate(BAD_RECIPES):
        file = folder / f"{index}.yaml"
        file.write_text(text)
        cases.append([f"recipe={file}"])
    return cases


def _processor_seconds() -> float:
    """Return the seconds of a processor that all processes have used which this one started and waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    sys.exit(main())
