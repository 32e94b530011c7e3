"""A person at a terminal: Ctrl-C, a pipe whose reader dies, a closed window, and the same name used twice. One run after the other."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from oracles import Training
from terminal import CTRL_C, Terminal

from grpo_rl.telemetry.status import read_status

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(900)]
REACHED_S = 200.0
END_S = 100.0
NAME = "shared"


class Scene:
    """One experiment name, started again and again in one folder."""

    def __init__(self, folder: Path, words: Sequence[str]) -> None:
        self.folder, self.path = folder, folder / "runs" / NAME
        self.command = [sys.executable, "-m", "grpo_rl.main", f"trainer.default_local_dir={folder / 'runs'}"]
        self.command += [f"trainer.experiment_name={NAME}", "trainer.logger=[console]", *words]
        self.num_starts = 0

    @property
    def status(self) -> dict[str, Any]:
        return read_status(self.path)

    def start(self, faults: str, pipe: str = "", command: Sequence[str] = ()) -> Terminal:
        """Start the run on a terminal: its output into `pipe` where one is given, or by a `command` of its own."""
        self.num_starts += 1
        state = self.folder / f"faults{self.num_starts}"
        state.mkdir()
        command = command or self.command if not pipe else ["bash", "-c", f"{shlex.join(self.command)} 2>&1 | {pipe}"]
        return Terminal(command, self.folder, {"HF_HUB_OFFLINE": "1", "GRPO_FAULT": faults, "GRPO_FAULT_STATE": str(state)})

    def reached(self, step: int, phase: str) -> Callable[[], bool]:
        """Return a condition: the run that was started last is in this phase."""
        before = self.status.get("pid")

        def is_there() -> bool:
            status = self.status
            return (status.get("step"), status.get("phase")) == (step, phase) and status.get("pid") != before

        return is_there


@pytest.fixture(scope="module")
def scene(run_words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene(tmp_path_factory.mktemp("terminal"), run_words)


def test_an_interrupt_while_sampling_saves_the_last_whole_step_and_the_screen_is_clean(scene: Scene) -> None:
    there = scene.reached(3, "gen")
    with scene.start("driver.phase:delay=60@step=3,phase=gen") as terminal:
        terminal.until(there, REACHED_S)
        terminal.press(CTRL_C)
        assert terminal.wait(END_S) == 75, terminal.screen().text()
        screen = terminal.screen()
    shown = screen.text().replace("^C", "")
    assert "stopped: by SIGINT: step 2 of 4 is saved; the same command goes on from there" in shown
    assert "SIGINT: stopping within 60 s (trainer.grace_s)" in shown
    assert "Traceback" not in shown and "KeyError" not in shown and "━" not in shown
    assert screen.cursor_is_visible and screen.lines[screen.row] == ""
    assert (scene.status["state"], scene.status["last_commit"], scene.status["step"]) == ("preempted", 2, 2)


def test_an_interrupt_that_kills_tee_saves_too_and_another_start_of_the_same_name_changes_nothing(scene: Scene) -> None:
    there = scene.reached(3, "update_actor")
    scene.command.append("trainer.total_training_steps=5")
    with scene.start("driver.phase:delay=20@step=3,phase=update_actor", "tee screen.txt") as terminal:
        terminal.until(there, REACHED_S)
        began = time.monotonic()
        second = subprocess.run(scene.command, cwd=scene.folder, capture_output=True, text=True, timeout=60)
        print(f"MEASURED the second start was refused after {time.monotonic() - began:.1f} s")
        assert second.returncode == 2
        assert f"another process (pid {scene.status['pid']} on {scene.status['host']}, since " in second.stderr
        terminal.press(CTRL_C)
        terminal.wait(END_S)
    assert (scene.status["state"], scene.status["last_commit"]) == ("preempted", 3)
    assert scene.status["error"]["exit_code"] == 75
    log = (scene.path / "logs" / "console.log").read_text()
    assert "stopped: by SIGINT: step 3 of 5 is saved" in log
    assert (
        "trainer.total_training_steps: 4 -> 5" in log
        and "trainer.total_training_steps: 4 -> 5" in (scene.folder / "screen.txt").read_text()
    )


def test_a_closed_terminal_saves_and_stops_a_run_whose_pipe_was_closed_long_before(scene: Scene) -> None:
    there = scene.reached(5, "gen")
    with scene.start("driver.phase:delay=60@step=5,phase=gen", "head -n 1 > first.txt") as terminal:
        terminal.until(there, REACHED_S)
        pid = scene.status["pid"]
        terminal.hang_up()
        terminal.wait(END_S)
        deadline = time.monotonic() + END_S
        while Path(f"/proc/{pid}").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)  # polling: the shell need not wait for it
    assert len((scene.folder / "first.txt").read_text().splitlines()) == 1
    status = scene.status
    assert (status["state"], status["last_commit"], status["error"]["exit_code"]) == ("preempted", 4, 75)
    assert "by SIGHUP: step 4 of 5 is saved" in status["error"]["message"]


def test_it_still_goes_on_to_the_end(scene: Scene, tmp_path: Path) -> None:
    run = Training(scene.folder, NAME, scene.command[scene.command.index("trainer.logger=[console]") + 1 :])
    try:
        assert run.start().wait(REACHED_S) == 0, run.describe()
    finally:
        run.end()
    assert scene.status["state"] == "done" and scene.status["last_commit"] == 5
