"""Break checkpoints in every way, many times, and print a table: `python scripts/fuzz_checkpoints.py --count 1000`.

Damage: `--count` trials, seeded, over every kind there is; each starts as a run would, and none may load anything but
what was written. Crash points: saves by 1 to 4 ranks, first ones, repeated ones and such that remove older ones, die at
every call that changes the disk, once killed and once with a power cut. Exit code 1 where anything went wrong.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from checkpoint_trials import DAMAGE, SCENES, Trials, break_save

KINDS = ("fell back", "refused", "unharmed", "LOADED")


def fuzz(count: int, seed: int, folder: Path, console: Console) -> int:
    """The number of trials that loaded what was not written."""
    trials, names = Trials(folder), sorted(DAMAGE)
    outcomes: defaultdict[str, Counter[str]] = defaultdict(Counter)
    details = []
    for number in range(count):
        name = names[number % len(names)]
        outcome = trials.run(name, seed + number)
        outcomes[name][outcome.kind] += 1
        if outcome.kind == "LOADED":
            details.append(f"{name}, seed {seed + number}: {outcome.detail}")
    table = Table("damage", *KINDS)
    for name, counted in outcomes.items():
        table.add_row(name, *(str(counted[kind] or "") for kind in KINDS))
    total = sum(outcomes.values(), Counter())
    table.add_section()
    table.add_row(f"{count} trials", *(str(total[kind]) for kind in KINDS))
    console.print(table)
    for detail in details:
        console.print(detail, markup=False)
    return len(details)


def crash_points(folder: Path, console: Console) -> int:
    """The number of crash points from which there was no recovery."""
    points = failed = 0
    for number, scene in enumerate(SCENES):
        for power_cut in (False, True):
            calls = break_save(folder / f"{number}_{power_cut}", scene, None, power_cut=power_cut)
            for at in range(calls):
                points += 1
                try:
                    break_save(folder / f"{number}_{power_cut}_{at}", scene, at, power_cut=power_cut)
                except AssertionError as error:
                    failed += 1
                    console.print(f"{scene}, call {at}, power cut {power_cut}: {error}", markup=False)
    console.print(f"{points} crash points, {points - failed} recover")
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    console, began = Console(), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        bad = fuzz(arguments.count, arguments.seed, Path(folder) / "damage", console)
        middle = time.perf_counter()
        bad += crash_points(Path(folder) / "crashes", console)
        console.print(f"{middle - began:.1f} s and {time.perf_counter() - middle:.1f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
