"""A request to stop means the same below `tee`, `nohup`, `timeout` and `setsid`: saved, exit code 75, and a whole log.

One run is started below each of them in turn and goes on from where the one before was stopped.
"""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from terminal import CTRL_C, Terminal
from test_terminal import END_S, REACHED_S, Scene

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(900)]


def press(terminal: Terminal, scene: Scene) -> None:
    """Ctrl-C on the terminal."""
    terminal.press(CTRL_C)


def expire(terminal: Terminal, scene: Scene) -> None:
    """The end of the time of `timeout`, whose own clock sends it SIGALRM."""
    os.kill(parent(scene.status["pid"]), signal.SIGALRM)


def kill_controller(terminal: Terminal, scene: Scene) -> None:
    """`kill -INT`, since a terminal's Ctrl-C does not reach another session."""
    os.kill(scene.status["pid"], signal.SIGINT)


def parent(pid: int) -> int:
    """Return the parent of a process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


# The shell gets Ctrl-C as well; with a trap it goes on to the line after, and its children are killed as ever.
WRAPPED: list[tuple[str, str, Callable[[Terminal, Scene], None]]] = [
    ("tee", "trap : INT; {command} 2>&1 | tee screen.txt; echo code=${{PIPESTATUS[0]}}", press),
    ("nohup", "trap : INT; nohup {command} > screen.txt 2>&1; echo code=$?", press),
    ("timeout", "timeout --preserve-status -s INT 3600 {command} > screen.txt 2>&1; echo code=$?", expire),
    ("setsid", "setsid -w {command} > screen.txt 2>&1; echo code=$?", kill_controller),
]
FIRST_STEP = 2


@pytest.fixture(scope="module")
def scene(run_words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene(tmp_path_factory.mktemp("wrapped"), [*run_words, f"trainer.total_training_steps={FIRST_STEP + len(WRAPPED)}"])


@pytest.mark.parametrize("number", range(len(WRAPPED)), ids=[name for name, _, _ in WRAPPED])
def test_a_stop_below_another_command_saves_and_exits_with_75(scene: Scene, number: int) -> None:
    name, line, stop = WRAPPED[number]
    step = FIRST_STEP + number
    there = scene.reached(step, "gen")
    faults = f"driver.phase:delay=60@step={step},phase=gen"
    command = ["bash", "-c", line.format(command=shlex.join(scene.command))]
    with scene.start(faults, command=command) as terminal:
        terminal.until(there, REACHED_S)
        stop(terminal, scene)
        terminal.until("code=", END_S)
        terminal.wait(END_S)
        assert "code=75" in terminal.screen().text(), terminal.screen().text()
    assert (scene.status["state"], scene.status["last_commit"], scene.status["step"]) == ("preempted", step - 1, step - 1)
    assert scene.status["restarts"] == {}, "a worker was hit"
    log = (scene.path / "logs" / "console.log").read_text()
    said = f"stopped: by SIGINT: step {step - 1} of {FIRST_STEP + len(WRAPPED)} is saved"
    assert "SIGINT: stopping within 60 s (trainer.grace_s)" in log and said in log
    # tee itself dies of Ctrl-C, with what it had not written yet.
    assert name == "tee" or said in (scene.folder / "screen.txt").read_text()
    assert "Traceback" not in log and "Traceback" not in (scene.folder / "screen.txt").read_text()
