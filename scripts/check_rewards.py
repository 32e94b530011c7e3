"""Grade real data sets with their own answers: `python scripts/check_rewards.py [../shared/data]`.

For each set: how many ground truths earn 1 for themselves, how many earn anything for their neighbour's (where the two
differ in writing), and the processor time of one call, once warm. Exit code 1 if a ground truth does not earn 1.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from grpo_rl.config.schema.tree import DataConfig
from grpo_rl.rewards.check import IN_MARKS, Row, read_rows
from grpo_rl.rewards.registry import auto

SETS = {
    "GSM8K test": "gsm8k/gsm8k_test.parquet",
    "GSM8K train": "gsm8k/gsm8k_train.parquet",
    "MATH train": "math/train.parquet",
    "countdown test": "countdown/test.parquet",
}
SHOWN = 20


def graded(row: Row, ground_truth: Any) -> tuple[float, float]:
    """`acc` of the row's right response for `ground_truth`, and the milliseconds of the processor that it took."""
    assert row.response is not None
    start = time.process_time()
    result = auto(row.data_source, row.response, ground_truth, row.extra_info)
    milliseconds = 1000 * (time.process_time() - start)
    assert isinstance(result, dict)
    return result["acc"], milliseconds


def main(folder: Path, console: Console) -> int:
    table = Table("set", "rows", "gold = gold", "neighbours", "neighbour = 1", "p50 ms", "p99 ms", "max ms", "neighbour p99 ms")
    wrong, equal = 0, []
    for name, file in SETS.items():
        if not (folder / file).is_file():
            console.print(f"{name}: there is no {folder / file}; left out")
            continue
        read = read_rows([str(folder / file)], sys.maxsize, None, DataConfig(), ["auto"])
        rows = [row._replace(response=row.forms[IN_MARKS]) for row in read if IN_MARKS in row.forms]
        graded(rows[0], rows[0].ground_truth)
        own = [graded(row, row.ground_truth) for row in rows]
        pairs = [
            (row, other)
            for row, other in zip(rows, [*rows[1:], rows[0]], strict=True)
            if row.ground_truth != other.ground_truth
        ]
        neighbours = [graded(row, other.ground_truth) for row, other in pairs]
        same = [pair for pair, (acc, _) in zip(pairs, neighbours, strict=True) if acc]
        equal += [(name, row.ground_truth, other.ground_truth) for row, other in same]
        right, times = sum(acc for acc, _ in own), [milliseconds for _, milliseconds in own]
        wrong += len(rows) - int(right)
        figures = [*np.percentile(times, (50, 99, 100)), np.percentile([t for _, t in neighbours], 99)]
        table.add_row(
            name, str(len(rows)), f"{right:.0f}", str(len(pairs)), str(len(same)), *(f"{figure:.3f}" for figure in figures)
        )
    console.print(table)
    for name, own_gold, other_gold in equal[:SHOWN]:
        console.print(f"{name}: {own_gold!r} earns 1 for its neighbour's {other_gold!r}", markup=False)
    return int(wrong > 0)


if __name__ == "__main__":
    here = Path(__file__).resolve().parents[1]
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else here / ".." / "shared" / "data", Console(width=140)))
