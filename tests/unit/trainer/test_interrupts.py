"""Ctrl-C in a terminal: whatever the run is doing, what it has learnt is saved, and the terminal looks as it should."""

from __future__ import annotations

import os
import pty
import select
import signal
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from terminal import Screen, Terminal
from test_sync_trainer import Policy, make, make_config  # noqa: F401

from grpo_rl.errors import Preempted
from grpo_rl.telemetry.terminal.console import Console
from grpo_rl.trainer.stopping import Stop


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Console, Callable[..., Screen]]]:
    """A console on a pseudo-terminal, and what is on its screen."""
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (60, 160))
    arrived, num_looks, closing = bytearray(), 0, threading.Event()

    def read() -> None:
        # All the time: a terminal that nobody reads takes some KiB, and then holds up whatever prints on it.
        while not closing.is_set():
            if select.select([ours], [], [], 0.05)[0]:
                arrived.extend(os.read(ours, 65536))

    def look(idle: bool = True) -> Screen:
        """Return what has arrived; with `idle`, when nothing is printed any more, what was printed."""
        nonlocal num_looks
        if idle:
            # The kernel passes output on in a thread of its own: only what was written last shows that all is there.
            os.write(theirs, b"\0")
            num_looks += 1
            deadline = time.monotonic() + 30.0
            while arrived.count(0) < num_looks:
                assert time.monotonic() < deadline
                time.sleep(0.02)  # polling: the screen is a stream of bytes
        screen = Screen()
        screen.feed(bytes(arrived).decode(errors="replace"))
        return screen

    reader = threading.Thread(target=read)
    reader.start()
    with open(theirs, "w", encoding="utf-8", closefd=False) as file:
        console = Console(file)
        assert console.interactive
        yield console, look
        console.close()
    closing.set()
    reader.join()
    os.close(theirs)
    os.close(ours)


def at_call(policy: Policy, monkeypatch: pytest.MonkeyPatch, call: str, count: int, look: Callable[..., Screen]) -> None:
    """Ctrl-C is pressed in the middle of the policy's `count`th call of this name, while a bar is on the screen."""
    original, seen = getattr(policy, call), 0

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen == count:
            deadline = time.monotonic() + 10.0
            while "━" not in look(idle=False).text():
                assert time.monotonic() < deadline
                time.sleep(0.02)  # polling: the screen is a stream of bytes
            assert not look(idle=False).cursor_is_visible
            signal.raise_signal(signal.SIGINT)
            time.sleep(0.25)
        return original(*args, **kwargs)

    monkeypatch.setattr(policy, call, interrupted)


@pytest.mark.parametrize(
    ("call", "count", "saved"),
    [
        ("generate", 4, 2),  # sampling; the first call validates
        ("old_logprobs", 3, 3),
        ("update", 3, 3),
        ("save", 1, 2),  # saving step 2: the commit is finished
        ("generate", 6, 4),  # the validation after step 4
        ("generate", 1, 0),  # the validation at the start
    ],
)
def test_an_interrupt_in_any_phase_saves_the_run_and_leaves_a_clean_screen(make, terminal, monkeypatch, call, count, saved):  # noqa: F811
    console, look = terminal
    trainer, policy = make(make_config(save_freq=2, test_freq=4), total_steps=5)
    trainer.output.console = console
    trainer.output.stop = Stop(60.0, notice=console.notice, give_back_terminal=console.give_back_terminal)
    monkeypatch.setattr(trainer.output.stop, "_fits", lambda: False)
    at_call(policy, monkeypatch, call, count, look)
    trainer.output.stop.listen()
    try:
        with pytest.raises(Preempted) as stopped:
            trainer.fit()
    finally:
        trainer.output.stop.close()
    expected = f"step {saved} of 5 is saved" if saved else "no step was done, so the same command begins anew"
    assert f"by SIGINT: {expected}" in str(stopped.value)
    assert max([0, *trainer.store.steps()]) == saved

    screen = look()
    assert screen.cursor_is_visible and screen.column == 0
    shown = screen.text()
    assert "━" not in shown and "Traceback" not in shown
    assert shown.count("SIGINT: stopping within 60 s (trainer.grace_s)") == 1
    assert screen.lines[screen.row] == "", "the cursor is on a line of its own"
    steps = [line.split()[0] for line in shown.splitlines() if "/5 " in line]
    assert steps[-1:] == (
        [f"{min(saved, 3)}/5"] if call == "generate" and count == 6 else [f"{saved}/5"] if saved else steps[-1:]
    )


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
