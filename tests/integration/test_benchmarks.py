"""Benchmarks that the documents name run to their end at a small size: they use parts of the program that change."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["bench_checkpoint.py", "--model", "1m", "--repeats", "1", "--length", "2"], "verified on resume:"),
        (
            ["bench_controller.py", "--rollouts", "32", "--tokens", "16", "--ranks", "2", "--replicas", "1", "--steps", "1"],
            "object store, bytes per token:",
        ),
    ],
    ids=["checkpoint", "controller"],
)
def test_a_benchmark_runs(words: list[str], said: str) -> None:
    script, *options = words
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / script), *options],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0 and said in done.stdout, done.stdout[-2000:] + done.stderr[-4000:]
