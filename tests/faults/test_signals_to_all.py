"""Signals for the controller that reach every process, as a terminal, `timeout` and batch systems send them.

One training is stopped three times and goes on each time.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import oracles
import pytest
from oracles import Training
from tiny_run import BAD_GRADIENT, STEPS

from grpo_rl.cluster.session import run_watcher

END_S = 300.0
pytestmark = [pytest.mark.campaign, pytest.mark.timeout(1200)]
NOISE = ("(raylet)", "worker died", "OOM", "application-level", "cluster is lost", "Traceback")


def to_its_group(run: Training, family: list[int], number: int) -> None:
    """Send the signal as a terminal does for Ctrl-C or when it is closed, and `timeout` at its end."""
    assert run.process is not None
    os.killpg(run.process.pid, number)


def to_each(run: Training, family: list[int], number: int) -> None:
    """Send the signal as a batch system does that finds a job's processes by their control group."""
    assert run.process is not None
    for pid in [*family, run.process.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


STOPS: list[tuple[int, str, Callable[[Training, list[int], int], None], signal.Signals]] = [
    (1, "update_actor", to_its_group, signal.SIGINT),
    (2, "gen", to_each, signal.SIGTERM),
    (3, "gen", to_its_group, signal.SIGHUP),
]
"""Step, phase, processes and signal of each stop."""


@dataclass
class Stopped:
    """Code, status and output of one start of the run."""

    code: int
    status: dict[str, Any]
    lines: list[str]
    left: oracles.Left


@dataclass
class Story:
    run: Training
    stops: list[Stopped]
    end_code: int
    screen: str


@pytest.fixture(scope="module")
def story(run_words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    run = Training(tmp_path_factory.mktemp("signals"), "signals", run_words, BAD_GRADIENT)
    try:
        stops = [stopped(run, *stop) for stop in STOPS]
        run.start()
        code = run.wait(END_S)
        yield Story(run, stops, code, "\n".join((run.folder / f"signals.{end}").read_text() for end in ("out", "err")))
    finally:
        run.end()


def stopped(
    run: Training, step: int, phase: str, send: Callable[[Training, list[int], int], None], number: signal.Signals
) -> Stopped:
    run.start().until(lambda status: status["step"] >= step and status["phase"] == phase, END_S)
    assert run.process is not None
    family = list(run_watcher.processes(run.sessions[-1]["token"]))
    send(run, family, number)
    code = run.wait(END_S)
    return Stopped(code, run.status, run.error_lines(), oracles.left(run))


@pytest.mark.parametrize("number", range(len(STOPS)), ids=[f"{stop[3].name} {stop[2].__name__}" for stop in STOPS])
def test_a_signal_to_all_processes_is_the_controllers_alone_and_the_run_is_saved(story: Story, number: int) -> None:
    step, _, _, sent = STOPS[number]
    seen = story.stops[number]
    assert seen.code == 75, story.run.describe()
    assert seen.status["state"] == "preempted" and seen.status["last_commit"] >= step - 1
    assert seen.status["restarts"] == {}, "a worker was hit"
    assert seen.lines[0].startswith(f"{sent.name}: stopping within"), seen.lines
    assert not [line for line in seen.lines if any(words in line for words in NOISE)]
    assert seen.left.lines == []


def test_the_run_ends_as_the_undisturbed_one_and_its_screen_has_no_noise_of_rays(story: Story, undisturbed: Training) -> None:
    assert story.end_code == 0, story.run.describe()
    assert not [words for words in NOISE if words in story.screen], story.screen
    assert undisturbed.wait(END_S) == 0, undisturbed.describe()
    assert oracles.state_hash(story.run.path, STEPS) == oracles.state_hash(undisturbed.path, STEPS)
    screen = "\n".join((undisturbed.folder / f"undisturbed.{end}").read_text() for end in ("out", "err"))
    assert not [words for words in NOISE if words in screen], screen
