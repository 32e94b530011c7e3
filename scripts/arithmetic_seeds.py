"""The embedded task over several seeds: greedy accuracy on held-out problems before and after, and how long it took.

    .venv/bin/python scripts/arithmetic_seeds.py            # seeds 1, 2, 3
    .venv/bin/python scripts/arithmetic_seeds.py 7 8 trainer.total_training_steps=100

Numbers are seeds (of data order, sampling and dropout alike); everything else is passed on as an override.
The bar: at least 30 points more, at least 90 %, at most 5 minutes of training, for every seed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

KEY = "val/arithmetic/mean@1"
BAR_GAIN, BAR_AFTER, BAR_MINUTES = 0.30, 0.90, 5.0


def main() -> int:
    seeds = [int(word) for word in sys.argv[1:] if word.isdigit()] or [1, 2, 3]
    overrides = [word for word in sys.argv[1:] if not word.isdigit()]
    rows = [run(seed, overrides) for seed in seeds]
    print(f"\n{'seed':>6} {'before':>8} {'after':>8} {'gain':>8} {'steps':>6} {'training':>10} {'per step':>9}  bar")
    for seed, before, after, steps, seconds in rows:
        met = after - before >= BAR_GAIN and after >= BAR_AFTER and seconds <= 60 * BAR_MINUTES
        print(
            f"{seed:>6} {before:>8.1%} {after:>8.1%} {after - before:>+8.1%} {steps:>6} {seconds:>8.0f} s {seconds / steps:>7.2f} s  "
            f"{'met' if met else 'missed'}"
        )
    return 0


def run(seed: int, overrides: list[str]) -> tuple[int, float, float, int, float]:
    """Seed, accuracy before and after, steps, and seconds from the first step's beginning to the last validation's end."""
    with tempfile.TemporaryDirectory() as base:
        command = [
            *(sys.executable, "-m", "grpo_rl.main", "recipe=arithmetic/grpo", f"trainer.default_local_dir={base}"),
            *(f"{key}={seed}" for key in ("trainer.seed", "data.seed", "actor_rollout_ref.rollout.seed")),
            *("trainer.experiment_name=seed", *overrides),
        ]
        print(" ".join(command), flush=True)
        subprocess.run(command, check=True)
        records = [json.loads(line) for line in (Path(base) / "seed" / "metrics.jsonl").read_text().splitlines()]
    scores = [record[KEY] for record in records if KEY in record]
    steps = [record for record in records if "timing_s/step" in record]
    return seed, scores[0], scores[-1], len(steps), sum(record["timing_s/step"] for record in steps)


if __name__ == "__main__":
    sys.exit(main())
