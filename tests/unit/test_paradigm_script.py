"""The comparison of the methods: its table and its statements follow from the runs that are there, and go between two marks."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import paradigm


def run(out: Path, name: str, accuracies: list[float], *, every: int = 20, complete: bool = True) -> None:
    """A run's folder with these validations, the first one before training."""
    folder = out / name
    folder.mkdir()
    rows = [{"step": number * every, paradigm.ACCURACY[paradigm.TASK]: value} for number, value in enumerate(accuracies)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if complete:
        (folder / "report.txt").touch()


def found(out: Path) -> paradigm.Curves:
    curves = {
        method: {seed: points for seed in (1, 2) if (points := paradigm.curve(out / f"{method.name}_{seed}", method))}
        for method in paradigm.METHODS
    }
    return {method: seeds for method, seeds in curves.items() if seeds}


@pytest.fixture
def runs(tmp_path: Path) -> paradigm.Curves:
    run(tmp_path, "rft_1", [0.2, 0.4, 0.5])
    run(tmp_path, "rft_2", [0.2, 0.4, 0.6])
    run(tmp_path, "online_rft_1", [0.2, 0.3, 0.7])
    run(tmp_path, "online_rft_2", [0.2, 0.3, 0.7])
    run(tmp_path, "grpo_os_1", [0.2, 0.3, 0.8])
    run(tmp_path, "grpo_os_2", [0.2, 0.3], complete=False)
    run(tmp_path, "iterate_1", [0.2, 0.3, 0.4, 0.45, 0.5], every=paradigm.CYCLE)
    return found(tmp_path)


def test_the_table_has_the_mean_and_the_spread_over_the_seeds_of_complete_runs(runs: paradigm.Curves) -> None:
    assert paradigm.table_of(runs)[2:] == [
        "| GRPO+OS | 1 | 0.200 | 0.300 | 0.800 | - | - |",
        "| online RFT | 2 | 0.200 | 0.300 | 0.700 | - | - |",
        "| RFT | 2 | 0.200 | 0.400 | 0.550 | 0.071 | 4.9 |",
        "| iterative GRPO | 1 | 0.200 | 0.400 | 0.500 | - | - |",
    ]


def test_an_order_is_compared_seed_by_seed(runs: paradigm.Curves) -> None:
    assert paradigm.orders(runs) == [
        "- online RFT above RFT: +0.150 on average, in every one of the seeds (+0.200, +0.100).",
        "- GRPO+OS above online RFT: +0.100 on average, in every one of the seeds (+0.100).",
    ]
