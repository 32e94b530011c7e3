"""Fixtures of all tests of the trainer."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import compositions
import pytest
from real_roles import WORDS, MakeRun, Record, half_right
from test_preemption import listening

from grpo_rl import testing
from grpo_rl.testing import Answers
from grpo_rl.trainer import in_flight
from grpo_rl.trainer.run import RunLoop

__all__ = ["listening"]

composed = functools.cache(testing.composed)


@pytest.fixture
def make_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeRun]:
    """Makes runs in the same folder, each after the end of the one before."""
    monkeypatch.setattr(in_flight, "LOOK_S", 0.002)  # an update of the embedded model takes a few milliseconds
    monkeypatch.setattr(testing, "compose", compositions.compose)
    with ExitStack() as stack:

        def made(
            *words: str,
            steps: int,
            rows: int = 6,
            answers: Answers | None = half_right,
            base: tuple[str, ...] | None = None,
            **clock: int,
        ) -> tuple[RunLoop, Record]:
            stack.close()
            base = base or (*WORDS, f"data.train_files=task:arithmetic?num_rows={rows}")
            settings = composed((*base, f"trainer.total_training_steps={steps}", *words))
            run = stack.enter_context(testing.run_loop(settings, tmp_path, answers, **clock))
            return run, Record(run)

        yield made
