"""The display of the step that is going on."""

from __future__ import annotations

from typing import Any

from grpo_rl.telemetry.terminal.bars import Bar
from grpo_rl.trainer.metrics import Timer
from grpo_rl.trainer.progress import StepProgress


class Notes(Bar):
    """A bar that remembers what it was told."""

    def __init__(self) -> None:
        super().__init__(None, None)
        self.said: list[tuple[float, str | None]] = []

    def advance(self, k: float = 1, note: str | None = None) -> None:
        self.said.append((k, note))


def test_phases_are_announced_as_they_begin_and_responses_are_counted() -> None:
    bar, submitted = Notes(), []
    progress = StepProgress(bar)
    timer = Timer(progress.phase)
    rollouts: list[Any] = ["first", "second"]
    with timer("gen"):
        finished = progress.counting(submitted.append, 2)
        for rollout in rollouts:
            finished(rollout)
    with timer("update_actor"):
        assert bar.said[-1] == (0, "updating the actor")
    progress.done()
    assert submitted == rollouts
    assert bar.said == [(0, "sampling"), (0, "sampling 1 of 2"), (0, "sampling 2 of 2"), (0, "updating the actor"), (1, "")]


def test_without_a_bar_nothing_is_shown_and_rollouts_are_still_handed_on() -> None:
    submitted: list[Any] = []
    progress = StepProgress()
    progress.phase("gen")
    rollout: Any = "only"
    progress.counting(submitted.append, 1)(rollout)
    progress.done()
    assert submitted == ["only"]
