"""Ctrl-C in a terminal: whatever the run is doing, what it has learnt is saved, and the terminal looks as it should."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from terminal import Terminal
from test_sync_trainer import Policy, make, make_config  # noqa: F401

TWICE = """
import os, time
from grpo_rl.telemetry.terminal.console import Console
from grpo_rl.trainer.stopping import Stop
console = Console()
stop = Stop(60.0, notice=console.notice, give_back_terminal=console.give_back_terminal)
stop.listen()
stop.phase("save")
console.info("ready")
with console.progress("training", 9) as outer, console.progress("saving"):
    outer.left(100)
    while True:
        time.sleep(0.05)
"""


def test_a_second_interrupt_ends_the_process_and_gives_the_terminal_back(tmp_path: Path) -> None:
    with Terminal([sys.executable, "-c", TWICE], tmp_path) as run:
        run.until("left", 60)
        run.press(b"\x03")
        run.until("stopping within 60 s", 10)
        time.sleep(0.6)  # a person's second press, not the same one passed on
        run.press(b"\x03")
        assert run.wait(10) == 130
        screen = run.screen()
    assert screen.cursor_is_visible
    # The terminal itself shows the first key that was pressed as ^C.
    lines = [line.replace("^C", "").strip() for line in screen.text().splitlines()]
    assert [line for line in lines if line] == [
        "ready",
        "SIGINT: stopping within 60 s (trainer.grace_s)",
        "interrupted again: ended at once",
    ]


LOADING = "import sys; from grpo_rl.main import main; print('ready', flush=True); sys.exit(main(['trainer.device=cpu']))"


@pytest.mark.parametrize("delay_s", [0.2, 0.7])
def test_an_interrupt_while_the_command_is_still_loading_is_one_line(tmp_path: Path, delay_s: float) -> None:
    with Terminal([sys.executable, "-c", LOADING], tmp_path) as run:
        run.until("ready", 60)
        time.sleep(delay_s)
        run.press(b"\x03")
        assert run.wait(60) == 130
        assert run.screen().text().replace("^C", "").split() == ["ready", "interrupted"]
