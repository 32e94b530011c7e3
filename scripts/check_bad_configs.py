"""Start the program with every bad configuration of the corpus, as a user would: seconds and exit codes."""

from __future__ import annotations

import os
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
    """0 when all were refused with exit code 2, one line per problem and no traceback."""
    every = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    seconds: list[float] = []
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        cases = [words for words, _, _ in BAD if not any("\0" in word for word in words)]
        for index, (text, _) in enumerate(BAD_RECIPES):
            file = Path(folder) / f"{index}.yaml"
            file.write_text(text)
            cases.append([f"recipe={file}"])
        for words in cases[::every]:
            started = time.perf_counter()
            done = subprocess.run(
                [sys.executable, "-m", "grpo_rl.main", *words],
                cwd=folder,
                env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                timeout=120,
            )
            seconds.append(time.perf_counter() - started)
            if done.returncode != 2 or "Traceback" in done.stderr or "problem" not in done.stderr:
                wrong.append(f"{str(words)[:100]}: exit code {done.returncode}: {done.stderr[-200:]}")
        left = [entry.name for entry in Path(folder).iterdir() if entry.suffix != ".yaml"]
    print(f"{len(seconds)} configurations; wrong: {len(wrong)}; left behind: {left}")
    print(
        f"seconds: p50 {statistics.median(seconds):.2f}, max {max(seconds):.2f}, above {BOUND_S:g} s: {sum(s > BOUND_S for s in seconds)}"
    )
    print("\n".join(wrong))
    return bool(wrong or left)


if __name__ == "__main__":
    sys.exit(main())
