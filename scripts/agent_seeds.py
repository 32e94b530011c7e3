"""Games of several turns over several seeds: the share of solved games before and after, and how long it took.

    .venv/bin/python scripts/agent_seeds.py                              # number_guessing and word_game, seeds 1, 2, 3
    .venv/bin/python scripts/agent_seeds.py word_game 7 8 trainer.total_training_steps=100
    .venv/bin/python scripts/agent_seeds.py --read FOLDER                # the table of runs that are there

Names are recipes of recipes/agents, numbers are seeds (of data order and sampling alike); everything else is passed on as an
override. Solved is the share of sampled training games of the first step, and of the last three; greedy is that of the
validation's games. The bar: below 20 % before, above 80 % after, at most 10 minutes of training, for every seed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

SOLVED = "env/solved"
BAR_BEFORE, BAR_AFTER, BAR_MINUTES = 0.20, 0.80, 10.0
GAMES = ("number_guessing", "word_game")
LAST = 3
"""Steps whose games are counted at the end."""


def main() -> int:
    words = sys.argv[1:]
    out = Path("runs/agent_seeds")
    if words[:1] == ["--read"]:
        out, words = Path(words[1]), words[2:]
    else:
        games = [word for word in words if "=" not in word and not word.isdigit()] or list(GAMES)
        seeds = [int(word) for word in words if word.isdigit()] or [1, 2, 3]
        for game in games:
            for seed in seeds:
                train(out, game, seed, [word for word in words if "=" in word])
    print(
        f"\n{'game':<18} {'seed':>4} {'before':>8} {'after':>8} {'greedy':>8} {'steps':>6} {'training':>10} {'above 80 %':>11}  bar"
    )
    for folder in sorted(path for path in out.iterdir() if (path / "metrics.jsonl").is_file()):
        print(line_of(folder))
    return 0


def train(out: Path, game: str, seed: int, overrides: list[str]) -> None:
    """Train one seed of a recipe into its own folder; exits where the run fails."""
    command = [
        *(sys.executable, "-m", "grpo_rl.main", f"recipe=agents/{game}", f"trainer.default_local_dir={out}"),
        *(f"{key}={seed}" for key in ("trainer.seed", "data.seed", "actor_rollout_ref.rollout.seed")),
        *(f"trainer.experiment_name={game}_{seed}", "trainer.export_at_end=false", *overrides),
    ]
    print(" ".join(command), flush=True)
    subprocess.run(command, check=True)


def line_of(folder: Path) -> str:
    """Return the line of a run's folder."""
    records: list[dict[str, Any]] = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    game, _, seed = folder.name.rpartition("_")
    steps = [record for record in records if SOLVED in record and "timing_s/step" in record]
    greedy = [
        value for record in records for key, value in record.items() if key.startswith("val/") and key.endswith("/mean@1")
    ]
    if not steps:
        return f"{game:<18} {seed:>4}  no step yet"
    solved = [record[SOLVED] for record in steps]
    seconds = [record["timing_s/step"] for record in steps]
    before, after, took = solved[0], fmean(solved[-LAST:]), sum(seconds)
    reached = next(
        (sum(seconds[: n + LAST]) for n in range(len(solved) - LAST + 1) if fmean(solved[n : n + LAST]) > BAR_AFTER), None
    )
    met = before < BAR_BEFORE and after > BAR_AFTER and reached is not None and reached <= 60 * BAR_MINUTES
    return (
        f"{game:<18} {seed:>4} {before:>8.1%} {after:>8.1%} {(greedy or [0.0])[-1]:>8.1%} {len(steps):>6} {took:>8.0f} s "
        f"{'never' if reached is None else f'{reached:.0f} s':>11}  {'met' if met else 'missed'}"
    )


if __name__ == "__main__":
    sys.exit(main())
